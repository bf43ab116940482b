"""Finds launches that waited until there was room for them in the queue of the GPU.

The driver takes a launch and returns, until as many wait as its queue holds (1,024 on CUDA). From then on a launch
returns when the GPU is done with another one: the GPU holds up the CPU as much as in a synchronization, in a call
that is none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .step_content import launched_before
from .table import Array
from .trace import Trace

_FULL = 256  # launches, from which the queue may be full: CUDA_SCALE_LAUNCH_QUEUES makes it 256 at the least
_FAR_LONGER = 4  # times as long as a launch takes while the queue has room


class QueueWaits(NamedTuple):
    """Launches that waited, in order of their start.

    Attributes:
        start_ns: When the call had taken as long as a launch does that need not wait.
        end_ns: When it returned.
        thread: As in `Trace.runtime`.
    """

    start_ns: Array
    end_ns: Array
    thread: Array


def queue_waits(trace: Trace) -> QueueWaits:
    """Return the launches that took much longer than others while the GPU had a full queue.

    The work of such a call starts after it has returned, as the queue is before it. A launch that took long for
    another reason, such as to load the code of a kernel or to copy from memory that is not pinned, is none.
    """
    gpu, runtime = trace.gpu, trace.runtime
    linked = np.flatnonzero(gpu.launch >= 0)
    rows, place, which = np.unique(gpu.launch[linked], return_index=True, return_inverse=True)
    first = linked[place]  # work is in order of start
    start, end, duration = runtime.start_ns[rows], runtime.end_ns[rows], runtime.duration_ns[rows]
    done = np.zeros(len(rows), np.int64)
    np.maximum.at(done, which, gpu.end_ns[linked])  # a launch of a graph with its last kernel
    room = _queued(trace, start, done, gpu.device[first]) < _FULL
    if room.all():
        return QueueWaits(start[:0], end[:0], runtime.thread[:0])
    usual = _usual(runtime.name[rows], duration, room)
    waited = ~room & (duration > _FAR_LONGER * usual) & (gpu.start_ns[first] >= end)
    return QueueWaits((start + usual)[waited], end[waited], runtime.thread[rows[waited]])


def _usual(names: Array, duration: Array, room: Array) -> Array:
    """How long a call of the same name takes while the queue has room; the shortest, where it never has."""
    usual = np.empty(len(duration), np.int64)
    for name in np.unique(names).tolist():
        same = names == name
        roomy = duration[same & room]
        usual[same] = np.median(roomy) if len(roomy) else duration[same].min()
    return usual


def _queued(trace: Trace, start: Array, done: Array, device: Array) -> Array:
    """How many launches each device had before each start that it was not done with."""
    gpu = trace.gpu
    early = np.flatnonzero(launched_before(trace))
    queued = np.zeros(len(start), np.int64)
    for number in np.unique(device).tolist():
        calls, earlier = device == number, early[gpu.device[early] == number]
        launched = np.sort(start[calls])
        ended = np.sort(np.concatenate((done[calls], gpu.end_ns[earlier])))
        queued[calls] = len(earlier) + np.searchsorted(launched, start[calls])
        queued[calls] -= np.searchsorted(ended, start[calls], "right")
    return queued
