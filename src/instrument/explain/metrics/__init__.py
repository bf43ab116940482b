"""Metrics of traces and of the ranks of a job: exact numbers, each with its definition, window and coverage."""
