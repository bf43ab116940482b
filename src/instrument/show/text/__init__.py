"""Reports as lines of text, Markdown and SARIF; importing it loads neither rich nor jinja2."""
