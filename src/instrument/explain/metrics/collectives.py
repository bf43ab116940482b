"""Collectives: their sizes, durations and exposed time, which rank arrives last at them, and the times of a rank.

In a collective, every rank's kernel ends at the same time, and begins when the rank arrives: the last rank to
arrive has the shortest kernel, whatever the clocks of the machines say.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...read.jobs.align import (
    CollectiveSequence,
    collective_kernels,
    collective_sequences,
    name_hash,
    places,
    steps_of,
)
from ...read.tables.intervals import Intervals, covered_ns, merge_overlaps, total_ns
from ...read.tables.notes import process_groups
from ...read.tables.steps import StepIndex
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace
from .tables import sum_by_group
from .utilization import ratio

BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int", "int32"), 4),
    **dict.fromkeys(("double", "long", "int64", "complexfloat"), 8),
    "complexdouble": 16,
}
"""Bytes per element by type, as torch.profiler names the types of collectives, in lower case."""


_BUS: dict[str, Callable[[int], float]] = {
    "reduce_?scatter": lambda ranks: (ranks - 1) / ranks,
    "all_?reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_?gather": lambda ranks: (ranks - 1) / ranks,
    "all_?to_?all": lambda ranks: (ranks - 1) / ranks,
    "broadcast|reduce|send|recv": lambda ranks: 1.0,
}
"""By collective, the bytes that each link moves per byte of the collective: the factors of nccl-tests."""


def collective_table(
    gpu: Table, mask: Array, compute: Intervals, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the kernels that communicate, by collective or kernel name, process group and type.

    ``exposed_ns`` adds up the time of each kernel during which nothing computes; kernels that run at the same
    time all count. ``bytes`` is the size of the larger of input and output, as in nccl-tests, and
    ``bus_bytes_per_s`` what each link carries: ``bytes_per_s`` times the factor of nccl-tests for the number of
    ranks.

    Args:
        gpu: the GPU work.
        mask: which rows communicate.
        compute: when anything computes.
        sizes: the number of ranks of each process group.
    """
    part, strings = gpu.where(mask), gpu.strings
    label = np.where(part.collective != 0, part.collective, part.name)
    keys, which = np.unique(np.stack((label, part.group, part.dtype), axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    exposed = part.duration_ns - covered_ns(compute, part.start_ns, part.end_ns)
    elements = np.maximum(part.elements_in, part.elements_out)
    rows = []
    columns = (np.ones_like(which), elements, elements < 0, part.duration_ns, exposed)
    totals = zip(*(sum_by_group(column, which, len(keys)).tolist() for column in columns), strict=True)
    for (name, group, dtype), (count, size, unknown, duration, alone) in zip(keys.tolist(), totals, strict=True):
        each = BYTES.get(strings[dtype].lower())
        total = None if each is None or unknown else size * each
        rate = None if total is None else ratio(total * 1e9, duration)
        factor = _bus_factor(strings[name], sizes.get(strings[group]))
        rows.append(
            {
                "name": strings[name],
                "group": strings[group],
                "dtype": strings[dtype],
                "count": count,
                "bytes": total,
                "sum_ns": duration,
                "exposed_ns": alone,
                "bytes_per_s": rate,
                "bus_bytes_per_s": None if rate is None or factor is None else rate * factor,
            }
        )
    return sorted(rows, key=lambda row: (-row["sum_ns"], row["name"], row["group"], row["dtype"]))


def group_sizes(trace: Trace) -> dict[str, int]:
    """Return the number of ranks of each process group, as the trace says; groups that disagree are left out."""
    sizes_by_name: dict[str, set[int]] = {}
    for group in process_groups(trace.metadata):
        if isinstance(size := group.get("pg_size"), int) and size > 0:
            sizes_by_name.setdefault(str(group.get("pg_name")), set()).add(size)
    return {name: sizes.pop() for name, sizes in sizes_by_name.items() if len(sizes) == 1}


def _bus_factor(name: str, ranks: int | None) -> float | None:
    if not ranks:
        return None
    return next((factor(ranks) for pattern, factor in _BUS.items() if re.search(pattern, name.lower())), None)


Group = tuple[str, str]
_ALONE = "only one rank has it"


class RankArrivals(NamedTuple):
    """One rank at the collectives of the job.

    Attributes:
        last: how often it arrived last.
        waited_ns: how long it waited for the last rank, over all collectives; time at several at once counts once.
        caused_ns: how long all other ranks waited when it was the last: the sum over ranks, each counted so.
        late_ns: how much later than the first rank it then arrived, in the median; 0 if it was never the last.
    """

    last: int
    waited_ns: int
    caused_ns: int
    late_ns: int = 0


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of all ranks at the collectives that they share.

    Attributes:
        ranks: by rank; the sums of ``waited_ns`` and of ``caused_ns`` over all ranks are equal.
        collectives: the number of collectives that were compared.
        unmatched: why process groups were left out, each reason with the number of groups.
        missing: the ranks of the job without a trace.
        steps: the number of steps with such collectives; 0 without steps.
    """

    ranks: Mapping[int, RankArrivals]
    collectives: int
    unmatched: Mapping[str, int]
    missing: tuple[int, ...] = ()
    steps: int = 0

    @property
    def unknown(self) -> str:
        """Why nothing was compared, in words; empty if something was."""
        if self.collectives:
            return ""
        reasons = {reason: count for reason, count in self.unmatched.items() if reason != _ALONE}
        return max(reasons, key=lambda reason: reasons[reason], default="the ranks share no collectives")

    @property
    def latest(self) -> int | None:
        """The rank for which the others waited longest; None if nothing was compared."""
        causes = {rank: each.caused_ns for rank, each in self.ranks.items() if each.caused_ns}
        return max(causes, key=lambda rank: causes[rank], default=None)


def arrivals(traces: Mapping[int, Trace], missing: tuple[int, ...] = ()) -> Arrivals:
    """Return who arrived last at each collective that the ranks share; see `arrivals_of`.

    Args:
        traces: the traces by rank; `RankContent` is enough.
        missing: the ranks of the job without a trace.
    """
    return arrivals_of({rank: sequences_of(trace) for rank, trace in traces.items()}, missing)


def arrivals_of(
    sequences: Mapping[int, Mapping[Group, CollectiveSequence]], missing: tuple[int, ...] = ()
) -> Arrivals:
    """Return who arrived last at each collective that the ranks share.

    Collectives are the same if they have the same place in the same process group, counted within each step if
    steps are marked, and the same name. A group is left out if a rank of it is missing, or if its ranks recorded
    different numbers of collectives.

    Args:
        sequences: by rank, its collectives by process group.
        missing: the ranks of the job without a trace.
    """
    last, waited, caused = Counter[int](), Counter[int](), Counter[int]()
    waits_for: defaultdict[tuple[int, int], list[tuple[Array, Array]]] = defaultdict(list)
    late: dict[int, list[Array]] = {rank: [] for rank in sorted(sequences)}
    count, unmatched, steps = 0, Counter[str](), set[int]()
    for group in sorted({group for each in sequences.values() for group in each}):
        ranks = sorted(rank for rank in sequences if group in sequences[rank])
        reason, place, ends, durations = matched([sequences[rank][group] for rank in ranks])
        if missing and not (group[0] and group[1]):
            reason = "ranks are missing, which may be those that arrive last"
        elif any(str(rank) in _members(group) for rank in missing):
            reason = "ranks of the process group are missing, which may be those that arrive last"
        if reason or len(ranks) < 2:
            unmatched[reason or _ALONE] += 1
            continue
        if all((sequences[rank][group].step >= 0).any() for rank in ranks):
            steps.update(steps_of(place).tolist())
        shortest = durations.argmin(axis=0)
        waits = durations - durations.min(axis=0)
        count += durations.shape[1]
        starts = ends - durations
        for row, rank in enumerate(ranks):
            is_last = shortest == row
            if not is_last.any():
                continue
            last[rank] += int(is_last.sum())
            late[rank].append(waits[:, is_last].max(axis=0))
            for index, other in enumerate(ranks):
                begun = starts[index, is_last]
                waits_for[other, rank].append((begun, begun + waits[index, is_last]))
    by_rank: defaultdict[int, list[tuple[Array, Array]]] = defaultdict(list)
    for (rank, latest), times in waits_for.items():
        caused[latest] += _together_ns(times)
        by_rank[rank] += times
    for rank, times in by_rank.items():
        waited[rank] = _together_ns(times)
    arrivals_by_rank = {
        rank: RankArrivals(
            last[rank], waited[rank], caused[rank], int(np.median(np.concatenate(times))) if last[rank] else 0
        )
        for rank, times in late.items()
    }
    return Arrivals(arrivals_by_rank, count, dict(unmatched), missing, len(steps))


def _together_ns(times: list[tuple[Array, Array]]) -> int:
    """Return how long any of these times lasts, each as starts and ends."""
    return total_ns(merge_overlaps(*map(np.concatenate, zip(*times, strict=True))))


def _members(group: Group) -> set[str]:
    """Return the ranks of a group with a name; the key of one without has the place of its stream instead."""
    if not group[0]:
        return set()
    return set(group[1].strip("[]").replace(" ", "").split(","))


def matched(sequences: list[CollectiveSequence]) -> tuple[str, Array, Array, Array]:
    """Return why the collectives of the ranks do not match, or their places, ends and durations.

    A place is a number from `places`, or counts collectives without steps; the others have a row for each rank.
    """
    none = np.empty((0, 0), np.int64)
    keys = [places(each.step) if (each.step >= 0).any() else np.arange(len(each.step)) for each in sequences]
    common = keys[0]
    for key in keys[1:]:
        common = np.intersect1d(common, key)
    stepped = all((each.step >= 0).any() for each in sequences)
    if not len(common) or (not stepped and any(len(key) != len(common) for key in keys)):
        return "the ranks recorded different numbers of collectives", none, none, none
    rows = [np.argsort(key)[np.searchsorted(np.sort(key), common)] for key in keys]
    names = np.stack([each.name[row] for each, row in zip(sequences, rows, strict=True)])
    same = (names == names[0]).all(axis=0)
    if not same.any():
        return "the ranks recorded different collectives", none, none, none
    ends = np.stack([each.end_ns[row] for each, row in zip(sequences, rows, strict=True)])
    durations = np.stack([each.duration_ns[row] for each, row in zip(sequences, rows, strict=True)])
    return "", common[same], ends[:, same], durations[:, same]


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
    the start in ns after that of the step, and the duration in ns; see `sequences_of`.

    Args:
        trace: the trace, with steps.
        rank: the rank that it is of.
    """
    steps = trace.steps
    names = {name_hash(text): text[:_MAX_NAME] for text in trace.strings}
    sequences = sequences_of(trace)
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


def sequences_of(trace: Trace) -> dict[Group, CollectiveSequence]:
    """Return the collectives of a rank by process group; without a GPU, those of gloo.

    Those are ranges of its threads, which do not tell several process groups apart: there are none then.
    """
    return collective_sequences(trace, collective_kernels(trace)) or _of_gloo(trace)


def _of_gloo(trace: Trace) -> dict[Group, CollectiveSequence]:
    rows = trace.regions.where(trace.regions.matching("name", _GLOO))
    if not rows or len(group_sizes(trace)) > 1:
        return {}
    rows = rows.where(np.argsort(rows.start_ns, kind="stable"))
    row = StepIndex(trace).rows_at(rows.start_ns, rows.thread)
    step = np.where(row >= 0, trace.steps.number[row], -1)
    name = np.array([name_hash(text) for text in rows.text("name")], np.int64)
    return {("gloo", ""): CollectiveSequence(step, name, rows.end_ns, rows.duration_ns)}
