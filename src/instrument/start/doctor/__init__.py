"""``instrument doctor``: what is installed, what each profiler records here, and how to fix broken parts."""
