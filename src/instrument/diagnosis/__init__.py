"""Metrics of traces: exact numbers, each with its definition, window and coverage."""
