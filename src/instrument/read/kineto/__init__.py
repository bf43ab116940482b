"""Reads the JSON of torch.profiler and JAX, damaged files too, and writes copies with additional events."""
