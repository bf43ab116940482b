"""`RankTimes`: the steps and collectives of one rank in a small file, for the rank that compares all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ...read.jobs.align import CollectiveSequence, collective_kernels, collective_sequences, name_hash
from ...read.tables.steps import StepIndex
from ...read.tables.trace import Trace
from .collectives import Group, group_sizes

_MAX_STEPS = 200  # in a file; later ones are left out, so that it has less than 100 kB
_MAX_COLLECTIVES = 2000
_MAX_NAME = 200  # characters
# Those that no rank leaves before all have entered: the root of a broadcast may leave at once.
_GLOO = re.compile("^gloo:(?:sparse_)?(?:all_?(?:reduce|gather|to_?all)|reduce_?scatter|barrier)")


@dataclass(frozen=True)
class RankTimes:
    """The recorded steps of one rank.

    Attributes:
        rank: the rank.
        start_ns: the start of the first step, in ns since the epoch, on the clock of the rank.
        end_ns: the end of the last step.
        steps: the duration of each step in ns, by its number.
        collectives: the collectives by process group, on the clock of the rank too.
    """

    rank: int
    start_ns: int
    end_ns: int
    steps: Mapping[int, int]
    collectives: Mapping[Group, CollectiveSequence]


def format_rank_times(trace: Trace, rank: int) -> str:
    """Return the steps and collectives of a trace as lines of JSON: one about the rank, then one for each step.

    A step has its number, its start in ns after that of the first (``at``), its duration (``ns``) and its
    ``collectives`` in order: for each the process group and the kind, as places in the lists of the first line,
    the start in ns after that of the step, and the duration in ns. Without a GPU, these are the collectives of
    gloo, unless there are several process groups, which gloo does not tell apart.

    Args:
        trace: the trace, with steps.
        rank: the rank that it is of.
    """
    steps = trace.steps
    names = {name_hash(text): text[:_MAX_NAME] for text in trace.strings}
    sequences = collective_sequences(trace, collective_kernels(trace)) or _of_gloo(trace)
    kinds: dict[str, int] = {}
    by_step: dict[int, list[list[int]]] = {}
    starts = dict(zip(steps.number.tolist(), steps.start_ns.tolist(), strict=True))
    for group, each in enumerate(sequences.values()):
        columns = (each.step, each.name, each.end_ns - each.duration_ns, each.duration_ns)
        for step, name, start_ns, duration_ns in zip(*(column.tolist() for column in columns), strict=True):
            if step in starts:
                kind = kinds.setdefault(names[name], len(kinds))
                by_step.setdefault(step, []).append([group, kind, start_ns - starts[step], duration_ns])
    first = int(steps.start_ns.min())
    lines: list[dict[str, Any]] = [
        {
            "rank": rank,
            "start_ns": first + trace.epoch_ns,
            "end_ns": int(steps.end_ns.max()) + trace.epoch_ns,
            "groups": [[name, name_hash(members)] for name, members in sequences],  # members may be thousands
            "kinds": list(kinds),
        }
    ]
    count = 0
    for number, ns in islice(zip(steps.number.tolist(), steps.duration_ns.tolist(), strict=True), _MAX_STEPS):
        rows = sorted(by_step.get(number, ()), key=lambda row: row[2])[:_MAX_COLLECTIVES]
        count += len(rows)
        if count > _MAX_COLLECTIVES:
            break
        lines.append({"step": number, "at": starts[number] - first, "ns": ns, "collectives": rows})
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def parse_rank_times(text: str) -> RankTimes:
    """Return what `format_rank_times` wrote.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        head, *lines = map(json.loads, text.splitlines())
        rows = [
            [line["step"], head["start_ns"] + line["at"], *row] for line in lines for row in line["collectives"]
        ]
        step, begun, group, kind, start, duration = np.array(rows, np.int64).reshape(-1, 6).T
        end = begun + start + duration
        name = np.array([name_hash(text) for text in head["kinds"]], np.int64)[kind]
        groups = [(str(name), str(members)) for name, members in head["groups"]]
        collectives = {}
        for number, key in enumerate(groups):
            own = group == number
            collectives[key] = CollectiveSequence(step[own], name[own], end[own], duration[own])
        return RankTimes(
            int(head["rank"]),
            int(head["start_ns"]),
            int(head["end_ns"]),
            {int(line["step"]): int(line["ns"]) for line in lines},
            collectives,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"damaged times of a rank: {type(error).__name__}: {error}") from None


def merge_rank_times(windows: list[RankTimes]) -> RankTimes:
    """Return the times of several windows of one rank, in order, as those of one window."""
    collectives = {}
    for group in dict.fromkeys(group for each in windows for group in each.collectives):
        parts = [each.collectives[group] for each in windows if group in each.collectives]
        collectives[group] = CollectiveSequence(
            *(
                np.concatenate([getattr(part, column) for part in parts])
                for column in ("step", "name", "end_ns", "duration_ns")
            )
        )
    return RankTimes(
        windows[0].rank,
        windows[0].start_ns,
        windows[-1].end_ns,
        {number: ns for each in windows for number, ns in each.steps.items()},
        collectives,
    )


def _of_gloo(trace: Trace) -> dict[Group, CollectiveSequence]:
    """Return the collectives of gloo, which are ranges of its threads."""
    rows = trace.regions.where(trace.regions.matching("name", _GLOO))
    if not rows or len(group_sizes(trace)) > 1:
        return {}
    rows = rows.where(np.argsort(rows.start_ns, kind="stable"))
    row = StepIndex(trace).rows_at(rows.start_ns, rows.thread)
    step = np.where(row >= 0, trace.steps.number[row], -1)
    name = np.array([name_hash(text) for text in rows.text("name")], np.int64)
    return {("gloo", ""): CollectiveSequence(step, name, rows.end_ns, rows.duration_ns)}
