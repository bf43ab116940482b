"""What people read: terminal, Markdown, SARIF and pages; computes nothing about a run."""
