"""The order in which a GPU starts its work: streams, and the launches that put the work into them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..traces.lanes import group_rows
from ..traces.step_content import launched_before
from ..traces.table import Array
from ..traces.trace import Trace

NEVER = np.iinfo(np.int64).min
"""The time of an unknown launch."""


class GpuOrder(NamedTuple):
    """Where each row of `Trace.gpu` is in the order of its stream.

    Attributes:
        stream: the number of its stream, from 0; streams of different GPUs differ.
        previous: the row of the work before it on its stream, or -1.
        launched_ns: the start of the call that launched it, or `NEVER`.
        queued_ns: the latest launch of any work on its stream up to this one, or `NEVER`: a stream is a queue, so
            work was launched no earlier than the work before it.
        before: whether it was launched before the recording.
        same_launch: whether the call that launched it also launched the work before it, as for CUDA graphs.
    """

    stream: Array
    previous: Array
    launched_ns: Array
    queued_ns: Array
    before: Array
    same_launch: Array

    @property
    def unknown(self) -> Array:
        """A mask of the work whose launch is not in the trace, although it was launched while recording."""
        mask: Array = (self.launched_ns == NEVER) & ~self.before
        return mask


def gpu_order(trace: Trace) -> GpuOrder:
    """Return the order of the GPU work of a trace."""
    gpu = trace.gpu
    _, device = np.unique(gpu.device, return_inverse=True)
    streams, stream = np.unique(gpu.stream, return_inverse=True)
    _, stream = np.unique(device * max(len(streams), 1) + stream, return_inverse=True)
    previous = np.full(len(gpu), -1)
    launched = np.full(len(gpu), NEVER)
    linked = gpu.launch >= 0
    launched[linked] = trace.runtime.start_ns[gpu.launch[linked]]
    queued = launched.copy()
    for _, rows in group_rows(stream):
        previous[rows[1:]] = rows[:-1]
        queued[rows] = np.maximum.accumulate(launched[rows])
    same = linked & (previous >= 0) & (gpu.launch == gpu.launch[previous])
    return GpuOrder(stream, previous, launched, queued, launched_before(trace), same)
