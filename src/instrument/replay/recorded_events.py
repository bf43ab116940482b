"""Reads which stream and which event a call waits for, where CUPTI recorded synchronizations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..traces.trace import Trace
from .gpu_order import GpuOrder

_WAIT = re.compile("Stream Wait Event|Event Sync")
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


def recorded_waits(trace: Trace, order: GpuOrder) -> list[RecordedWait]:
    """Return the waits for events whose recording is in the trace; empty if the profiler does not record them."""
    rows = np.flatnonzero(trace.syncs.matching("name", _WAIT))[:_MAX_ROWS]
    if not len(rows) or trace.look_up is None:
        return []
    return list(_recorded(trace, order, rows.tolist()))


def _recorded(trace: Trace, order: GpuOrder, rows: list[int]) -> Iterator[RecordedWait]:
    gpu, runtime = trace.gpu, trace.runtime
    numbers = {}
    for device, stream, number in zip(
        gpu.device.tolist(), gpu.stream.tolist(), order.stream.tolist(), strict=True
    ):
        numbers[device, stream] = number
    works = {number: np.flatnonzero(order.stream == number) for number in set(numbers.values())}
    calls = {number: row for row, number in enumerate(runtime.correlation.tolist())}
    for row in rows:
        about = trace.args(trace.syncs, row)
        device = int(trace.syncs.device[row])
        call = calls.get(int(trace.syncs.correlation[row]))
        record = calls.get(about.get("wait_on_cuda_event_record_corr_id", -1))
        awaited = numbers.get((device, about.get("wait_on_stream")))
        if call is None or record is None or awaited is None:
            continue
        own = works[awaited]
        last = int(np.searchsorted(order.queued_ns[own], runtime.start_ns[record])) - 1
        if last >= 0:
            stream = numbers.get((device, int(trace.syncs.stream[row])), -1)
            yield RecordedWait(int(runtime.thread[call]), int(runtime.start_ns[call]), stream, int(own[last]))
