"""Finds launches that blocked because the queue of the GPU was full.

A launch returns at once until the driver's queue is full (1,024 launches on CUDA); from then on it returns when
the GPU finishes an earlier launch. The CPU waits for the GPU in a call that does not synchronize.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .lanes import group_rows
from .step_content import launched_before
from .table import Array
from .trace import Trace

_MIN_FULL_QUEUE = 256  # launches; the smallest queue that CUDA_SCALE_LAUNCH_QUEUES allows
_MIN_BLOCKED_RATIO = 4  # times the usual duration of a launch


class BlockedLaunches(NamedTuple):
    """Launches that blocked, in order of their start.

    Attributes:
        start_ns: When the call had lasted as long as a launch usually does.
        end_ns: When it returned.
        thread: The thread, as in `Trace.runtime`.
    """

    start_ns: Array
    end_ns: Array
    thread: Array


def find_blocked_launches(trace: Trace) -> BlockedLaunches:
    """Return the launches that took much longer than usual while the queue of the GPU was full.

    The work of such a launch starts after the call has returned. Launches that are slow for another reason, such
    as loading a kernel's code, are excluded.
    """
    gpu, runtime = trace.gpu, trace.runtime
    linked = np.flatnonzero(gpu.launch >= 0)
    rows, place, launch = np.unique(gpu.launch[linked], return_index=True, return_inverse=True)
    first = linked[place]  # work is in order of start
    calls = runtime.where(rows)
    queued = _queue_lengths(
        trace, calls.start_ns, _last_ends(gpu.end_ns[linked], launch, len(rows)), gpu.device[first]
    )
    room = queued < _MIN_FULL_QUEUE
    usual = _usual_durations(calls.name, calls.duration_ns, room)
    waited = ~room & (calls.duration_ns > _MIN_BLOCKED_RATIO * usual) & (gpu.start_ns[first] >= calls.end_ns)
    return BlockedLaunches((calls.start_ns + usual)[waited], calls.end_ns[waited], calls.thread[waited])


def _usual_durations(name: Array, duration: Array, room: Array) -> Array:
    """Return the usual duration of each launch: the median of its function while the queue has room."""
    usual = np.zeros(len(name), np.int64)
    for _, rows in group_rows(name):
        some = duration[rows[room[rows]]]
        usual[rows] = int(np.median(some)) if len(some) else duration[rows].min()
    return usual


def _queue_lengths(trace: Trace, start: Array, done: Array, device: Array) -> Array:
    """Return the number of unfinished launches on the device at the start of each; a graph is one launch."""
    gpu = trace.gpu
    earlier = np.flatnonzero(launched_before(trace))
    queued = np.zeros(len(start), np.int64)
    for number in np.unique(device).tolist():
        on_device, before = device == number, earlier[gpu.device[earlier] == number]
        ids, launch = np.unique(gpu.correlation[before], return_inverse=True)
        ends = np.sort(np.concatenate((done[on_device], _last_ends(gpu.end_ns[before], launch, len(ids)))))
        queued[on_device] = len(ids) + np.searchsorted(np.sort(start[on_device]), start[on_device])
        queued[on_device] -= np.searchsorted(ends, start[on_device], "right")
    return queued


def _last_ends(end: Array, launch: Array, launches: int) -> Array:
    """Return when the last work of each launch ended."""
    last = np.full(launches, np.iinfo(np.int64).min)
    np.maximum.at(last, launch, end)
    return last
