"""What only a GPU can show, within nine and a half minutes: ``python -m scripts.gpu_check``."""
