"""Finds the GPU work that waits for work on another stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..traces.lanes import group_rows
from ..traces.table import Array
from ..traces.trace import Trace
from .delays import EVENT_NS, Delays, median
from .gpu_order import NEVER, GpuOrder
from .recorded_events import RecordedWait, recorded_waits

_WAIT = re.compile("StreamWaitEvent")
_SKEW_NS = 1_000  # work may start so long before the recorded end of the work that it waits for
_LATE_NS = 10_000  # a start that is later than expected by more has a reason
_RELEASED_NS = 40_000  # from the end of one work to the start of the work that waited for it
_TAIL_NS = 100_000  # before the end of a kernel, its last blocks leave room for another kernel
_SEARCHED = 400  # earlier launches of the thread


class StreamWaits(NamedTuple):
    """The work that waits for another stream.

    Attributes:
        work: the row of the work that waits; may occur twice.
        target: the row of the work that it waits for.
        delay_ns: the time from the end of the target to the start of the work, if nothing else delays it.
    """

    work: Array
    target: Array
    delay_ns: Array


def find_event_waits(trace: Trace, order: GpuOrder) -> Array:
    """Return pairs of work that waits for an event and the work before the event, as the rows of an array.

    A profiler that records synchronizations says which stream waits for which event. Else, a trace only says which
    thread called ``cudaStreamWaitEvent``: the first launch after such a call is taken to wait for the work that
    its thread launched last on another stream and that had ended when this work started.
    """
    recorded = [wait for wait in recorded_waits(trace, order) if wait.stream >= 0]
    found = _of_recorded(order, recorded) if recorded else _after_event_waits(trace, order)
    return np.array([*found], np.int64).reshape(-1, 2)


def find_stream_waits(trace: Trace, order: GpuOrder, delays: Delays, event_waits: Array) -> StreamWaits:
    """Return the waits between streams of the same GPU: those for events, and those that only times show.

    Work that starts over 10 us later than its launch, its stream and events explain is taken to wait for the work
    on another stream whose end is closest to its start: from 100 us after it, as the last blocks of a kernel leave
    room for the next, to 40 us before it.

    Args:
        trace: the trace.
        order: its order.
        delays: its delays.
        event_waits: what `find_event_waits` found.
    """
    gpu, found = trace.gpu, event_waits
    expected = _expected_start(trace, order, delays)
    work, target = found.T
    released = gpu.start_ns[work] - gpu.end_ns[target]
    bound = (gpu.start_ns[work] - expected[work] > _LATE_NS) & (released < _RELEASED_NS)
    usual = median(released[bound], EVENT_NS)
    expected[work] = np.maximum(expected[work], gpu.end_ns[target] + usual)
    more = np.array([*_after_unexplained_delays(trace, order, expected)], np.int64).reshape(-1, 2)
    gap = gpu.start_ns[more[:, 0]] - gpu.end_ns[more[:, 1]]
    delay = np.where(gap < 0, median(gap[gap < 0], 0), median(gap[gap >= 0], EVENT_NS))
    work, target = np.concatenate((found, more)).T
    return StreamWaits(work, target, np.concatenate((np.full(len(found), usual), delay)))


def _expected_start(trace: Trace, order: GpuOrder, delays: Delays) -> Array:
    """Return when each work starts if nothing but its launch and the work before it on its stream delays it."""
    by_launch = np.where(order.launched_ns == NEVER, NEVER, order.launched_ns + delays.launch)
    by_stream = np.where(order.previous >= 0, trace.gpu.end_ns[order.previous] + delays.stream, NEVER)
    latest: Array = np.maximum(by_launch, by_stream)
    return latest


def _of_recorded(order: GpuOrder, waits: list[RecordedWait]) -> Iterator[tuple[int, int]]:
    """Yield the first work on the waiting stream after each call, and the work that it waits for."""
    for wait in waits:
        own = np.flatnonzero(order.stream == wait.stream)
        following = int(np.searchsorted(order.queued_ns[own], wait.called_ns))
        if following < len(own) and order.queued_ns[wait.target] <= order.queued_ns[own[following]]:
            yield int(own[following]), wait.target


def _after_event_waits(trace: Trace, order: GpuOrder) -> Iterator[tuple[int, int]]:
    """Yield the first work after each call of ``cudaStreamWaitEvent``, and the work that it waits for."""
    gpu, runtime = trace.gpu, trace.runtime
    calls = np.flatnonzero(runtime.matching("name", _WAIT))
    waits = {thread: runtime.start_ns[calls[rows]] for thread, rows in group_rows(runtime.thread[calls])}
    linked = np.flatnonzero(gpu.launch >= 0)
    linked = linked[np.lexsort((gpu.start_ns[linked], order.launched_ns[linked]))]
    for thread, some in group_rows(runtime.thread[gpu.launch[linked]]):
        if thread not in waits:
            continue
        rows = linked[some]
        times = order.launched_ns[rows]
        earlier = np.concatenate(([NEVER], times[:-1]))
        first = np.searchsorted(waits[thread], times) > np.searchsorted(waits[thread], earlier)
        for place in np.flatnonzero(first).tolist():
            work = rows[place]
            others = rows[max(place - _SEARCHED, 0) : place][::-1]
            fits = (order.stream[others] != order.stream[work]) & (gpu.device[others] == gpu.device[work])
            fits &= gpu.end_ns[others] <= gpu.start_ns[work] + _SKEW_NS
            fits &= order.queued_ns[others] <= order.queued_ns[work]
            if fits.any():
                yield int(work), int(others[np.argmax(fits)])


def _after_unexplained_delays(trace: Trace, order: GpuOrder, expected_ns: Array) -> Iterator[tuple[int, int]]:
    """Yield the work that starts later than expected, and the work on another stream that ends about then."""
    gpu = trace.gpu
    late = np.flatnonzero((gpu.start_ns - expected_ns > _LATE_NS) & (order.queued_ns != NEVER))
    by_end = np.argsort(gpu.end_ns, kind="stable")
    ends = gpu.end_ns[by_end]
    first = np.searchsorted(ends, gpu.start_ns[late] - _RELEASED_NS)
    after = np.searchsorted(ends, gpu.start_ns[late] + _TAIL_NS)
    for work, low, high in zip(late.tolist(), first.tolist(), after.tolist(), strict=True):
        others = by_end[low : min(high, low + _SEARCHED)]
        fits = (order.stream[others] != order.stream[work]) & (gpu.device[others] == gpu.device[work])
        fits &= (order.queued_ns[others] <= order.queued_ns[work]) & (gpu.start_ns[others] < gpu.start_ns[work])
        others = others[fits]
        if len(others):
            yield work, int(others[np.argmin(np.abs(gpu.end_ns[others] - gpu.start_ns[work]))])
