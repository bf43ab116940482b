"""The name and the class of GPU work, as all charts show them."""

from __future__ import annotations

import numpy as np

from .table import MEMCPY, Array, Table

CLASSES = ("compute", "communication", "copies")
"""The classes: kernels and memsets, kernels that communicate, memcpys."""


def work_names(gpu: Table) -> Array:
    """Return the numbers of the names of GPU work: the short ones of kernels."""
    return np.where(gpu.short_name > 0, gpu.short_name, gpu.name)


def work_classes(gpu: Table, communication: Array) -> Array:
    """Return the index in `CLASSES` of each GPU work.

    Args:
        gpu: the work.
        communication: a mask of the work that communicates.
    """
    return np.where(gpu.category == MEMCPY, 2, communication.astype(np.int64))
