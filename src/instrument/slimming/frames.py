"""Chooses the Python functions that stay: modules, and the stacks that the diagnosis looks up."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ..diagnosis.trace_facts import TraceFacts
from ..syncs.trace_stacks import FRAME, StackSites
from ..traces.nest import NestedRanges
from ..traces.synchronizations import find_synchronizations
from ..traces.table import Array, Table
from ..traces.trace import MODULE


def kept_frames(facts: TraceFacts) -> Array:
    """Return a mask of the frames: all modules, and the functions that name each place that was looked up.

    Args:
        facts: the facts of a trace that was diagnosed.
    """
    frames = facts.trace.frames
    kept: Array = frames.matching("name", MODULE)
    if not frames:
        return kept
    threads, times = _places(facts)
    found = NestedRanges(frames.start_ns, frames.end_ns, frames.thread).innermost_at(times, threads)
    sites = StackSites(facts.trace)
    for row in np.unique(found[found >= 0]).tolist():
        stack = [row]
        while (row := int(frames.parent[row])) >= 0:
            stack.append(row)
        names = [frames.strings[code] for code in frames.name[stack].tolist()]
        kept[[stack[place] for place in sites.needed(names)]] = True
    kept[_other_lines(frames, kept)] = True
    return kept


def _places(facts: TraceFacts) -> tuple[Array, Array]:
    """Return the threads and times of all synchronizations, and of what was looked up."""
    waits = np.array([(wait.thread, wait.start_ns) for wait in find_synchronizations(facts.trace)], np.int64)
    looked_up = [np.stack(each, axis=1) for each in facts.looked_up]
    threads, times = np.unique(np.concatenate([waits.reshape(-1, 2), *looked_up]), axis=0).T
    return threads[threads >= 0], times[threads >= 0]


def _other_lines(frames: Table, kept: Array) -> list[int]:
    """Return one more frame of each function of which one line stays, but which has several lines in the trace.

    `StackSites` makes the line a part of the name of a function that has several.
    """
    lines: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    names, first = np.unique(frames.name, return_index=True)
    stay = set(np.unique(frames.name[kept]).tolist())
    staying: dict[tuple[str, str], set[str]] = defaultdict(set)
    for code, row in zip(names.tolist(), first.tolist(), strict=True):
        if found := FRAME.match(frames.strings[code]):
            function = found["file"], found["function"]
            lines[function].setdefault(found["line"], row)
            if code in stay:
                staying[function].add(found["line"])
    return [
        next(row for line, row in lines[function].items() if line not in known)
        for function, known in staying.items()
        if len(known) == 1 < len(lines[function])
    ]
