"""Regions, which name code, and the emitters that turn them into each profiler's ranges."""
