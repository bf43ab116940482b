"""The regions that were open when memory was allocated, from the ranges in a snapshot.

A range has a thread, and an event of the allocator does not say its own. What is known of it: in a backward pass,
the loop's thread waits for threads of autograd, so that nothing begins or ends there while they have a range open;
other threads with ranges run beside the loop. A thread that Python started has a root of its own in its stacks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...base.trace_marks import STEP_PREFIX
from ..tables.table import Array, Table
from .passes import BACKWARD_PASS, Passes

_STEP = re.compile(f"^{STEP_PREFIX}")
_BOOTSTRAP, _THREADING = re.compile("^_bootstrap$"), re.compile(r"\bthreading\.py$")
_MOST_THREADS = 30  # of more, several have a region open at nearly any time, and none is known


def regions_of(
    events: Table,
    annotations: Table,
    rows: Array,
    passes: Passes,
    frames: Table,
    stacks: Sequence[tuple[int, ...]],
) -> list[str]:
    """Return the name of the innermost region that the thread of each event had open; empty if none is known.

    What the program sets with ``torch.cuda.memory._set_memory_metadata`` comes before regions.

    Args:
        events: those of a `MemorySnapshot`, as the other tables.
        annotations: the begins and ends of ranges.
        rows: rows of events; -1 for memory that is older.
        passes: the passes of the events.
        frames: the frames of the stacks.
        stacks: the stacks.
    """
    found = [events.strings[events.user_metadata[row]] if row >= 0 else "" for row in rows.tolist()]
    known = np.flatnonzero(rows >= 0)
    known = known[events.time_ns[rows[known]] >= 0]
    marks = annotations.where(annotations.time_ns >= 0)
    if not len(marks) or not len(known):
        return found
    marks = marks.where(np.argsort(marks.time_ns, kind="stable"))
    event = rows[known]
    opened = _opened(marks, np.searchsorted(marks.time_ns, events.time_ns[event], "right"))
    backward = passes.kind == BACKWARD_PASS
    started = _is_started(frames, stacks)[events.stack]
    program = ~backward & (events.stack > 0)
    in_thread = 2 * started[program].sum() > program.sum()  # where the loop is, as most of these are its own
    names = _names(opened, backward[event], started[event] == in_thread, in_thread)
    for place, name in zip(known.tolist(), names.tolist(), strict=True):
        found[place] = found[place] or name
    return found


def _is_started(frames: Table, stacks: Sequence[tuple[int, ...]]) -> Array:
    """Return which stacks are of threads that Python started."""
    roots = np.flatnonzero(frames.matching("name", _BOOTSTRAP) & frames.matching("file", _THREADING))
    known = frozenset(roots.tolist())
    return np.array([not known.isdisjoint(stack) for stack in stacks])


class _Opened(NamedTuple):
    """The name of the innermost range that threads have open, at each of some places; empty without one.

    Attributes:
        loop: that of the thread that steps.
        helping: those of threads for which this one waits.
        beside: those of the others.
    """

    loop: Array
    helping: list[Array]
    beside: list[Array]


def _opened(marks: Table, places: Array) -> _Opened:
    """Return what threads have open at places between the begins and ends, which are in order."""
    begin, end = _paired(marks)
    names = np.array(marks.text("name"), object)[begin]
    thread = marks.thread[begin]
    steps = np.unique(marks.thread[marks.matching("name", _STEP) & (marks.thread >= 0)])
    if len(steps) == 1:
        thread = np.where(thread < 0, steps, thread)  # torch notes its own ranges on this thread
    threads = np.unique(thread).tolist()
    if not 0 < len(threads) <= _MOST_THREADS:
        return _Opened(np.full(len(places), "", object), [], [])
    opened: dict[int, Array] = {}
    for each in {*threads, *steps.tolist()}:  # the begins of a thread can be too old to be kept
        own = thread == each
        opened[each] = _innermost(begin[own], end[own], names[own], places)
    if len(threads) > 1 and len(steps) != 1:
        return _Opened(_agreed(list(opened.values())), [], list(opened.values()))
    loop = steps[0] if len(steps) else threads[0]
    own = thread == loop
    noted = np.sort(np.concatenate((begin[own], end[own])))
    beside = set(thread[np.searchsorted(noted, begin) != np.searchsorted(noted, end)].tolist())
    others = {each: found for each, found in opened.items() if each != loop}
    return _Opened(
        opened[loop],
        [found for each, found in others.items() if each not in beside],
        [found for each, found in others.items() if each in beside],
    )


def _paired(marks: Table) -> tuple[Array, Array]:
    """Return the rows at which ranges begin, and those at which they end; torch's own have no number."""
    begin: list[int] = []
    end: list[int] = []
    open_ = defaultdict[tuple[int, str], list[int]](list)
    columns = marks.range.tolist(), marks.text("name"), marks.text("stage")
    for row, (number, name, stage) in enumerate(zip(*columns, strict=True)):
        ranges = open_[number, "" if number >= 0 else name]
        if stage == "START":
            ranges.append(len(begin))
            begin.append(row)
            end.append(len(marks))
        elif ranges:
            end[ranges.pop()] = row
    return np.array(begin, np.int64), np.array(end, np.int64)


def _innermost(begin: Array, end: Array, names: Array, places: Array) -> Array:
    """Return the name of the range that began last, of those of a thread that are open at each place."""
    rows = np.concatenate((begin, end))
    found = [""]
    open_: list[int] = []
    ended: set[int] = set()
    for number in np.argsort(rows, kind="stable").tolist():
        if number < len(begin):
            open_.append(number)
        else:
            ended.add(number - len(begin))
        while open_ and open_[-1] in ended:
            open_.pop()
        found.append(names[open_[-1]] if open_ else "")
    return np.array(found, object)[np.searchsorted(np.sort(rows), places)]


def _names(opened: _Opened, backward: Array, like_loop: Array, in_thread: bool) -> Array:
    """Return the name at each place.

    Args:
        opened: what threads have open.
        backward: whether autograd allocates there.
        like_loop: whether Python started the allocating thread if, and only if, it started that of the loop.
        in_thread: whether it started that of the loop, which is the main thread otherwise.
    """
    none = np.full(len(backward), "", object)
    helps = sum((names != "" for names in opened.helping), np.zeros(len(backward), np.int64))
    helping = sum(opened.helping, none)  # the only name, where one thread helps
    by_autograd = np.where(helps == 1, helping, opened.loop)
    by_loop = _agreed([opened.loop, *opened.beside]) if in_thread else opened.loop
    by_others = _agreed(opened.beside or [none])
    names: Array = np.where(backward, by_autograd, np.where(like_loop, by_loop, by_others))
    return names


def _agreed(threads: Sequence[Array]) -> Array:
    """Return the name that all threads have; empty where they differ."""
    names: Array = np.where(np.all([each == threads[0] for each in threads], axis=0), threads[0], "")
    return names
