"""Tells the GPUs of a trace apart."""

from __future__ import annotations

import numpy as np

from .table import Array, Table


def gpu_numbers(gpu: Table) -> Array:
    """Return the number of the GPU of each piece of work; -1 for what names none, unless there is only one."""
    known = np.unique(gpu.device[gpu.device >= 0])
    return np.where(gpu.device >= 0, gpu.device, known[0] if len(known) == 1 else -1)


def count_gpus(gpu: Table) -> int:
    """Return how many GPUs worked; those that do not say their number are one where no other is known."""
    numbers = np.unique(gpu_numbers(gpu))
    return int((numbers >= 0).sum()) or len(numbers)
