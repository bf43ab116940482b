"""Checks that need a GPU, in under ten minutes: ``python -m scripts.gpu_check``."""
