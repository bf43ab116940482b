"""What a step waits for: the classes of its critical path, and how much shorter it is without each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .critical_path import longest_chain
from .edges import ANCHORED, CALLED, RETURNED
from .replay import Change, Replay, Replayer, SavedWork, mean_ns, replay_changed

STEP_WAITS = {
    "compute": "kernels that compute, and memsets",
    "communication": "kernels that communicate",
    "copies": "memcpys",
    "input": "the loop waits for its next batch",
    "synchronization": "returns of calls that waited for the GPU, and what the CPU did late because of them",
    "overhead": "work of the CPU, such as launches",
    "latency": "from a launch to the start of its work, and between pieces of GPU work",
    "other": "work that was launched before the recording",
}
"""The parts of the critical path, which add up to the step."""

_NEARLY_ALL = 1 - 1e-9  # of the duration: work that saves all of it would need no launch either


class StepWaits(NamedTuple):
    """What a step waits for.

    Attributes:
        parts: the time of each of `STEP_WAITS` on the critical path, per step in ns.
        wins: how much shorter a step is in a replay in which a class costs nothing, in ns.
    """

    parts: Mapping[str, int]
    wins: Mapping[str, int]

    def bounds(self, step_ns: float) -> list[str]:
        """Return the classes that bound a step: those whose removal wins most, within 5 % of the step.

        The one with most time on the critical path comes first. There are two at most, and none if no class wins
        5 %.
        """
        most, close = max(self.wins.values()), CLOSE * step_ns
        tied = [name for name, ns in self.wins.items() if most >= close and most - ns <= close]
        return sorted(tied, key=lambda name: -self.parts[name])[:2]


CLOSE = 0.05
"""Of a step: classes whose wins differ by no more bound it together."""


def step_waits(replayer: Replayer, after: Change | None = None) -> StepWaits:
    """Return what the steps of a trace wait for, as recorded or after a change; its replayer must not abstain."""
    if not after:
        after, replayed, step_ns = Change(), replayer.unchanged, mean_ns(replayer.recorded_ns)
    else:
        replayed, step_ns = replay_changed(replayer.graph, after), replayer.step_ns(after)
    parts = _parts(replayer, replayed, step_ns)
    changes = {name: change for name, change in removals(replayer).items() if change}
    wins = {
        name: step_ns - replayer.step_ns(after | change) if parts[name] else 0  # off the path, nothing is won
        for name, change in changes.items()
    }
    return StepWaits(parts, dict(sorted(wins.items(), key=lambda item: -item[1])))


def removals(replayer: Replayer) -> dict[str, Change]:
    """Return for each class but "other" the change in which it costs nothing; no change where it has no work."""
    of_work = {name: replayer.classes == name for name in ("compute", "communication", "copies")}
    return {
        **{name: Change(saved=rows * _NEARLY_ALL) if rows.any() else Change() for name, rows in of_work.items()},
        "input": Change(replayer.graph.batches),
        "synchronization": Change(asynchronous=frozenset(range(len(replayer.graph.waits)))),
        "overhead": Change(work_saved=(SavedWork(1.0),)),
        "latency": Change(delays_saved=1.0),
    }


def _parts(replayer: Replayer, replayed: Replay, step_ns: int) -> dict[str, int]:
    """Return the time of each class on the critical path, in the shares of the replay.

    Work of the CPU after it waited for the GPU is attributed to that wait, up to the time that it was blocked: for
    so long, it could have run ahead. What waits for a batch is input all the same.
    """
    graph, classes, parts, lead = replayer.graph, replayer.classes, dict.fromkeys(STEP_WAITS, 0), 0
    chain, total, _ = longest_chain(graph, replayed)
    edges = np.array(chain, np.int64)
    target, kind, took = replayed.edges.target[edges], replayed.edges.kind[edges], replayed.weight_ns[edges]
    before = int(took.sum()) - total
    took = took - np.diff(np.minimum(np.cumsum(np.maximum(took, 0)), before), prepend=0)  # from the first step on
    work = graph.work[target]
    delay = np.where(work >= 0, np.clip(replayed.edges.delay_ns[edges], 0, np.maximum(took, 0)), 0)
    waited = np.minimum(graph.inside_ns(replayed.edges, edges, graph.batches), took)
    blocked = {node: wait.blocked_ns for node, wait in zip(graph.return_nodes.tolist(), graph.waits, strict=True)}
    columns = (column.tolist() for column in (kind, target, work, took, delay, waited))
    for on, node, row, ns, late, for_batch in zip(*columns, strict=True):
        if row >= 0:
            parts["other" if on == ANCHORED else "latency"] += late
            parts[str(classes[row])] += ns - late
        elif on in (CALLED, RETURNED):
            lead += blocked.get(node, 0)
            parts["synchronization"] += ns
        else:
            held_up = min(lead, ns - for_batch)
            lead -= held_up
            parts["input"] += for_batch
            parts["synchronization"] += held_up
            parts["overhead"] += ns - for_batch - held_up
    return {name: round(max(ns, 0) * step_ns / max(total, 1)) for name, ns in parts.items()}
