"""Reduces rows of a trace to trees, lanes and names that a page can draw."""
