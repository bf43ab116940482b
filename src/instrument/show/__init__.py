"""What people read: terminal, Markdown, SARIF and pages."""
