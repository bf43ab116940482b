"""The delays of a GPU, measured in a trace: from a launch to its work, and from one work to the next."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from ..traces.table import KERNEL, MEMCPY, MEMSET, Array
from ..traces.trace import Trace
from .gpu_order import NEVER, GpuOrder

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
