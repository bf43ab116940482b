"""Private names of torch and nvtx, each with its fallback; one module per subject."""
