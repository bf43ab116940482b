"""Idle time of the GPUs: its gaps, what the CPU did meanwhile, and what the steps win if the CPU saves time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...base.trace_marks import CORES
from ...read.measures.synchronizations import Synchronization, columns_of
from ...read.tables.intervals import Intervals, clip, covered_ns, merge_overlaps, union
from ...read.tables.lanes import distinct_values, group_rows
from ...read.tables.steps import main_thread
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace
from .tables import sum_by_group

SHORT_NS = 30_000
"""Shorter gaps are launch latency; HTA's default."""

UNKNOWN = np.iinfo(np.int64).min
"""The launch time of work whose launch is not in the trace."""


def launched_at(gpu: Table, runtime: Table) -> Array:
    """Return when the host began to launch each kernel, memcpy and memset, in ns, or `UNKNOWN`."""
    times = np.full(len(gpu), UNKNOWN)
    linked = gpu.launch >= 0
    times[linked] = runtime.start_ns[gpu.launch[linked]]
    return times


def idle_streams(gpu: Table, launched_ns: Array, order: Array) -> dict[str, dict[str, int]]:
    """Return for each stream the gaps between successive work, by cause.

    The rules of HTA's ``get_idle_time_breakdown``, in ns instead of whole us: ``host_wait`` if the work was
    launched after the work before it ended, else ``kernel_wait`` if the gap is shorter than `SHORT_NS`, else
    ``other``. Work that overlaps within a stream has a negative gap, which is added as such.
    """
    order = order[np.lexsort((gpu.stream[order], gpu.device[order]))]
    device, stream, end_ns = gpu.device[order], gpu.stream[order], gpu.end_ns[order]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(device) != 0) | (np.diff(stream) != 0)
    first, of = np.flatnonzero(new), np.cumsum(new) - 1
    after = np.flatnonzero(~new)
    before = end_ns[after - 1]
    gap, host = gpu.start_ns[order[after]] - before, launched_ns[order[after]] > before
    short = gap < SHORT_NS
    classes = {"host_wait": host, "kernel_wait": ~host & short, "other": ~host & ~short}
    columns = {
        name: sum_by_group(gap[rows], of[after[rows]], len(first)).tolist() for name, rows in classes.items()
    }
    columns["n"] = np.bincount(of, minlength=len(first)).tolist()
    rows = zip(device[first].tolist(), stream[first].tolist(), *columns.values(), strict=True)
    return {
        f"dev{_known(on)}/stream{_known(number)}": dict(zip(columns, values, strict=True))
        for on, number, *values in rows
    }


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def gaps(gpu: Table, launched_ns: Array, order: Array) -> dict[str, Any]:
    """Return the gaps during which no stream of any device was busy, by the cause of the delay of the next work.

    ``host_wait`` if that work was launched when the gap began or later, else ``launch_latency`` if the gap is
    shorter than `SHORT_NS`, else ``other``; ``unknown`` if its launch is not in the trace. Work of zero duration
    ends a gap.
    """
    start, reach = gpu.start_ns[order], np.maximum.accumulate(gpu.end_ns[order])
    after = np.flatnonzero(start[1:] > reach[:-1]) + 1
    begins, gap, launched = reach[after - 1], start[after] - reach[after - 1], launched_ns[order[after]]
    by_cause = {name: rows for name, rows in _by_delay("host_wait", begins, gap, launched).items() if rows.any()}
    return {
        "gaps_device_ns": {name: int(gap[rows].sum()) for name, rows in by_cause.items()},
        "gaps_device_n": {name: int(rows.sum()) for name, rows in by_cause.items()},
        "max_gap_ns": int(gap.max(initial=0)),
        "n_gaps": len(gap),
    }


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
    by_cause = {cause: np.zeros(len(starts), np.int64) for cause in CAUSES}
    done: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))
    assigned = np.zeros(len(starts), np.int64)
    for cause, tables in work_of_cpu(trace).items():
        if not any(tables):
            continue
        done = union(done, times_of(tables))
        covered = covered_ns(done, starts, ends)
        by_cause[cause], assigned = covered - assigned, covered
    left = ends - starts - assigned
    by_cause["synchronization"] = np.minimum(left, _blocked(starts, ends, waits))
    left = left - by_cause["synchronization"]
    for cause, rows in _delays(trace, starts, ends).items():
        by_cause[cause][rows] = left[rows]
    return IdleCauses(starts, ends, by_cause)


def work_of_cpu(trace: Trace) -> dict[str, list[Table]]:
    """Return the events of the CPU that cause idle time whatever they launch; the first that applies counts."""
    return {
        "input": input_ranges(trace),
        "compilation": named_ranges(trace, COMPILATION),
        "garbage_collection": named_ranges(trace, COLLECTION),
        "initialization": [slow_calls(trace)],
        "allocation": [trace.runtime.where(trace.runtime.matching("name", ALLOCATION))],
        "module_loading": [trace.runtime.where(trace.runtime.matching("name", LOADING))],
    }


def named_ranges(trace: Trace, pattern: re.Pattern[str]) -> list[Table]:
    """Return the operators, regions and other events whose names match, without empty tables."""
    tables = (trace.operators, trace.regions, trace.others)
    return [ranges for each in tables if (ranges := each.where(each.matching("name", pattern)))]


def input_ranges(trace: Trace) -> list[Table]:
    """Return the ranges in which the loop itself waits for its next batch; other threads may wait without harm."""
    loop = np.append(trace.steps.thread, main_thread(trace))
    tables = [each.where(np.isin(each.thread, loop)) for each in named_ranges(trace, INPUT)]
    return [each for each in tables if each]


EVALUATION = re.compile(r"(?:^|[./ ])(?:evaluation|eval|validation)$", re.IGNORECASE)
CHECKPOINT = re.compile(r"(?:^|[./ ])(?:checkpoint|save_checkpoint)$", re.IGNORECASE)
"""Names of regions beside the training itself."""

SINGLE, MULTIPLE = re.compile("SingleProcess"), re.compile("MultiProcess")
"""What torch's ranges around a DataLoader without workers contain, and those of one with workers."""


def loading_by(trace: Trace) -> re.Pattern[str] | None:
    """Return which of `SINGLE` and `MULTIPLE` the loop waits for longer; None if the trace does not say."""
    waited = {
        kind: sum(int(each.duration_ns[each.matching("name", kind)].sum()) for each in input_ranges(trace))
        for kind in (SINGLE, MULTIPLE)
    }
    return max(waited, key=lambda kind: waited[kind]) if any(waited.values()) else None


def cores_of(trace: Trace) -> int | None:
    """Return the CPU cores that the recorded program could use; None if the trace does not say."""
    recorded = str(trace.metadata.get(CORES, ""))
    return int(recorded) if recorded.isdecimal() and int(recorded) else None


def _gaps(busy: Intervals, window: tuple[int, int]) -> Intervals:
    inside = clip(busy, *window)
    starts = np.concatenate(([window[0]], inside[1]))
    ends = np.concatenate((inside[0], [window[1]]))
    some = ends > starts
    return starts[some], ends[some]


def slow_calls(trace: Trace) -> Table:
    """Return the driver calls of 100 ms or more, as when the driver starts or first loads code."""
    slow = trace.runtime.where(trace.runtime.duration_ns >= SLOW_NS)
    return slow.where(~slow.matching("name", _LONG_BY_NATURE) & ~slow.matching("name", LOADING))


def times_of(tables: Sequence[Table]) -> Intervals:
    """Return when any of these events ran."""
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
    gpu, launched = trace.gpu, launched_at(trace.gpu, trace.runtime)
    at = np.append(launched, UNKNOWN)[np.searchsorted(gpu.start_ns, ends)]  # also unknown if no work follows
    return _by_delay("launch_overhead", starts, ends - starts, at)


def _by_delay(late: str, starts: Array, length: Array, launched: Array) -> dict[str, Array]:
    """Return masks of gaps by what delayed the work that ends them; ``late`` names a launch within the gap."""
    unknown, host, short = launched == UNKNOWN, launched >= starts, length < SHORT_NS
    return {
        late: host,
        "launch_latency": ~unknown & ~host & short,
        "other": ~unknown & ~host & ~short,
        "unknown": unknown,
    }


_NOT_ON_CPU = ("launch_latency", "other", "unknown")


class ProcessSavings(NamedTuple):
    """The times at which the CPU's lead over its recorded self changes, in order.

    Attributes:
        at_ns: when a gap of the GPU ends, or a synchronization returns.
        idle_ns: how long the GPU has idled in that gap: for its end, because of the CPU.
        returns: which of them are returns of synchronizations.
    """

    at_ns: Array
    idle_ns: Array
    returns: Array

    def most_won_ns(self, times: Intervals) -> int:
        """Return the most that the steps can win if the CPU saves these times.

        Each saved nanosecond puts the CPU ahead of its recorded self by one. A gap that waits for a launch becomes
        shorter by that lead, and uses it up, whatever the CPU does in it: loading a batch begins sooner, too. The
        rest is kept for later gaps, but a synchronization loses it: the CPU then waits longer for the GPU.
        """
        saved = np.diff(covered_ns(times, np.full(len(self.at_ns), np.iinfo(np.int64).min), self.at_ns), prepend=0)
        lead = won = 0
        columns = (column.tolist() for column in (saved, self.idle_ns, self.returns))
        for more, idle, is_return in zip(*columns, strict=True):
            lead += more
            if is_return:
                lead = min(lead, idle)
            else:
                used = min(lead, idle)
                lead, won = lead - used, won + used
        return won


def times_by_process(process_of: Array, events: Sequence[Table]) -> dict[int, Intervals]:
    """Return for each process when any of its threads was in one of these events."""
    thread, starts, ends = (
        np.concatenate([getattr(each, name) for each in events]) for name in ("thread", "start_ns", "end_ns")
    )
    return {process: merge_overlaps(starts[rows], ends[rows]) for process, rows in group_rows(process_of[thread])}


def process_savings(
    trace: Trace,
    idle: IdleCauses,
    waits: Sequence[Synchronization],
    until_ns: int,
    process: int,
    process_of: Array,
) -> ProcessSavings:
    """Return what bounds the savings of one process.

    Args:
        trace: the trace.
        idle: the idle time of the GPUs that the process uses.
        waits: the synchronizations of the program.
        until_ns: the end of the window: of the steps on the CPU, if the GPU idles then.
        process: the number of the process; see `process_of_threads`.
        process_of: the process of each thread.
    """
    host_ns = idle.end_ns - idle.start_ns - sum(idle.by_cause[cause] for cause in _NOT_ON_CPU)
    host_ns = host_ns + np.where(idle.end_ns == until_ns, idle.by_cause["unknown"], 0)
    ends = np.flatnonzero(host_ns)
    launches = trace.runtime.where(distinct_values(trace.gpu.launch[trace.gpu.launch >= 0]))
    launched = launches.start_ns[process_of[launches.thread] == process]
    own = [wait for wait in waits if wait.thread >= 0 and wait.blocked_ns and process_of[wait.thread] == process]
    called, returned = columns_of(own, "start_ns", "end_ns")
    alone = np.searchsorted(launched, called, "right") == np.searchsorted(launched, returned)
    gap = np.searchsorted(idle.start_ns, returned, "right") - 1
    inside = alone & (gap >= 0) & (returned < np.append(idle.end_ns, 0)[gap])
    returned, gap = returned[inside], gap[inside]
    at = np.concatenate((returned, idle.end_ns[ends]))
    idle_ns = np.concatenate((returned - idle.start_ns[gap], host_ns[ends]))
    returns = np.arange(len(at)) < len(returned)
    order = np.argsort(at, kind="stable")
    return ProcessSavings(at[order], idle_ns[order], returns[order])
