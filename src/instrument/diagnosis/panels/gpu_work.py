"""The name and the class of GPU work, as all charts show them."""

from __future__ import annotations

import numpy as np

from ...traces.table import MEMCPY, Array
from ..trace_facts import TraceFacts

CLASSES = ("compute", "communication", "copies")
"""The classes: kernels and memsets, kernels that communicate, memcpys."""


def work_names(facts: TraceFacts) -> Array:
    """Return the numbers of the names of the work of the window: the short ones of kernels."""
    gpu = facts.gpu
    return np.where(gpu.short_name > 0, gpu.short_name, gpu.name)


def work_classes(facts: TraceFacts) -> Array:
    """Return the index in `CLASSES` of each work of the window."""
    return np.where(facts.gpu.category == MEMCPY, 2, facts.communication.astype(np.int64))
