"""`SlowLoader`: the workers of a DataLoader that do not keep up with the loop, and their pace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...read.tables.intervals import Intervals, overlap_ns, total_ns
from ..metrics.idle import MULTIPLE, input_ranges
from .graph import Graph, times_by_thread

_SHARE = 0.05  # of the steps; where a loop waits less, its workers keep up
_APART = 16  # batches that many workers load at once, of which only the first is waited for
_CALL_NS = 500_000  # of a call that finds a batch, at most


class SlowLoader(NamedTuple):
    """Workers that do not keep up: batches come at their pace, whenever the loop asks for one.

    Attributes:
        waits: when the loop waits for them, by thread, without what a call takes that finds a batch.
        step_ns: how long they take for the batches of a step.
    """

    waits: Mapping[int, Intervals]
    step_ns: int

    def is_in(self, removed: Mapping[int, Intervals]) -> bool:
        """Return whether most of the waits are in the times of a change during which nothing is waited for."""
        whole = sum(total_ns(times) for times in self.waits.values())
        return (
            2 * sum(overlap_ns(times, removed[each]) for each, times in self.waits.items() if each in removed)
            > whole
        )


def slow_loader(graph: Graph) -> SlowLoader | None:
    """Return the workers of a trace whose batches are late; None if there are none, or if they keep up."""
    steps, waits, paces = graph.loop.table, dict[int, Intervals](), [0.0]
    ranges = [each.where(each.matching("name", MULTIPLE)) for each in input_ranges(graph.trace)]
    for thread, (starts, ends) in times_by_thread(*ranges).items():
        own = steps.where(steps.thread == thread)
        if not len(own):
            continue
        first, last = int(own.start_ns.min()), int(own.end_ns.max())
        inside = (starts >= first) & (ends <= last)
        starts, ends = starts[inside], ends[inside]
        took = ends - starts
        is_late = 2 * took * len(took) > took.sum()
        late = np.flatnonzero(is_late)
        if len(late) < 2 or np.diff(late).max() > _APART or took.sum() < _SHARE * (last - first):
            continue
        each_ns = (ends[late[-1]] - ends[late[0]]) / (late[-1] - late[0])
        paces.append(each_ns * len(took) / len(own))
        call_ns = 0 if is_late.all() else min(int(took[~is_late].min()), _CALL_NS)
        waits[thread] = starts + np.minimum(took, call_ns), ends
    return SlowLoader(waits, round(max(paces))) if waits else None
