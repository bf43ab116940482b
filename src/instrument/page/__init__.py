"""One HTML file from titled sections of data: the page that `diagnose`, `compare` and `syncs` write."""
