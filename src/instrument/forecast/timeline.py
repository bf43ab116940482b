"""When the calls of a step run: one CPU that launches, the streams of one GPU, and the links to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..syncs.counting.streams import ALL, COMMUNICATION, DEFAULT, StreamNote
from .links import Collective
from .operations import Operation

LAUNCH_NS = 10_000
"""What the CPU takes for an operator that launches a kernel.

Of eight recorded traces, a tenth of the launches follow the one before within 6 to 31 us, 12 us in the median,
with a profiler running; the other launches wait for something else.
"""

VIEW_NS = 2_000
"""What the CPU takes for an operator that launches none."""

_LATENCY_NS = 5_000  # from a launch to the start of its kernel


class StepCall(NamedTuple):
    """One call in a step: what the GPU computes or exchanges, if anything."""

    operation: Operation | None
    collective: Collective | None = None


def timeline(
    calls: Sequence[StepCall], times: Sequence[float | None], notes: Sequence[StreamNote] = ()
) -> tuple[float, float]:
    """Return when CPU and GPU are done, and the time that the CPU itself takes; ns.

    A stream runs one call after the other; those of different streams run side by side. Collectives run one after
    the other beside all streams, and begin when the stream that launches them has come to them.

    Args:
        calls: in the order in which the CPU launches them.
        times: how long each takes; None for one that launches nothing.
        notes: what orders the work of the streams, in the order of their positions.
    """
    cpu = busy = 0.0
    done = {DEFAULT: 0.0, COMMUNICATION: 0.0}  # by stream
    events: dict[int, float] = {}
    current = DEFAULT
    waiting = iter((*notes, StreamNote(len(calls) + 1, "select", DEFAULT)))
    note = next(waiting)
    for index, (call, ns) in enumerate(zip((*calls, None), (*times, None), strict=True)):
        while note.position <= index:
            if note.kind == "select":
                current = note.stream
            elif note.kind == "record":
                events[note.event] = done.get(note.stream, 0.0)
            elif note.kind == "synchronize":
                cpu = max(cpu, _awaited(note, done, events))
            else:
                done[note.stream] = max(done.get(note.stream, 0.0), events.get(note.event, 0.0))
            note = next(waiting)
        if call is None:
            break
        cost = VIEW_NS if ns is None else LAUNCH_NS
        cpu, busy = cpu + cost, busy + cost
        if ns is not None:
            begin = max(done.get(current, 0.0), cpu + _LATENCY_NS)
            if call.collective is not None:
                done[COMMUNICATION] = max(done[COMMUNICATION], begin) + ns
            else:
                done[current] = begin + ns
    return max(cpu, *done.values()), busy


def _awaited(note: StreamNote, done: dict[int, float], events: dict[int, float]) -> float:
    """Return when what the CPU waits for is done."""
    if note.event:
        return events.get(note.event, 0.0)
    return max(done.values()) if note.stream == ALL else done.get(note.stream, 0.0)
