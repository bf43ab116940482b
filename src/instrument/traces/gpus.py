"""The numbers of the GPUs in a trace, and their count."""

from __future__ import annotations

import numpy as np

from .table import Array, Table


def gpu_numbers(gpu: Table) -> Array:
    """Return the GPU of each row; -1 for rows that do not name it, unless the trace has only one GPU."""
    known = np.unique(gpu.device[gpu.device >= 0])
    return np.where(gpu.device >= 0, gpu.device, known[0] if len(known) == 1 else -1)


def count_gpus(gpu: Table) -> int:
    """Return the number of GPUs with work; work of unknown GPUs counts as one GPU if no other is known."""
    numbers = np.unique(gpu_numbers(gpu))
    return int((numbers >= 0).sum()) or len(numbers)
