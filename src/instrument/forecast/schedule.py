"""Puts collectives, copies and waits into the calls of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count

from ..syncs.counting.streams import COMMUNICATION, DEFAULT, StreamNote
from .links import Collective, Kind
from .operations import Operation
from .timeline import StepCall

_SAME = -4  # the stream that the program selected last
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes; torch.nn.parallel.DistributedDataParallel


class Schedule:
    """The calls of a step, into which collectives and waits are put before the positions that they have."""

    def __init__(self, calls: Sequence[StepCall], notes: Sequence[StreamNote], ranks: int) -> None:
        self._calls, self._notes, self._ranks = calls, notes, ranks
        self._events = count(-1, -1)  # apart from those of programs, which are positive
        self._put: dict[int, list[StepCall | StreamNote]] = defaultdict(list)

    def send(self, position: int, kind: Kind, number: int, *, stream: int = DEFAULT) -> int:
        """Put a collective of so many bytes after the work of a stream; return its event."""
        event = next(self._events)
        self._put[position] += [
            StreamNote(0, "select", stream), StepCall(None, collective=Collective(kind, number, self._ranks)),
            StreamNote(0, "record", COMMUNICATION, event), StreamNote(0, "select", _SAME),
        ]  # fmt: skip
        return event

    def copy(self, position: int, number: int, family: str = "copy") -> None:
        """Put a copy of so many bytes on the default stream."""
        self._put[position].append(StepCall(Operation(family, "fp32", 0, 2 * number, (0,))))

    def wait(self, position: int, event: int, *, stream: int = DEFAULT) -> None:
        """Have a stream wait for an event."""
        self._put[position].append(StreamNote(0, "wait", stream, event))

    def record(self, position: int) -> int:
        """Return an event that is over when the work of the default stream up to a position is."""
        event = next(self._events)
        self._put[position].append(StreamNote(0, "record", DEFAULT, event))
        return event

    def result(self) -> tuple[list[StepCall], list[StreamNote]]:
        """Return the calls with the collectives, and what orders them."""
        calls: list[StepCall] = []
        notes: list[StreamNote] = []
        own = defaultdict[int, list[StreamNote]](list)
        current = DEFAULT
        for note in self._notes:
            own[note.position].append(note)
        for position in range(len(self._calls) + 1):
            current = next((note.stream for note in reversed(own[position]) if note.kind == "select"), current)
            for put in (*own[position], *self._put[position]):
                if isinstance(put, StreamNote):
                    stream = current if put.stream == _SAME else put.stream
                    notes.append(put._replace(position=len(calls), stream=stream))
                else:
                    calls.append(put)
            calls += self._calls[position : position + 1]
        return calls, notes


def buckets(ready: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where the buckets of gradients are complete, and their bytes.

    Args:
        ready: where each gradient is complete, and its bytes, in this order.
    """
    found, total, last, limit = [], 0, 0, _FIRST_BUCKET
    for last, number in ready:
        total += number
        if total >= limit:
            found.append((last, total))
            total, limit = 0, _BUCKET
    return [*found, (last, total)] if total else found


def reduced(
    calls: Sequence[StepCall], notes: Sequence[StreamNote], ready: Iterable[tuple[int, int]], ranks: int
) -> tuple[list[StepCall], list[StreamNote]]:
    """Return a step in which gradients are copied to buckets as they become ready, reduced, and copied back.

    See `buckets`.
    """
    schedule = Schedule(calls, notes, ranks)
    of = buckets(ready)
    events = []
    for position, number in of:
        schedule.copy(position, number, "element-wise")
        events.append(schedule.send(position, "all-reduce", number))
    for event, (_, number) in zip(events, of, strict=True):
        schedule.wait(of[-1][0], event)
        schedule.copy(of[-1][0], number, "element-wise")
    return schedule.result()
