"""Measured operators and steps: where the table of the forecast comes from, and what it is checked against."""
