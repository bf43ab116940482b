"""Snapshots of torch's allocator: what was allocated when, by which line, and what it was for."""
