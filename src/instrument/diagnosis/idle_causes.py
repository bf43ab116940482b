"""Divides the idle time of the GPUs by what the CPU did meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..traces.intervals import Intervals, clip, covered_ns, merge_overlaps, union
from ..traces.main_threads import main_thread
from ..traces.synchronizations import Synchronization
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .idle import SHORT_NS, UNKNOWN, launched_at

INPUT = re.compile(r"^enumerate\(DataLoader\)|^data$|train_dataloader_next|_next_data|^## wait_for_batch")
"""Names of the ranges in which a loop waits for its next batch: those of torch, Lightning and this library."""

COMPILATION = re.compile(r"\(dynamo_timed\)$|^(?:_compile\.|compile_fx|entire_frame_compile|backend_compile)")
"""Names of the phases of torch.compile, as torch records them."""

COLLECTION = re.compile(r"^Python GC|^gc\.collect")
"""Names of the pauses of Python's garbage collector."""

ALLOCATION = re.compile(
    r"^(?:cuda|hip)(?:Malloc(?!Async|FromPool)|Free(?!Async)|Host(?:Alloc|Register|Unregister))"
    r"|^cuMem(?:Create|Map|Unmap|Release|SetAccess|Alloc|Free)"
)
"""Calls of the driver that allocate or free memory."""

LOADING = re.compile(r"^(?:cu|hip)(?:Module|Library)Load|^(?:cuda|hip)RegisterFatBinary|^cuLibraryGetKernel")
"""Calls of the driver that load the code of kernels."""

CAUSES = {
    "input": "the loop waits for the next batch",
    "compilation": "torch.compile compiles",
    "garbage_collection": "Python collects garbage",
    "initialization": "a driver call takes over 100 ms, as when the driver starts or first loads code",
    "allocation": "the driver allocates or frees memory",
    "module_loading": "the driver loads the code of kernels",
    "synchronization": "the CPU launches the next work late, because it has waited for the GPU",
    "launch_overhead": "the CPU has not yet launched the next work",
    "launch_latency": "the next work, launched before, starts within 30 us",
    "other": "the next work, launched before, waits for something else",
    "unknown": "the next work, or its launch, is not in the trace",
}
"""The causes of idle time, as clauses that follow "while"."""

_LAYERS = ("input", "compilation", "garbage_collection", "initialization", "allocation", "module_loading")
_LONG_NS = 1_000_000
SLOW_NS = 100_000_000  # far longer than any call takes in a loop while the GPU idles
_LONG_BY_NATURE = re.compile(r"Synchronize|Memcpy|Memset|^(?:cuda|hip)Host|^cuMemHost")


class IdleCauses(NamedTuple):
    """The gaps in the work of the GPUs, and the time of each cause in each gap.

    Attributes:
        start_ns: the start of each gap.
        end_ns: its end.
        by_cause: for each key of `CAUSES`, the time in each gap; they add up to the length of the gap.
    """

    start_ns: Array
    end_ns: Array
    by_cause: dict[str, Array]

    def total(self, cause: str) -> int:
        """Return the idle time with this cause in ns."""
        return int(self.by_cause[cause].sum())

    def long_gaps(self, cause: str) -> Array | None:
        """Return the gaps with over 1 ms of this cause, if most of its time is in them; else None.

        A launch takes 5 to 20 us: a gap of over 1 ms has another reason than the cost of launches.
        """
        ns = self.by_cause[cause]
        long = np.flatnonzero(ns >= _LONG_NS)
        return long if 2 * int(ns[long].sum()) > int(ns.sum()) else None

    def totals(self) -> dict[str, int]:
        """Return the idle time of each cause in ns, the longest first, without those that do not occur."""
        sums = {cause: self.total(cause) for cause in CAUSES}
        return {cause: ns for cause, ns in sorted(sums.items(), key=lambda item: -item[1]) if ns}


def idle_causes(
    trace: Trace, busy: Intervals, window: tuple[int, int], waits: list[Synchronization]
) -> IdleCauses:
    """Divide the time of the window during which no GPU works by its causes.

    At each moment the first cause of `CAUSES` that applies counts. Idle time after a synchronization is
    attributed to it, up to the time that the CPU was blocked: for that long, the CPU could have run ahead. The
    rest of a gap is attributed to what delayed the next work, as in `idle.gaps`.

    Args:
        trace: the trace.
        busy: when any GPU works.
        window: the time to divide.
        waits: the synchronizations of the program.
    """
    starts, ends = _gaps(busy, window)
    left = ends - starts
    by_cause = {cause: np.zeros(len(starts), np.int64) for cause in CAUSES}
    done: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))
    for cause, layer in zip(_LAYERS, _layers(trace), strict=True):
        both = union(done, layer)
        by_cause[cause] = covered_ns(both, starts, ends) - covered_ns(done, starts, ends)
        left, done = left - by_cause[cause], both
    by_cause["synchronization"] = np.minimum(left, _blocked(starts, ends, waits))
    left = left - by_cause["synchronization"]
    kinds = _delays(trace, starts, ends)
    for cause, rows in kinds.items():
        by_cause[cause][rows] = left[rows]
    return IdleCauses(starts, ends, by_cause)


def named_ranges(trace: Trace, pattern: re.Pattern[str]) -> Iterator[Table]:
    """Yield the operators, regions and other events whose names match; profilers keep them in either table."""
    for events in (trace.operators, trace.regions, trace.others):
        yield events.where(events.matching("name", pattern))


def input_ranges(trace: Trace) -> list[Table]:
    """Return the ranges in which the loop itself waits for its next batch; other threads may wait without harm."""
    loop = np.append(trace.steps.thread, main_thread(trace))
    tables = [found.where(np.isin(found.thread, loop)) for found in named_ranges(trace, INPUT)]
    return [found for found in tables if found]


def _gaps(busy: Intervals, window: tuple[int, int]) -> Intervals:
    inside = clip(busy, *window)
    starts = np.concatenate(([window[0]], inside[1]))
    ends = np.concatenate((inside[0], [window[1]]))
    some = ends > starts
    return starts[some], ends[some]


def _layers(trace: Trace) -> Iterator[Intervals]:
    yield _times(input_ranges(trace))
    for pattern in (COMPILATION, COLLECTION):
        found = [rows for rows in named_ranges(trace, pattern) if rows]
        yield _times(found)
    yield _times([slow_calls(trace)])
    for pattern in (ALLOCATION, LOADING):
        yield _times([trace.runtime.where(trace.runtime.matching("name", pattern))])


def slow_calls(trace: Trace) -> Table:
    """Return the driver calls of 100 ms or more, as when the driver starts or first loads code."""
    slow = trace.runtime.where(trace.runtime.duration_ns >= SLOW_NS)
    return slow.where(~slow.matching("name", _LONG_BY_NATURE) & ~slow.matching("name", LOADING))


def _times(tables: list[Table]) -> Intervals:
    nothing = np.empty(0, np.int64)
    starts = [nothing, *(table.start_ns for table in tables)]
    ends = [nothing, *(table.end_ns for table in tables)]
    return merge_overlaps(np.concatenate(starts), np.concatenate(ends))


def _blocked(starts: Array, ends: Array, waits: list[Synchronization]) -> Array:
    """Return for each gap how long the synchronizations that return in it left the GPU idle."""
    blocked = np.zeros(len(starts), np.int64)
    idle = [(wait.end_ns, wait.blocked_ns if wait.idle_ns is None else wait.idle_ns) for wait in waits]
    if not idle or not len(starts):
        return blocked
    at, idle_ns = np.array(idle, np.int64).T
    gap = np.searchsorted(starts, at, "right") - 1
    inside = (gap >= 0) & (at < ends[gap])
    np.add.at(blocked, gap[inside], idle_ns[inside])
    return blocked


def _delays(trace: Trace, starts: Array, ends: Array) -> dict[str, Array]:
    """Return the gaps by what delayed the work that ends them."""
    gpu = trace.gpu
    launched = launched_at(gpu, trace.runtime)
    following = np.searchsorted(gpu.start_ns, ends)
    known = following < len(gpu)
    at = np.full(len(starts), UNKNOWN)  # also if no work follows
    at[known] = launched[following[known]]
    unknown, late = at == UNKNOWN, at >= starts
    short = ends - starts < SHORT_NS
    return {
        "launch_overhead": late & ~unknown,
        "launch_latency": ~unknown & ~late & short,
        "other": ~unknown & ~late & ~short,
        "unknown": unknown,
    }
