"""Finds the GPU work that each synchronization waits for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..traces.lanes import group_rows, latest
from ..traces.synchronizations import COPY, FREE, Synchronization
from ..traces.table import Array
from ..traces.trace import Trace
from .gpu_order import GpuOrder
from .recorded_events import recorded_waits

_DEVICE = re.compile("Device|Ctx|Context|Thread")
_EVENT = re.compile("Event")
_SKEW_NS = 2_000
_SEARCHED = 100  # works that ended before
MAX_PAIRS = 10_000_000
"""The number of pairs of synchronizations and streams above which waits for a whole device are left out."""


class SyncTargets(NamedTuple):
    """The work that synchronizations wait for.

    Attributes:
        sync: the number of the synchronization; may occur several times.
        work: the row of the work.
    """

    sync: Array
    work: Array


def find_sync_targets(trace: Trace, waits: Sequence[Synchronization], order: GpuOrder) -> SyncTargets:
    """Return the work that each synchronization waits for.

    A blocking memcpy waits for itself, and a call that waits for the device or frees memory for all work launched
    before. A call that waits for a stream waits for the work launched before into the stream that the driver
    recorded or, if it did not, into the stream of the memcpy right before or else of the thread's last launch. A
    call that waits for an event waits for the work before the event, if the driver recorded it, else for the work
    that ended last before the call returned.
    """
    began = np.array([wait.start_ns for wait in waits], np.int64)
    pairs = [np.empty((2, 0), np.int64)]
    kinds = [_kind(wait) for wait in waits]
    copies = [(number, waits[number].copy) for number, kind in enumerate(kinds) if kind == "copy"]
    pairs.append(np.array(copies, np.int64).reshape(-1, 2).T)
    streams = dict(group_rows(order.stream))
    device_of = trace.gpu.device
    device_syncs = np.array([number for number, kind in enumerate(kinds) if kind == "device"], np.int64)
    device = np.array([waits[number].device for number in device_syncs.tolist()], np.int64)
    if len(device_syncs) * len(streams) > MAX_PAIRS:
        device_syncs, device = device_syncs[:0], device[:0]
    for rows in streams.values():
        own = device_syncs[(device == device_of[rows[0]]) | (device < 0)]
        pairs.append(_last_before(rows, order, own, began))
    chosen = _streams_of(trace, waits, order, kinds)
    for stream, own in group_rows(chosen):
        if stream >= 0:
            pairs.append(_last_before(streams[stream], order, own, began))
    events = np.array([number for number, kind in enumerate(kinds) if kind == "event"], np.int64)
    until = np.array([waits[number].start_ns + waits[number].blocked_ns for number in events.tolist()], np.int64)
    ended = work_ended_by(trace, order, until, began[events])
    recorded = {(wait.thread, wait.called_ns): wait.target for wait in recorded_waits(trace, order)}
    for place, number in enumerate(events.tolist()):
        ended[place] = recorded.get((waits[number].thread, waits[number].start_ns), ended[place])
    pairs.append(np.stack((events[ended >= 0], ended[ended >= 0])))
    return SyncTargets(*np.concatenate(pairs, axis=1))


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
    threads = np.array([wait.thread for wait in waits], np.int64)
    began = np.array([wait.start_ns for wait in waits], np.int64)
    last = latest(trace.runtime.thread[gpu.launch[linked]], order.launched_ns[linked], threads, began)
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
    gpu, syncs, runtime = trace.gpu, trace.syncs, trace.runtime
    if not syncs:
        return {}
    names = zip(gpu.device.tolist(), gpu.stream.tolist(), strict=True)
    numbers = dict(zip(names, order.stream.tolist(), strict=True))
    known = zip(syncs.correlation.tolist(), syncs.device.tolist(), syncs.stream.tolist(), strict=True)
    stream_of = {call: numbers.get((device, stream), -1) for call, device, stream in known if call >= 0}
    rows = np.flatnonzero(np.isin(runtime.correlation, list(stream_of)))
    columns = (column[rows].tolist() for column in (runtime.thread, runtime.start_ns, runtime.correlation))
    return {(thread, start): stream_of[call] for thread, start, call in zip(*columns, strict=True)}


def work_ended_by(trace: Trace, order: GpuOrder, until_ns: Array, launched_ns: Array) -> Array:
    """Return the work that ended last before each of these times, among work launched before; -1 for none."""
    by_end = np.argsort(trace.gpu.end_ns, kind="stable")
    after = np.searchsorted(trace.gpu.end_ns[by_end], until_ns + _SKEW_NS, "right")
    found = np.full(len(until_ns), -1)
    for number, (last, launched) in enumerate(zip(after.tolist(), launched_ns.tolist(), strict=True)):
        earlier = by_end[max(last - _SEARCHED, 0) : last]
        earlier = earlier[order.queued_ns[earlier] < launched]
        if len(earlier):
            found[number] = earlier[-1]
    return found
