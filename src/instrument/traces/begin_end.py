"""Pairs the events that begin and end a range (phases B and E), which Chrome's format has beside whole events."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .table import Array
from .trace_data import ReadLosses

_SEARCHED = 64  # open ranges that are searched for the name of an end
_NAME = 60  # characters


class RangeEnds:
    """Collects begins and ends, in any order.

    Ranges of a thread nest: an end without a name, or with that of the innermost open range, ends that one. An end
    with another name ends the innermost range of this name, as where asyncio tasks take turns on a thread.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Array]] = []

    def add(self, part: dict[str, Array], *, begin: bool) -> None:
        """Add the events in these columns, which all begin or all end a range."""
        self._parts.append(part | {"begin": np.full(len(part["event"]), begin)})

    def close(self, tables: dict[str, dict[str, Array]], texts: list[str], lost: ReadLosses) -> None:
        """Set the durations of the ranges that have begun, in place, and drop those that do not end.

        Events without a known category on the threads of the ranges become regions as well: programs that write
        their own ranges write them in either way.
        """
        if not self._parts:
            return
        every = {
            name: np.concatenate([part[name] for part in self._parts])
            for name in ("event", "thread", "start_ns", "name", "begin")
        }
        end_of, open_, without_begin = _pair(every)
        _say(lost, "no end", [texts[code] for code in every["name"][open_].tolist()])
        _say(lost, "no begin", [texts[code] for code in every["name"][without_begin].tolist()])
        begins = np.flatnonzero(every["begin"])
        begins = begins[np.argsort(every["event"][begins])]
        numbers, ends = every["event"][begins], end_of[begins]
        for name, columns in tables.items():
            at = np.minimum(np.searchsorted(numbers, columns["event"]), max(len(numbers) - 1, 0))
            ours = numbers[at] == columns["event"] if len(numbers) else np.zeros(len(columns["event"]), bool)
            rows = ends[at[ours]]
            columns["duration_ns"][ours] = np.where(
                rows >= 0, every["start_ns"][rows] - columns["start_ns"][ours], 0
            )
            kept = ~ours
            kept[ours] = rows >= 0
            tables[name] = {column: values[kept] for column, values in columns.items()}
        _take_others(tables, np.unique(every["thread"][begins]))


def _pair(every: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Return for each row the row that ends it, or -1; the begins without an end; and the ends without a begin."""
    order = np.lexsort((every["event"], every["start_ns"], every["thread"])).tolist()
    thread, name, begin = (every[column].tolist() for column in ("thread", "name", "begin"))
    end_of = np.full(len(order), -1)
    ends: list[int] = []
    open_: list[int] = []
    at = None
    for row in order:
        if thread[row] != at:
            at, open_ = thread[row], []
        if begin[row]:
            open_.append(row)
            continue
        places = range(len(open_) - 1, max(len(open_) - 1 - _SEARCHED, -1), -1)
        place = next((place for place in places if not name[row] or name[open_[place]] == name[row]), None)
        if place is None:
            ends.append(row)
        else:
            end_of[open_.pop(place)] = row
    return end_of, np.flatnonzero(every["begin"] & (end_of < 0)), np.array(ends, np.int64)


def _say(lost: ReadLosses, lacks: str, names: Iterable[str]) -> None:
    if names := list(names):
        shown = dict.fromkeys(f"{name:.{_NAME}}" for name in names)
        which = ", ".join(list(shown)[:3]) + ", ..." * (len(shown) > 3)
        lost.add(f"ranges with {lacks}: {which}", events=len(names))


def _take_others(tables: dict[str, dict[str, Array]], threads: Array) -> None:
    others, regions = tables.get("others"), tables.get("regions")
    if others is None or regions is None:
        return
    ours = (others["duration_ns"] > 0) & np.isin(others["thread"], threads)
    tables["regions"] = {
        name: np.concatenate((column, others[name][ours] if name in others else np.full(ours.sum(), -1)))
        for name, column in regions.items()
    }
    tables["others"] = {name: column[~ours] for name, column in others.items()}
