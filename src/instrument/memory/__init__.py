"""Snapshots of torch's allocator: what was allocated when, and by which line."""
