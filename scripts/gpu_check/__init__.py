"""Checks that need a GPU, within nine and a half minutes: ``python -m scripts.gpu_check``."""
