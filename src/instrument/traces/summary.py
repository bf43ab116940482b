"""Where the time of a recorded window went, by region and by operator, from its torch.profiler trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .chrome import Range, Recorded, Thread, read

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class RegionStat:
    """All calls of one region in one place.

    Attributes:
        path: The names of the regions around it, outermost first, and its own.
        calls: How many times it ran.
        cpu_ns: Their durations, added up.
        self_ns: The part of it that no region inside covers.
        gpu_ns: The GPU work launched in it, regions inside included; None where the trace has no GPU work.
    """

    path: tuple[str, ...]
    calls: int
    cpu_ns: int
    self_ns: int
    gpu_ns: int | None


@dataclass(frozen=True)
class OperatorStat:
    """All calls of one operator.

    Attributes:
        name: As PyTorch names it, ``aten::mm``.
        calls: How many times it ran.
        self_ns: Their time on the CPU, without the operators they called.
        gpu_ns: The GPU work they launched themselves; None where the trace has no GPU work.
    """

    name: str
    calls: int
    self_ns: int
    gpu_ns: int | None


@dataclass(frozen=True)
class Summary:
    """Where the time of the recorded steps went.

    GPU time is the sum of the durations of kernels, copies and fills: work that overlaps counts twice. It
    belongs to the regions it was launched in: that of the outermost ones and the unattributed make the total.

    Attributes:
        steps: How many steps were recorded; 0 where the trace marks none.
        step_ns: Their durations on the CPU, added up; without steps, from the first event to the last.
        regions: As a tree in order of first call: each region is followed by those inside it.
        operators: By their own time, longest first.
        gpu_total_ns: All GPU work; None where the trace has none.
        gpu_unattributed_ns: The GPU work that was launched in no region, or before the window.
    """

    steps: int
    step_ns: int
    regions: tuple[RegionStat, ...]
    operators: tuple[OperatorStat, ...]
    gpu_total_ns: int | None
    gpu_unattributed_ns: int | None


def summarize(path: Path) -> Summary:
    """Read one Chrome trace, ``.json`` or ``.json.gz``, of torch.profiler.

    GPU work belongs to the region open where and when it was launched. On a thread with none open, such as
    those that run the backward pass on CUDA, it belongs to the one then open on the thread of the steps,
    which waits for them.

    Raises:
        TraceError: If the file is not such a trace, or is damaged.
        OSError: If it cannot be opened.
    """
    recorded = read(path)
    main = recorded.main_thread()
    regions = {thread: _Nest(ranges) for thread, ranges in recorded.regions.items()}
    operators = {thread: _Nest(ranges) for thread, ranges in recorded.operators.items()}
    gpu = _attribute(recorded, regions, operators, main) if recorded.gpu else None

    by_path: dict[tuple[str, ...], list[int]] = {}
    for thread in sorted(regions, key=lambda thread: thread != main):
        for place, *values in regions[thread].tree():
            _add(by_path, place, 1, *values)
    by_name: dict[str, list[int]] = {}
    for nest in operators.values():
        for (_, _, name), self_ns, gpu_ns in zip(nest.ranges, nest.self_ns, nest.gpu_ns, strict=True):
            _add(by_name, name, 1, self_ns, gpu_ns)
    return _summary(len(recorded.steps), recorded.step_ns(), by_path, by_name, gpu)


def merge(summaries: Sequence[Summary]) -> Summary:
    """Add up several windows of one run; none at all make an empty summary."""
    by_path: dict[tuple[str, ...], list[int]] = {}
    by_name: dict[str, list[int]] = {}
    for summary in summaries:
        for region in summary.regions:
            _add(by_path, region.path, region.calls, region.cpu_ns, region.self_ns, region.gpu_ns or 0)
        for operator in summary.operators:
            _add(by_name, operator.name, operator.calls, operator.self_ns, operator.gpu_ns or 0)
    gpu = None
    if any(summary.gpu_total_ns is not None for summary in summaries):
        gpu = sum(s.gpu_total_ns or 0 for s in summaries), sum(s.gpu_unattributed_ns or 0 for s in summaries)
    return _summary(sum(s.steps for s in summaries), sum(s.step_ns for s in summaries), by_path, by_name, gpu)


def _attribute(
    recorded: Recorded, regions: dict[Thread, _Nest], operators: dict[Thread, _Nest], main: Thread | None
) -> tuple[int, int]:
    """Charge all GPU work to the ranges that launched it; all of it, and what is left, in ns."""
    total_ns = unattributed_ns = 0
    for duration_ns, origin in recorded.gpu_work():
        total_ns += duration_ns
        thread, at = origin or (None, 0)
        if thread in operators:
            operators[thread].charge(at, duration_ns)
        owners = [regions[key] for key in (thread, main) if thread and key in regions]
        if not any(nest.charge(at, duration_ns) for nest in owners):
            unattributed_ns += duration_ns
    return total_ns, unattributed_ns


def _add(table: dict[_Key, list[int]], key: _Key, *values: int) -> None:
    row = table.setdefault(key, [0] * len(values))
    for column, value in enumerate(values):
        row[column] += value


def _summary(
    steps: int,
    step_ns: int,
    by_path: dict[tuple[str, ...], list[int]],
    by_name: dict[str, list[int]],
    gpu: tuple[int, int] | None,
) -> Summary:
    """The rows of the tables, which end with their GPU time, as statistics in order."""
    rank = {path: index for index, path in enumerate(by_path)}
    tree = sorted(by_path, key=lambda path: [rank[path[:depth]] for depth in range(1, len(path) + 1)])
    regions = tuple(
        RegionStat(path, calls, cpu_ns, self_ns, gpu_ns if gpu else None)
        for path in tree
        for calls, cpu_ns, self_ns, gpu_ns in [by_path[path]]
    )
    operators = tuple(
        OperatorStat(name, calls, self_ns, gpu_ns if gpu else None)
        for name, (calls, self_ns, gpu_ns) in sorted(by_name.items(), key=lambda item: -item[1][1])
    )
    return Summary(steps, step_ns, regions, operators, *(gpu or (None, None)))


class _Nest:
    """The ranges of one thread. The parent of a range is the last started of those that hold it whole.

    Ranges of interleaved asyncio tasks overlap without one holding the other: they are siblings.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda item: (item[0], -item[1]))
        self.gpu_ns = [0] * len(self.ranges)
        self.self_ns = [end - start for start, end, _ in self.ranges]
        self._starts = [start for start, _, _ in self.ranges]
        self._ends = [end for _, end, _ in self.ranges]
        self._parents: list[int] = []
        self._link()

    def _link(self) -> None:
        covered = list(self._starts)  # up to where the children so far reach: overlapping ones count once
        open_: list[int] = []
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            while open_ and self._ends[open_[-1]] <= start:
                open_.pop()
            parent = next((other for other in reversed(open_) if self._ends[other] >= end), -1)
            if parent >= 0:
                self.self_ns[parent] -= max(0, end - max(start, covered[parent]))
                covered[parent] = max(end, covered[parent])
            self._parents.append(parent)
            open_.append(index)

    def charge(self, at: int, gpu_ns: int) -> bool:
        """Give GPU time to the last started range open at that time; False if there is none."""
        index = bisect_right(self._starts, at) - 1
        while index >= 0 and self._ends[index] <= at:
            index = self._parents[index]
        if index >= 0:
            self.gpu_ns[index] += gpu_ns
        return index >= 0

    def tree(self) -> Iterator[tuple[tuple[str, ...], int, int, int]]:
        """Each range as path, duration, self time and GPU time with the ranges inside; parents come first."""
        gpu_ns = list(self.gpu_ns)
        for index in reversed(range(len(gpu_ns))):
            if self._parents[index] >= 0:
                gpu_ns[self._parents[index]] += gpu_ns[index]
        paths: list[tuple[str, ...]] = []
        for index, (start, end, name) in enumerate(self.ranges):
            parent = self._parents[index]
            paths.append((*paths[parent], name) if parent >= 0 else (name,))
            yield paths[index], end - start, self.self_ns[index], gpu_ns[index]
