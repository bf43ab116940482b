"""What only a GPU can show, in ten minutes: ``python -m scripts.gpu_check``."""
