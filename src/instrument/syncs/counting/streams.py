"""What a dry run notes of streams and collectives: which operators may run beside which on a GPU."""

from __future__ import annotations

from typing import Literal, NamedTuple

DEFAULT, COMMUNICATION = 0, -1
"""The number of the default stream, and of the one on which the collectives run one after the other."""

ALL = -3
"""Stands for all streams where the CPU waits for them."""


class StreamNote(NamedTuple):
    """Something that orders the work of streams.

    Attributes:
        position: how many operators were recorded before.
        kind: "select", the operators that follow are on ``stream``; "record", ``event`` is over when the work of
            ``stream`` so far is; "wait", what follows on ``stream`` begins when ``event`` is over; "synchronize",
            the CPU waits for ``event``, or, if that is 0, for the work of ``stream`` so far.
        stream: the number of the stream; `ALL` for all of them.
        event: the event; the same number again is a new one.
    """

    position: int
    kind: Literal["select", "record", "wait", "synchronize"]
    stream: int
    event: int = 0
