"""One HTML file from titled sections of data: its template, style and scripts, and the server that shows it."""
