"""What a profiler wrote, as numbers."""
