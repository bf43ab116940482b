"""What a trace means: numbers first, exact and each with its definition."""
