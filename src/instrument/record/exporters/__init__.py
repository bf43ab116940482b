"""Exporters: each controls one profiler, and makes a capture for each window."""
