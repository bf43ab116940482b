"""How do I start it under a vendor's profiler? Command lines, what came of them, and what is installed."""
