"""Fetches the real traces that tests and benchmarks read."""
