"""``instrument doctor``: what is installed, what each profiler records here, and how to fix what is broken."""
