"""The order in which a GPU starts its work, and the work that other streams and synchronizations wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ...read.measures.synchronizations import COPY, FREE, Synchronization, columns_of
from ...read.tables.lanes import group_rows, latest
from ...read.tables.steps import earlier_work
from ...read.tables.table import KERNEL, MEMCPY, MEMSET, Array
from ...read.tables.trace import Trace
from ..metrics.idle import UNKNOWN, launched_at


class GpuOrder(NamedTuple):
    """Where each row of `Trace.gpu` is in the order of its stream.

    Attributes:
        stream: the number of its stream, from 0; streams of different GPUs differ.
        previous: the row of the work before it on its stream, or -1.
        launched_ns: the start of the call that launched it, or `UNKNOWN`.
        queued_ns: the latest launch of any work on its stream up to this one, or `UNKNOWN`: a stream is a queue,
            so work was launched no earlier than the work before it.
        before: `earlier_work`.
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
        mask: Array = (self.launched_ns == UNKNOWN) & ~self.before
        return mask


def gpu_order(trace: Trace) -> GpuOrder:
    """Return the order of the GPU work of a trace."""
    gpu = trace.gpu
    _, device = np.unique(gpu.device, return_inverse=True)
    streams, stream = np.unique(gpu.stream, return_inverse=True)
    _, stream = np.unique(device * max(len(streams), 1) + stream, return_inverse=True)
    stream, previous = stream.astype(np.int32), np.full(len(gpu), -1, np.int32)
    launched = launched_at(gpu, trace.runtime)
    queued = launched.copy()
    for _, rows in group_rows(stream):
        previous[rows[1:]] = rows[:-1]
        queued[rows] = np.maximum.accumulate(launched[rows])
    same = (gpu.launch >= 0) & (previous >= 0) & (gpu.launch == gpu.launch[previous])
    return GpuOrder(stream, previous, launched, queued, earlier_work(trace), same)


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
    has_previous, linked = order.previous >= 0, order.launched_ns != UNKNOWN
    previous_end = np.where(has_previous, gpu.end_ns[order.previous], UNKNOWN)
    waited = gpu.start_ns - np.where(linked, order.launched_ns, 0)
    alone = np.ones(len(gpu), bool)
    alone[waiting] = False
    idle = linked & alone & ~order.same_launch & ~order.before & (previous_end <= order.launched_ns)
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


RECORDED_WAIT = re.compile("Stream Wait Event|Event Sync")
_MAX_ROWS = 100_000


class RecordedWait(NamedTuple):
    """One wait for an event.

    Attributes:
        thread: the thread of the call.
        called_ns: its start.
        stream: the number of the stream that waits, as in `GpuOrder.stream`; -1 if the thread waits.
        target: the last work before the event, a row of `Trace.gpu`.
    """

    thread: int
    called_ns: int
    stream: int
    target: int


def recorded_waits(trace: Trace, order: GpuOrder) -> Iterator[RecordedWait]:
    """Yield the waits for events whose recording is in the trace; none if the profiler does not record them."""
    runtime, syncs = trace.runtime, trace.syncs
    rows = np.flatnonzero(syncs.matching("name", RECORDED_WAIT))[:_MAX_ROWS].tolist()
    if not rows or trace.look_up is None:
        return
    numbers = _numbers_of_streams(trace, order)
    works = {number: np.flatnonzero(order.stream == number) for number in set(numbers.values())}
    calls = {number: row for row, number in enumerate(runtime.correlation.tolist()) if number >= 0}
    for row in rows:
        about = trace.args(syncs, row)
        device = int(syncs.device[row])
        call = calls.get(int(syncs.correlation[row]))
        record = calls.get(about.get("wait_on_cuda_event_record_corr_id", -1))
        awaited = numbers.get((device, about.get("wait_on_stream")))
        if call is None or record is None or awaited is None:
            continue
        own = works[awaited]
        last = int(np.searchsorted(order.queued_ns[own], runtime.start_ns[record])) - 1
        if last >= 0:
            stream = numbers.get((device, int(syncs.stream[row])), -1)
            yield RecordedWait(int(runtime.thread[call]), int(runtime.start_ns[call]), stream, int(own[last]))


def _numbers_of_streams(trace: Trace, order: GpuOrder) -> dict[tuple[object, object], int]:
    """Return the number of each stream in `GpuOrder.stream`, by its device and its number there."""
    names = zip(trace.gpu.device.tolist(), trace.gpu.stream.tolist(), strict=True)
    return dict(zip(names, order.stream.tolist(), strict=True))


_WAIT_CALL = re.compile("StreamWaitEvent")
_SKEW_NS = 1_000  # work may start so long before the recorded end of the work that it waits for
_LATE_NS = 10_000  # a start that is later than expected by more has a reason
_RELEASED_NS = 40_000  # from the end of one work to the start of the work that waited for it
_TAIL_NS = 100_000  # before the end of a kernel, its last blocks leave room for another kernel
_SEARCHED = 400  # earlier launches of the thread


def find_event_waits(trace: Trace, order: GpuOrder) -> Array:
    """Return pairs of work that waits for an event and the work before the event, as the rows of an array.

    A profiler that records synchronizations says which stream waits for which event. Else, a trace only says which
    thread called ``cudaStreamWaitEvent``: the first launch after such a call is taken to wait for the work that
    its thread launched last on another stream and that had ended when this work started.
    """
    recorded = [wait for wait in recorded_waits(trace, order) if wait.stream >= 0]
    pairs = _of_recorded(order, recorded) if recorded else _after_event_waits(trace, order)
    return np.array([*pairs], np.int64).reshape(-1, 2)


def find_stream_waits(
    trace: Trace, order: GpuOrder, delays: Delays, event_waits: Array
) -> tuple[Array, Array, Array]:
    """Return the waits between streams of the same GPU: those for events, and those that only times show.

    That is the work that waits, which may occur twice; the work that it waits for; and the time from the end of
    the latter to the start of the former, if nothing else delays it.

    Work that starts over 10 us later than its launch, its stream and events explain is taken to wait for the work
    on another stream whose end is closest to its start: from 100 us after it, as the last blocks of a kernel leave
    room for the next, to 40 us before it.

    Args:
        trace: the trace.
        order: its order.
        delays: its delays.
        event_waits: what `find_event_waits` found.
    """
    gpu = trace.gpu
    expected = _expected_start(trace, order, delays)
    work, target = event_waits.T
    released = gpu.start_ns[work] - gpu.end_ns[target]
    bound = (gpu.start_ns[work] - expected[work] > _LATE_NS) & (released < _RELEASED_NS)
    usual = median(released[bound], EVENT_NS)
    expected[work] = np.maximum(expected[work], gpu.end_ns[target] + usual)
    more = np.array([*_after_unexplained_delays(trace, order, expected)], np.int64).reshape(-1, 2)
    gap = gpu.start_ns[more[:, 0]] - gpu.end_ns[more[:, 1]]
    delay = np.where(gap < 0, median(gap[gap < 0], 0), median(gap[gap >= 0], EVENT_NS))
    work, target = np.concatenate((event_waits, more)).T
    return work, target, np.concatenate((np.full(len(event_waits), usual), delay))


def _expected_start(trace: Trace, order: GpuOrder, delays: Delays) -> Array:
    """Return when each work starts if nothing but its launch and the work before it on its stream delays it."""
    by_launch = np.where(order.launched_ns == UNKNOWN, UNKNOWN, order.launched_ns + delays.launch)
    by_stream = np.where(order.previous >= 0, trace.gpu.end_ns[order.previous] + delays.stream, UNKNOWN)
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
    calls = np.flatnonzero(runtime.matching("name", _WAIT_CALL))
    waits = {thread: runtime.start_ns[calls[rows]] for thread, rows in group_rows(runtime.thread[calls])}
    linked = np.flatnonzero(gpu.launch >= 0)
    linked = linked[np.lexsort((gpu.start_ns[linked], order.launched_ns[linked]))]
    for thread, some in group_rows(runtime.thread[gpu.launch[linked]]):
        if thread not in waits:
            continue
        rows = linked[some]
        times = order.launched_ns[rows]
        earlier = np.concatenate(([UNKNOWN], times[:-1]))
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
    late = np.flatnonzero((gpu.start_ns - expected_ns > _LATE_NS) & (order.queued_ns != UNKNOWN))
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


_DEVICE = re.compile("Device|Ctx|Context|Thread")
_EVENT = re.compile("Event")
_RETURN_SKEW_NS = 2_000
_SEARCHED_ENDED = 100  # works that ended before
MAX_PAIRS = 10_000_000
"""The number of pairs of synchronizations and streams above which waits for a whole device are left out."""


def find_sync_targets(trace: Trace, waits: Sequence[Synchronization], order: GpuOrder) -> Array:
    """Return pairs of the number of a synchronization and the row of work that it waits for, in two rows.

    A blocking memcpy waits for itself, and a call that waits for the device or frees memory for all work launched
    before. A call that waits for a stream waits for the work launched before into the stream that the driver
    recorded or, if it did not, into the stream of the memcpy right before or else of the thread's last launch. A
    call that waits for an event waits for the work before the event, if the driver recorded it, else for the work
    that ended last before the call returned.
    """
    began, took, device, copy = columns_of(waits, "start_ns", "blocked_ns", "device", "copy")
    kinds = np.array([_kind(wait) for wait in waits], str)
    copies, whole, events = (np.flatnonzero(kinds == kind) for kind in ("copy", "device", "event"))
    pairs = [np.stack((copies, copy[copies]))]
    streams = dict(group_rows(order.stream))
    if len(whole) * len(streams) > MAX_PAIRS:
        whole = whole[:0]
    for rows in streams.values():
        own = whole[(device[whole] == trace.gpu.device[rows[0]]) | (device[whole] < 0)]
        pairs.append(_last_before(rows, order, own, began))
    for stream, own in group_rows(_streams_of(trace, waits, order, kinds.tolist())):
        if stream >= 0:
            pairs.append(_last_before(streams[stream], order, own, began))
    ended = work_ended_by(trace, order, (began + took)[events], began[events])
    recorded = {(wait.thread, wait.called_ns): wait.target for wait in recorded_waits(trace, order)}
    for place, number in enumerate(events.tolist()):
        ended[place] = recorded.get((waits[number].thread, waits[number].start_ns), ended[place])
    pairs.append(np.stack((events[ended >= 0], ended[ended >= 0])))
    targets: Array = np.concatenate(pairs, axis=1)
    return targets


def _kind(wait: Synchronization) -> str:
    if wait.kind == COPY:
        return "copy" if wait.copy >= 0 else "nothing"
    if wait.kind == FREE or _DEVICE.search(wait.call):
        return "device"
    return "event" if _EVENT.search(wait.call) else "stream"


def _last_before(rows: Array, order: GpuOrder, syncs: Array, began: Array) -> Array:
    """Return pairs of these synchronizations and the last of these rows of one stream launched before each."""
    last = np.searchsorted(order.queued_ns[rows], began[syncs]) - 1
    some = (last >= 0) & ~order.unknown[rows[np.maximum(last, 0)]]
    return np.stack((syncs[some], rows[last[some]]))


def _streams_of(trace: Trace, waits: Sequence[Synchronization], order: GpuOrder, kinds: Sequence[str]) -> Array:
    """Return the stream that each call waits for; -1 for calls that wait for something else."""
    gpu = trace.gpu
    recorded = _recorded_streams(trace, order)
    linked = np.flatnonzero(gpu.launch >= 0)
    last = latest(
        trace.runtime.thread[gpu.launch[linked]],
        order.launched_ns[linked],
        *columns_of(waits, "thread", "start_ns"),
    )
    chosen = np.full(len(waits), -1)
    for number, (wait, kind) in enumerate(zip(waits, kinds, strict=True)):
        if kind == "stream":
            copied = int(order.stream[wait.copy]) if wait.copy >= 0 and wait.adjacent else -1
            launched = int(order.stream[linked[last[number]]]) if last[number] >= 0 else -1
            signs = (recorded.get((wait.thread, wait.start_ns), -1), copied, launched)
            chosen[number] = next((stream for stream in signs if stream >= 0), -1)
    return chosen


def _recorded_streams(trace: Trace, order: GpuOrder) -> dict[tuple[int, int], int]:
    """Return the stream that the driver recorded for calls that wait, by their thread and start."""
    syncs, runtime = trace.syncs, trace.runtime
    if not syncs:
        return {}
    numbers = _numbers_of_streams(trace, order)
    records = zip(syncs.correlation.tolist(), syncs.device.tolist(), syncs.stream.tolist(), strict=True)
    stream_of = {call: numbers.get((device, stream), -1) for call, device, stream in records if call >= 0}
    rows = np.flatnonzero(np.isin(runtime.correlation, list(stream_of)))
    columns = (column[rows].tolist() for column in (runtime.thread, runtime.start_ns, runtime.correlation))
    return {(thread, start): stream_of[call] for thread, start, call in zip(*columns, strict=True)}


def work_ended_by(trace: Trace, order: GpuOrder, until_ns: Array, launched_ns: Array) -> Array:
    """Return the work that ended last before each of these times, among work launched before; -1 for none."""
    by_end = np.argsort(trace.gpu.end_ns, kind="stable")
    after = np.searchsorted(trace.gpu.end_ns[by_end], until_ns + _RETURN_SKEW_NS, "right")
    last_work = np.full(len(until_ns), -1)
    for number, (last, launched) in enumerate(zip(after.tolist(), launched_ns.tolist(), strict=True)):
        earlier = by_end[max(last - _SEARCHED_ENDED, 0) : last]
        earlier = earlier[order.queued_ns[earlier] < launched]
        if len(earlier):
            last_work[number] = earlier[-1]
    return last_work
