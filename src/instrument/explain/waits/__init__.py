"""What a wait of the CPU for the GPU is, where and why it happens, and the report of those that were found."""
