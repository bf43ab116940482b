"""Reads the files that profilers write, as tables of numbers."""
