"""`Edges`: what each event of a replay waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...read.tables.table import Array

ANCHORED, ON_CPU, HANDED_OFF, CALLED, LAUNCHED, STREAM, EVENT, RETURNED = range(8)
"""Kinds of edges; see `Edges`."""


class Edges(NamedTuple):
    """Edges of a graph, one row each.

    Attributes:
        kind: why the target waits for the source:

            - ANCHORED: the recording starts with the target.
            - ON_CPU: the CPU works on the same thread in between.
            - HANDED_OFF: it works on another thread after the source.
            - CALLED: a call that waits for the GPU takes this time even if the GPU is done.
            - LAUNCHED: the target is work that the source launches.
            - STREAM: the source is the work before it on its stream.
            - EVENT: the source is work on another stream.
            - RETURNED: the target is the return of a call that waits for the source.
        source: the node that is waited for; node 0 is the start of the recording.
        target: the node that waits; edges are in the order of their targets.
        delay_ns: the time between, without the work of the CPU and of the target.
        since_ns: the start of the CPU's recorded work in between, for ON_CPU and HANDED_OFF.
        until_ns: its end.
    """

    kind: Array
    source: Array
    target: Array
    delay_ns: Array
    since_ns: Array
    until_ns: Array

    def where(self, rows: Array) -> Edges:
        """Return the edges in these rows."""
        return Edges(*(column[rows] for column in self))


_TYPES = (np.int8, np.int32, np.int32, np.int64, np.int64, np.int64)  # a long trace has millions of edges


def edges(
    kind: int,
    source: Array | int,
    target: Array,
    delay_ns: Array | int = 0,
    since_ns: Array | int = 0,
    until_ns: Array | int = 0,
) -> Edges:
    """Return edges of one kind; a number stands for that number in each row."""
    columns = (kind, source, target, delay_ns, since_ns, until_ns)
    typed = (np.asarray(column, dtype) for column, dtype in zip(columns, _TYPES, strict=True))
    return Edges(*(np.broadcast_to(column, target.shape) for column in typed))


def in_order(parts: Sequence[Edges]) -> Edges:
    """Return all edges, in the order of their targets."""
    order = np.argsort(np.concatenate([part.target for part in parts]), kind="stable")
    return Edges(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))
