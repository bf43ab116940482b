"""The order in which a GPU starts its work, by streams and launches, and the delays in between, as measured."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from ...read.tables.lanes import group_rows
from ...read.tables.steps import launched_before
from ...read.tables.table import KERNEL, MEMCPY, MEMSET, Array
from ...read.tables.trace import Trace

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


LAUNCH_NS, STREAM_NS, EVENT_NS, RETURN_NS = 5_000, 1_000, 2_000, 3_000
"""Delays to assume where a trace shows none: typical ones of current GPUs."""

_LONGEST_NS = 100_000  # longer pauses between work of one stream have another reason
_KINDS = (KERNEL, MEMCPY, MEMSET)


class Delays(NamedTuple):
    """The delays before each row of `Trace.gpu` in ns.

    Attributes:
        launch: from the start of the launch to the start of the work, if the stream is idle: the median over work
            of the same kind (kernels, memcpys, memsets).
        stream: from the end of the work before it on its stream, if it is queued there: the median over pairs of
            the same kinds, apart for work of the same launch. May be negative, as kernels may overlap.
    """

    launch: Array
    stream: Array


def median(values: Array, otherwise: int) -> int:
    """Return the median as an integer, or another value if there are no values."""
    return int(np.median(values)) if len(values) else otherwise


def measure_delays(trace: Trace, order: GpuOrder, waiting: Array) -> Delays:
    """Return the delays of the work of a trace.

    Args:
        trace: the trace.
        order: its order.
        waiting: the rows of work that waits for other streams, whose delays do not count.
    """
    gpu = trace.gpu
    if not gpu:
        return Delays(np.empty(0, np.int64), np.empty(0, np.int64))
    has_previous, linked = order.previous >= 0, order.launched_ns != NEVER
    previous_end = np.where(has_previous, gpu.end_ns[order.previous], NEVER)
    waited = gpu.start_ns - np.where(linked, order.launched_ns, 0)
    alone = np.ones(len(gpu), bool)
    alone[waiting] = False
    idle = linked & alone & ~order.same_launch & (previous_end <= order.launched_ns)
    usual = median(waited[idle], LAUNCH_NS)
    launch = np.full(len(gpu), usual)
    for kind in _KINDS:
        launch[gpu.category == kind] = median(waited[idle & (gpu.category == kind)], usual)

    gap = gpu.start_ns - np.where(has_previous, previous_end, 0)
    in_time = np.where(linked, order.launched_ns, 0) + launch < previous_end
    queued = has_previous & alone & (in_time | order.same_launch | ~linked) & (gap < _LONGEST_NS)
    stream = np.full(len(gpu), median(gap[queued], STREAM_NS))
    before = np.where(has_previous, gpu.category[order.previous], 0)
    for one, two, same in product(_KINDS, _KINDS, (False, True)):
        pairs = (before == one) & (gpu.category == two) & (order.same_launch == same)
        if (pairs & queued).any():
            stream[pairs] = median(gap[pairs & queued], STREAM_NS)
    return Delays(launch, stream)
