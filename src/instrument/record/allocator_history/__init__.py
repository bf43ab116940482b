"""Records the history of torch's GPU allocator for a window, and writes it as a memory snapshot."""
