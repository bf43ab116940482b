"""Finds launches that waited until there was room for them in the queue of the GPU.

A launch returns at once until the driver's queue is full (1,024 launches on CUDA); from then on it returns when
the GPU finishes another one. The CPU waits as in a synchronization, in a call that does not synchronize.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .lanes import group_rows
from .step_content import launched_before
from .table import Array
from .trace import Trace

_FULL = 256  # launches, from which the queue may be full: CUDA_SCALE_LAUNCH_QUEUES makes it 256 at the least
_FAR_LONGER = 4  # times as long as a launch takes while the queue has room


class BlockedLaunches(NamedTuple):
    """Launches that waited, in order of their start.

    Attributes:
        start_ns: When the call had taken as long as a launch does that need not wait.
        end_ns: When it returned.
        thread: As in `Trace.runtime`.
    """

    start_ns: Array
    end_ns: Array
    thread: Array


def find_blocked_launches(trace: Trace) -> BlockedLaunches:
    """Return the launches that took much longer than others of their kind while the GPU had a full queue.

    The work of such a call starts after it has returned, as the queue is before it. Launches that are slow for
    another reason, such as loading a kernel's code, are excluded.
    """
    gpu, runtime = trace.gpu, trace.runtime
    linked = np.flatnonzero(gpu.launch >= 0)
    rows, place, launch = np.unique(gpu.launch[linked], return_index=True, return_inverse=True)
    first = linked[place]  # work is in order of start
    calls = runtime.where(rows)
    queued = _queued(trace, calls.start_ns, _last(gpu.end_ns[linked], launch, len(rows)), gpu.device[first])
    room = queued < _FULL
    usual = _usual(calls.name, calls.duration_ns, room)
    waited = ~room & (calls.duration_ns > _FAR_LONGER * usual) & (gpu.start_ns[first] >= calls.end_ns)
    return BlockedLaunches((calls.start_ns + usual)[waited], calls.end_ns[waited], calls.thread[waited])


def _usual(name: Array, duration: Array, room: Array) -> Array:
    """How long a launch by the same function takes while the queue has room: one of a graph takes longer."""
    usual = np.zeros(len(name), np.int64)
    for _, rows in group_rows(name):
        some = duration[rows[room[rows]]]
        usual[rows] = int(np.median(some)) if len(some) else duration[rows].min()
    return usual


def _queued(trace: Trace, start: Array, done: Array, device: Array) -> Array:
    """How many launches each device had not done when each began; those of a graph's kernels are one."""
    gpu = trace.gpu
    earlier = np.flatnonzero(launched_before(trace))
    queued = np.zeros(len(start), np.int64)
    for number in np.unique(device).tolist():
        here, before = device == number, earlier[gpu.device[earlier] == number]
        ids, launch = np.unique(gpu.correlation[before], return_inverse=True)
        ends = np.sort(np.concatenate((done[here], _last(gpu.end_ns[before], launch, len(ids)))))
        queued[here] = len(ids) + np.searchsorted(np.sort(start[here]), start[here])
        queued[here] -= np.searchsorted(ends, start[here], "right")
    return queued


def _last(end: Array, launch: Array, launches: int) -> Array:
    """When the last work of each launch ended."""
    last = np.full(launches, np.iinfo(np.int64).min)
    np.maximum.at(last, launch, end)
    return last
