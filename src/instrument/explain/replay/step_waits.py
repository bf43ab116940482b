"""What a step waits for: the classes of its critical path, and how much shorter it is without each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...read.tables.intervals import Intervals, covered_ns, merge_overlaps, union
from ...read.tables.lanes import group_rows
from ...read.tables.nest import NestedRanges
from ...read.tables.table import Array
from ..metrics.idle import work_of_cpu
from .critical_path import CLASSES, edge_times, longest_chain
from .edges import ANCHORED, CALLED, HANDED_OFF, ON_CPU, RETURNED
from .graph import Graph, times_by_thread
from .replay import GPU_CLASSES, NO_TIMES, Change, Replay, Replayer, SavedWork, mean_ns, replay_changed
from .requests import optimizer_ranges

_NEARLY_ALL = 1 - 1e-9  # of the duration: work that saves all of it would need no launch either


class StepWaits(NamedTuple):
    """What a step waits for.

    Attributes:
        parts: the time of each of `CLASSES` on the critical path, per step in ns.
        wins: how much shorter a step is in a replay in which a class costs nothing, in ns.
        work: what "overhead" is: the time of each of `WORK` in ns, which add up to it; empty after a change.
        regions: "between_operators" by the innermost region, the longest first; what is in no region is left out.
    """

    parts: Mapping[str, int]
    wins: Mapping[str, int]
    work: Mapping[str, int]
    regions: Mapping[str, int]

    def bounds(self, step_ns: float) -> list[str]:
        """Return the classes that bound a step: those whose removal wins most, within 5 % of the step.

        The one with most time on the critical path comes first. There are two at most, and none if no class wins
        5 %.
        """
        most, close = max(self.wins.values()), CLOSE * step_ns
        tied = [name for name, ns in self.wins.items() if most >= close and most - ns <= close]
        return sorted(tied, key=lambda name: -self.parts[name])[:2]


WORK = {
    "compilation": "torch.compile compiles",
    "garbage_collection": "Python collects garbage",
    "initialization": "a driver call takes over 100 ms",
    "allocation": "the driver allocates or frees memory",
    "module_loading": "the driver loads the code of kernels",
    "optimizer": "the optimizer runs",
    "operators": "operators run and launch work",
    "between_operators": "Python or other code runs between operators",
}
"""The CPU's work on the critical path, as clauses that follow "while"; the first that applies counts."""

CLOSE = 0.05
"""Of a step: classes whose wins differ by no more bound it together."""


def step_waits(replayer: Replayer, after: Change | None = None) -> StepWaits:
    """Return what the steps of a trace wait for, as recorded or after a change; its replayer must not abstain."""
    if after:
        replayed, step_ns = replay_changed(replayer.graph, after), replayer.step_ns(after)
    else:
        after, replayed, step_ns = Change(), replayer.unchanged, mean_ns(replayer.recorded_ns)
    rows, parts = _on_path(replayer, after, replayed, step_ns)
    work, regions = ({}, {}) if after else _work(replayer, rows, parts["overhead"])
    changes = {name: change for name, change in removals(replayer).items() if change}
    wins = {
        name: step_ns - replayer.step_ns(after | change) if parts[name] else 0  # off the path, nothing is won
        for name, change in changes.items()
    }
    if "input" in wins:
        wins["input"] = step_ns - replayer.step_ns(replace(after | changes["input"], least_ns=0))
    by_win = dict(sorted(wins.items(), key=lambda item: -item[1]))
    return StepWaits(parts, by_win, work, regions)


def parts_after(replayer: Replayer, change: Change) -> dict[str, int]:
    """Return the time of each of `CLASSES` on the critical path after a change, per step in ns."""
    return _on_path(replayer, change, replay_changed(replayer.graph, change), replayer.step_ns(change))[1]


def _on_path(replayer: Replayer, change: Change, replayed: Replay, step_ns: int) -> tuple[Array, dict[str, int]]:
    """Return the edges of the critical path of a replay, and the time of each class on it per step."""
    chain, total, _ = longest_chain(replayer.graph, replayed)
    waited_ns = replayer.waits_for_workers_ns(change, step_ns, total / len(replayer.recorded_ns))
    parts = _parts(replayer, replayed, chain, total, step_ns - waited_ns)
    return chain, parts | {"input": parts["input"] + waited_ns}


def removals(replayer: Replayer) -> dict[str, Change]:
    """Return for each class but "other" the change in which it costs nothing; no change where it has no work."""
    of_work = {name: replayer.classes == number for number, name in enumerate(GPU_CLASSES)}
    return {
        **{name: Change(saved=rows * _NEARLY_ALL) if rows.any() else Change() for name, rows in of_work.items()},
        "input": Change(replayer.graph.batches),
        "synchronization": Change(asynchronous=frozenset(range(len(replayer.graph.waits)))),
        "overhead": Change(work_saved=(SavedWork(1.0),)),
        "latency": Change(delays_saved=1.0),
    }


def _work(replayer: Replayer, chain: Array, overhead_ns: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return what the CPU does on the critical path of recorded steps, and in which regions between operators."""
    graph, trace, done = replayer.graph, replayer.trace, dict[int, Intervals]()
    optimizers = optimizer_ranges(trace)
    layers = work_of_cpu(trace) | {
        "optimizer": [optimizers[0].where(optimizers[2])] if optimizers else [],
        "operators": [trace.operators, trace.runtime],
    }
    worked = chain[np.isin(graph.edges.kind[chain], (ON_CPU, HANDED_OFF))]
    spent = graph.edges.until_ns[worked] - graph.edges.since_ns[worked]
    times, before = dict[str, int](), 0
    for name, tables in layers.items():
        for thread, own in times_by_thread(*tables).items():
            done[thread] = union(done[thread], own) if thread in done else own
        so_far = int(graph.inside_ns(graph.edges, worked, done).sum())
        times[name], before = so_far - before, so_far
    times["between_operators"] = int(spent.sum()) - before
    del times["input"]
    share = overhead_ns / max(sum(times.values()), 1)
    regions = {name: round(ns * share) for name, ns in _outside_by_region(graph, worked, done).items()}
    return {name: round(times[name] * share) for name in WORK}, regions


def _outside_by_region(graph: Graph, rows: Array, done: Mapping[int, Intervals]) -> dict[str, int]:
    """Return how long the CPU works on these edges outside of ``done``, by innermost region, the longest first."""
    regions, edges, sums = graph.trace.regions, graph.edges, Counter[str]()
    nested = NestedRanges(regions.start_ns, regions.end_ns, regions.thread)
    for thread, own in group_rows(graph.thread[edges.target[rows]]):
        worked, inside = (
            merge_overlaps(edges.since_ns[rows[own]], edges.until_ns[rows[own]]),
            regions.thread == thread,
        )
        cuts = np.unique(np.concatenate((*worked, regions.start_ns[inside], regions.end_ns[inside])))
        starts, ends = cuts[:-1], cuts[1:]
        ns = covered_ns(worked, starts, ends)
        ns[ns > 0] -= covered_ns(done.get(thread, NO_TIMES), starts, ends)[ns > 0]
        region = nested.innermost_at(starts, np.full(len(starts), thread))
        for name, pieces in group_rows(regions.name[region[region >= 0]]):
            sums[regions.strings[name]] += int(ns[region >= 0][pieces].sum())
    return {name: ns for name, ns in sums.most_common() if ns > 0}


def _parts(replayer: Replayer, replayed: Replay, chain: Array, total: int, step_ns: int) -> dict[str, int]:
    """Return the time of each class on the critical path, in the shares of the replay."""
    graph, edges, parts = replayer.graph, replayed.edges.where(chain), dict.fromkeys(CLASSES, 0)
    took = replayed.weight_ns[chain]
    before = np.minimum(np.cumsum(np.maximum(took, 0)), int(took.sum()) - total)
    early = np.diff(before, prepend=0)  # before the first step
    since = np.minimum(edges.since_ns + early, edges.until_ns)
    late, waited, held_up, own = edge_times(graph, edges._replace(since_ns=since), replayed.removed, took - early)
    kind, row = edges.kind, graph.work[edges.target]
    parts["other"], parts["latency"] = int(late[kind == ANCHORED].sum()), int(late[kind != ANCHORED].sum())
    parts["input"], parts["synchronization"] = int(waited.sum()), int(held_up.sum())
    on_cpu, returns = row < 0, np.isin(kind, (CALLED, RETURNED))
    parts["synchronization"] += int(own[on_cpu & returns].sum())
    parts["overhead"] = int(own[on_cpu & ~returns].sum())
    own, classes = own[~on_cpu], replayer.classes[row[~on_cpu]]
    parts |= {name: int(own[classes == number].sum()) for number, name in enumerate(GPU_CLASSES)}
    return {name: round(max(ns, 0) * step_ns / max(total, 1)) for name, ns in parts.items()}
