"""`Part`: the events of one table that a slim trace keeps, and the args that it keeps of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table

Keys = tuple[str, ...]
ALL_ARGS: Keys = ("*",)
"""Stands for all args of an event."""


class Part(NamedTuple):
    """The events of one table that stay.

    Attributes:
        rows: the rows of the table that stay.
        keys: the different sets of args.
        which: for each of these rows, the index of its set in ``keys``.
    """

    rows: Table
    keys: list[Keys]
    which: Array


def part(table: Table, kept: Array, args: Iterable[tuple[Keys, Array | bool]] = ()) -> Part:
    """Return the part of a table that stays.

    Args:
        table: the table.
        kept: a mask of its rows.
        args: keys of args, each with a mask of the rows of the table that keep them.
    """
    rows = np.flatnonzero(kept)
    masks = [(keys, np.broadcast_to(mask, len(table))[rows]) for keys, mask in args]
    code = sum(
        (mask.astype(np.int64) << bit for bit, (_, mask) in enumerate(masks)), np.zeros(len(rows), np.int64)
    )
    codes, which = np.unique(code, return_inverse=True)
    sets = [
        sum((keys for bit, (keys, _) in enumerate(masks) if number >> bit & 1), ()) for number in codes.tolist()
    ]
    return Part(table.where(rows), sets, which)


def extremes(table: Table, begin_ns: int, end_ns: int) -> Array:
    """Return a mask of the first row that begins at a time, and of the first that ends at another."""
    kept = np.zeros(len(table), bool)
    for found in (table.start_ns == begin_ns, table.end_ns == end_ns):
        kept[np.flatnonzero(found)[:1]] = True
    return kept
