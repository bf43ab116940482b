"""Compares two recordings: whether the steps became faster or slower, and which parts changed."""
