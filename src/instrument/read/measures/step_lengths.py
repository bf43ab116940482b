"""The lengths of steps on the CPU and on the GPU, what bounds the loop, and how far the CPU ran ahead.

A loop without synchronizations only launches work: the end of a step on the CPU does not show when its work is
done. Therefore GPU work belongs to the step that launched it, whenever it ran, and the time of a step on the GPU
is the time between the ends of the work of successive steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from ...base.units import counted
from ..tables.intervals import clip, covered_ns, merge_overlaps, overlap_ns
from ..tables.lanes import group_rows
from ..tables.steps import StepIndex, process_of_threads
from ..tables.table import MEMCPY, Array, Table, linked
from ..tables.trace import Trace
from ..tables.work_classes import Collectives, communication_mask, gpu_numbers
from .launches import find_blocked_launches, launches_of
from .synchronizations import FREE, Synchronization, find_synchronizations

# Of a step: shorter waits do not bound the loop, and a smaller share of work may have an unknown origin
_NEGLIGIBLE_SHARE = 0.1


class StepLength(NamedTuple):
    """One step on the CPU and the GPU work that it launched; times are None if the trace has no such work.

    Attributes:
        cpu_ns: The time from its start to its end on the CPU.
        gpu_first_ns: The start of its first work.
        gpu_last_ns: The end of its last work.
        gpu_ns: The time between these two.
        gpu_period_ns: The time from the last end of the work of the steps before it to the last end of its own
            work; 0 if their work ends later. None for the first of successive steps.
        run_ahead_ns: The time from its end on the CPU to the last end of its work, which is how far the CPU is
            ahead; negative if the GPU was done first.
        launch_delay_ns: The time from the start of the call that launched its first work to the start of that
            work.
        gpu_busy_ns: How long the GPU was busy during ``gpu_ns``, also with other work; the mean over the GPUs that
            the step uses.
    """

    cpu_ns: int
    gpu_first_ns: int | None = None
    gpu_last_ns: int | None = None
    gpu_ns: int | None = None
    gpu_period_ns: int | None = None
    run_ahead_ns: int | None = None
    launch_delay_ns: int | None = None
    gpu_busy_ns: int | None = None


@dataclass(frozen=True)
class LoopTotals:
    """Totals over successive steps.

    On the GPU they cover the time from the last end of the work of the first step to the last end of the work of
    the last step; on the CPU, the time from the end of the first step to the end of the last.

    Attributes:
        steps: The number of steps: all except the first.
        gpu_ns: The sum of their periods on the GPU.
        cpu_ns: The time of the same steps on the CPU.
        gpu_waits_ns: The part of ``gpu_ns`` during which the GPU had no work, and its next work was launched after
            it had run out.
        cpu_waits_ns: The part of ``cpu_ns`` during which a thread of the loop waited for a busy GPU in a call
            within a step: in synchronizations, memcpys, and launches that found the queue full.
        busy_ns: The part of ``gpu_ns`` during which the GPU was busy.
        known_ns: The part during which it ran work that the steps launched.
        synchronized_steps: The steps between the first and the last synchronization at one place of the step that
            left the GPU without work.
        synchronized_ns: The wall time between these two synchronizations.
        missing: The calls that launched work that the trace lacks, in steps whose length is unknown without it.
        queue_waits_ns: The part of ``cpu_waits_ns`` in launches.
        exposed_comm_ns: The part of ``gpu_ns`` during which the GPU communicated and did not compute; the mean
            over the GPUs that a process uses.
    """

    steps: int = 0
    gpu_ns: int = 0
    cpu_ns: int = 0
    gpu_waits_ns: int = 0
    cpu_waits_ns: int = 0
    busy_ns: int = 0
    known_ns: int = 0
    synchronized_steps: int = 0
    synchronized_ns: int = 0
    missing: int = 0
    queue_waits_ns: int = 0
    exposed_comm_ns: int = 0

    def __add__(self, other: LoopTotals) -> LoopTotals:
        """Return the sums of both."""
        return LoopTotals(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StepLengths:
    """The lengths of steps, and what bounds their loop.

    Attributes:
        steps: The steps, in the order of the trace.
        totals: The totals from which the properties follow.
    """

    steps: tuple[StepLength, ...]
    totals: LoopTotals = LoopTotals()

    @property
    def bound(self) -> Literal["gpu", "cpu", "both"] | None:
        """What bounds the loop; None if that is not known, and `unknown` says why.

        "gpu" if the GPU waits for launches at most 10 % of the time. Otherwise "both" if the CPU waits for the GPU
        more than 10 % of the time: they take turns in a loop that synchronizes, or fills the GPU's queue in a part
        of each step. Otherwise "cpu".
        """
        if self.unknown:
            return None
        if self.totals.gpu_waits_ns <= _NEGLIGIBLE_SHARE * self.totals.gpu_ns:
            return "gpu"
        return "both" if self.totals.cpu_waits_ns > _NEGLIGIBLE_SHARE * self.totals.cpu_ns else "cpu"

    @property
    def synchronizes(self) -> bool:
        """Whether the CPU waits for the GPU more than 10 % of its time in calls other than launches."""
        return self.totals.cpu_waits_ns - self.totals.queue_waits_ns > _NEGLIGIBLE_SHARE * self.totals.cpu_ns

    @property
    def unknown(self) -> str:
        """Why it is not known what bounds the loop; empty if it is known."""
        totals = self.totals
        if totals.missing:
            return f"the trace lacks the GPU work of {counted(totals.missing, 'launch', 'launches')}"
        if all(step.gpu_ns is None for step in self.steps):
            return "the trace has no GPU work that the steps launched"
        if not totals.gpu_ns:
            return "two successive steps with GPU work are needed"
        if totals.busy_ns - totals.known_ns > _NEGLIGIBLE_SHARE * totals.busy_ns:
            return f"the steps launched only {100 * totals.known_ns / totals.busy_ns:.0f} % of what the GPU did"
        return ""

    @property
    def gpu_step_ns(self) -> float | None:
        """The mean period of a step on the GPU."""
        return self.totals.gpu_ns / self.totals.steps if self.totals.gpu_ns else None

    @property
    def cpu_step_ns(self) -> float | None:
        """The mean period of the same steps on the CPU."""
        return self.totals.cpu_ns / self.totals.steps if self.totals.gpu_ns else None

    @property
    def synchronized_step_ns(self) -> float | None:
        """The mean wall time of a step between synchronizations."""
        totals = self.totals
        return totals.synchronized_ns / totals.synchronized_steps if totals.synchronized_steps else None

    @property
    def clock(self) -> Literal["synchronizations", "cpu", "gpu"] | None:
        """The clock of `step_ns`.

        Synchronizations, if they span as many steps as there are GPU periods; the CPU, if it bounds the loop;
        otherwise the GPU.
        """
        if self.totals.synchronized_steps and self.totals.synchronized_steps >= self.totals.steps:
            return "synchronizations"
        if not self.totals.gpu_ns:
            return None
        return "cpu" if self.bound == "cpu" else "gpu"

    @property
    def step_ns(self) -> float | None:
        """How long a step of the loop takes, including the wait for its work."""
        if self.clock == "synchronizations":
            return self.synchronized_step_ns
        return self.cpu_step_ns if self.clock == "cpu" else self.gpu_step_ns

    @property
    def run_ahead_ns(self) -> tuple[float, int] | None:
        """How far the CPU is ahead at the end of a step: the median and the maximum."""
        ahead = [step.run_ahead_ns for step in self.steps if step.run_ahead_ns is not None]
        return (median(ahead), max(ahead)) if ahead else None

    @property
    def runs_ahead(self) -> bool:
        """Whether the GPU bounds the loop and the CPU does not wait for it at the end of each step."""
        ahead, step_ns = self.run_ahead_ns, self.gpu_step_ns
        return self.bound == "gpu" and bool(ahead and step_ns and ahead[1] > _NEGLIGIBLE_SHARE * step_ns)


def merge_step_lengths(windows: Iterable[tuple[StepLengths | None, Sequence[int]]]) -> StepLengths | None:
    """Return the lengths of the steps of several windows; None if no window has lengths.

    Args:
        windows: The lengths of each window, and the durations of its steps on the CPU, for windows without
            lengths.
    """
    each_window = [(lengths, times) for lengths, times in windows]
    if all(lengths is None for lengths, _ in each_window):
        return None
    steps: list[StepLength] = []
    totals = LoopTotals()
    for lengths, times in each_window:
        steps += lengths.steps if lengths else map(StepLength, times)
        totals += lengths.totals if lengths else LoopTotals()
    return StepLengths(tuple(steps), totals)


_WHOLE_DEVICE = re.compile("(?:Device|Ctx|Context|Thread)Synchronize")
_UNKNOWN = np.iinfo(np.int64).min
_SKEW_NS = 5_000  # between the clocks of CPU and GPU


class _StepWork(NamedTuple):
    """For each step, the start of its first work, the end of its last, and how long the first was queued.

    ``busy_ns`` is how long the GPUs that it uses were busy between the two, as the mean over these GPUs.
    """

    first_ns: Array
    last_ns: Array
    delay_ns: Array
    busy_ns: Array
    missing: Array


def step_lengths(trace: Trace, collectives: Collectives = "auto") -> StepLengths | None:
    """Return how long each step took on the CPU and on the GPU; None without steps or without GPU work.

    A step whose launches have no work in the trace has no lengths on the GPU: the recording ended before the GPU
    was done, or lacks the kernels of CUDA graphs.

    Args:
        trace: The trace.
        collectives: Which kernels communicate, as in `communication_mask`.
    """
    steps = trace.steps
    if not steps or not (trace.gpu or trace.runtime):
        return None
    work = _work(trace)
    if not (trace.gpu or work.missing.any()):
        return None
    process_of = process_of_threads(trace)
    waits, queue = _synchronizations(trace), _blocked_launches(trace)
    communication = communication_mask(trace.gpu, collectives)
    rows_of = dict(group_rows(_processes(trace, process_of)))
    lengths = [StepLength(ns) for ns in steps.duration_ns.tolist()]
    totals = LoopTotals(missing=int(work.missing.sum()))
    for process, rows in group_rows(process_of[steps.thread]):
        device = _ProcessGpuWork(trace, rows_of.get(process, np.empty(0, np.int64)), communication)
        stretches = _successive_steps(steps, rows)
        for stretch in stretches:
            _fill_gpu_lengths(lengths, steps, stretch, work)
            totals += _synchronized_totals(stretch, waits, device, only_whole=bool(work.missing[stretch].any()))
        own = [wait for row in rows.tolist() for wait in waits.get(row, ())]
        called = np.array([(wait.start_ns, wait.start_ns + wait.blocked_ns) for wait in own], np.int64)
        full = queue[:, np.isin(queue[2], rows)][:2]
        totals += _loop_totals(steps, stretches, work, device, (called.reshape(-1, 2).T, full))
    return StepLengths(tuple(lengths), totals)


def _work(trace: Trace) -> _StepWork:
    steps, gpu, runtime = trace.steps, trace.gpu, trace.runtime
    first, last, delay = (np.full(len(steps), _UNKNOWN) for _ in range(3))
    rows = np.flatnonzero(gpu.step >= 0)
    held, place = np.unique(gpu.step[rows], return_index=True)  # the first of each: work is in order of start
    rows_first = rows[place]
    first[held] = gpu.start_ns[rows_first]
    np.maximum.at(last, gpu.step[rows], gpu.end_ns[rows])
    launch = gpu.launch[rows_first]
    delay[held] = np.where(launch >= 0, first[held] - linked(runtime.start_ns, launch, 0), _UNKNOWN)
    missing = _missing_work(trace)
    for column in (first, last, delay):
        column[missing > 0] = _UNKNOWN
    return _StepWork(first, last, delay, _busy_ns(trace, first, last), missing)


def _busy_ns(trace: Trace, first: Array, last: Array) -> Array:
    gpu = trace.gpu
    busy, gpus = np.zeros((2, len(first)), np.int64)
    for _, rows in group_rows(gpu_numbers(gpu)):
        held = np.unique(gpu.step[rows])
        held = held[held >= 0]
        busy[held] += covered_ns(merge_overlaps(gpu.start_ns[rows], gpu.end_ns[rows]), first[held], last[held])
        gpus[held] += 1
    return busy // np.maximum(gpus, 1)


def _missing_work(trace: Trace) -> Array:
    """Return how many launches of each step have no work in the trace; 0 if they are too few to matter."""
    launches, runtime, count = launches_of(trace), trace.runtime, len(trace.steps)
    held = StepIndex(trace).rows_at(runtime.start_ns[launches.rows], runtime.thread[launches.rows])
    inside, missing = held >= 0, launches.missing
    all_, missing, graphs = (
        np.bincount(held[inside & chosen], minlength=count)
        for chosen in (np.ones(len(held), bool), missing, missing & launches.graph)
    )
    matters = (10 * missing > all_) | (graphs > 0)
    return np.where(matters, missing, 0)


def _processes(trace: Trace, process_of: Array) -> Array:
    """Return the process that launched each work or, if unknown, the only process that uses its device."""
    gpu = trace.gpu
    of_call = linked(process_of[trace.runtime.thread], gpu.launch)
    process = np.where(gpu.step >= 0, linked(process_of[trace.steps.thread], gpu.step), of_call)
    for _, rows in group_rows(gpu.device):
        launching = process[rows][process[rows] >= 0]
        if len(launching) and launching.min() == launching.max():
            process[rows] = launching[0]
    return process


def _loop_threads(trace: Trace) -> Array:
    """Return a mask of the threads of the loop: the threads of the steps and of autograd.

    The last element stands for no thread and is False.
    """
    held = np.array([*(thread.autograd for thread in trace.threads), False])
    held[trace.steps.thread] = True
    held[-1] = False
    return held


def _synchronizations(trace: Trace) -> dict[int, list[Synchronization]]:
    """Return the synchronizations in each step, on the threads of the loop."""
    loop = _loop_threads(trace)
    waits = [wait for wait in find_synchronizations(trace) if loop[wait.thread]]
    starts, threads = [wait.start_ns for wait in waits], [wait.thread for wait in waits]
    held = StepIndex(trace).rows_at(np.array(starts, np.int64), np.array(threads, np.int64))
    by_step: dict[int, list[Synchronization]] = defaultdict(list)
    for wait, row in zip(waits, held.tolist(), strict=True):
        if row >= 0:
            by_step[row].append(wait)
    return by_step


def _blocked_launches(trace: Trace) -> Array:
    """Return the starts, ends and steps of the blocked launches on the threads of the loop."""
    start, end, thread = find_blocked_launches(trace)
    own = np.flatnonzero(_loop_threads(trace)[thread])
    step = StepIndex(trace).rows_at(start[own], thread[own])
    return np.stack((start[own], end[own], step))


class _ProcessGpuWork:
    """The work of the GPU for one process.

    Attributes:
        busy: When it was busy.
        known: When it ran work that a step launched.
        starved: When it had no work, and its next work was launched after it had run out.
        exposed: For each GPU that the process uses, when it computed, and when it computed or communicated.
    """

    def __init__(self, trace: Trace, rows: Array, communication: Array) -> None:
        gpu, communication = trace.gpu.where(rows), communication[rows]
        start, end, own = gpu.start_ns, gpu.end_ns, gpu.step >= 0
        launched_ns = linked(trace.runtime.start_ns, gpu.launch, _UNKNOWN)
        self.busy, self.known = merge_overlaps(start, end), merge_overlaps(start[own], end[own])
        self.exposed = [
            tuple(
                merge_overlaps(start[rows_of_kind], end[rows_of_kind])
                for rows_of_kind in (each[~communication[each]], each)
            )
            for _, work in group_rows(gpu_numbers(gpu))
            for each in [work[gpu.category[work] != MEMCPY]]
        ]
        reach = np.maximum.accumulate(end)
        after = np.flatnonzero(start[1:] > reach[:-1]) + 1
        after = after[launched_ns[after] >= reach[after - 1]]
        self.starved = reach[after - 1], start[after]
        order = np.argsort(launched_ns, kind="stable")
        self._launched_ns, self._done_ns = launched_ns[order], np.maximum.accumulate(end[order])

    def was_done(self, wait: Synchronization) -> bool:
        """Return whether all work launched before a synchronization was done when it returned."""
        before = int(np.searchsorted(self._launched_ns, wait.start_ns))
        return not before or bool(self._done_ns[before - 1] <= wait.end_ns + _SKEW_NS)

    def exposed_comm_ns(self, start: Array, end: Array) -> int:
        """Return how long the GPUs communicated and did not compute, as the mean over the process's GPUs."""
        each = [
            int((covered_ns(working, start, end) - covered_ns(compute, start, end)).sum())
            for compute, working in self.exposed
        ]
        return sum(each) // max(len(each), 1)


def _successive_steps(steps: Table, rows: Array) -> list[Array]:
    """Split the steps in ``rows`` where their numbers are not successive."""
    numbers = steps.number[rows]
    apart = (numbers[1:] >= 0) & (numbers[:-1] >= 0) & (numbers[1:] != numbers[:-1] + 1)
    return np.split(rows, np.flatnonzero(apart) + 1)


def _fill_gpu_lengths(lengths: list[StepLength], steps: Table, stretch: Array, work: _StepWork) -> None:
    """Fill in the GPU lengths of successive steps."""
    reach: int | None = None
    columns = (stretch, steps.end_ns[stretch], *(column[stretch] for column in work))
    for row, end, first, last, delay, busy, missing in zip(*(column.tolist() for column in columns), strict=True):
        if missing:
            reach = None
        if last == _UNKNOWN:
            continue
        period = max(last - reach, 0) if reach is not None else None
        reach = last if reach is None else max(reach, last)
        delayed = delay if delay != _UNKNOWN else None
        cpu_ns = lengths[row].cpu_ns
        lengths[row] = StepLength(cpu_ns, first, last, last - first, period, last - end, delayed, busy)


def _loop_totals(
    steps: Table, stretches: Sequence[Array], work: _StepWork, device: _ProcessGpuWork, waits: tuple[Array, Array]
) -> LoopTotals:
    """Return the totals over successive steps of one process.

    Args:
        steps: The steps of the trace.
        stretches: Rows of successive steps, from `_successive_steps`.
        work: The work that the steps launched.
        device: The work of the GPU.
        waits: Starts and ends of synchronizations, and of blocked launches.
    """
    spans: list[tuple[int, int]] = []
    on_cpu: list[tuple[int, int]] = []
    count = 0
    for stretch in stretches:
        some = np.flatnonzero(work.last_ns[stretch] != _UNKNOWN)
        if len(some) < 2 or work.missing[stretch].any():
            continue
        first, last = stretch[some[0]], stretch[some[-1]]
        since, until = int(work.last_ns[first]), int(work.last_ns[stretch].max())
        if until > since:
            spans.append((since, until))
            on_cpu.append((int(steps.end_ns[first]), int(steps.end_ns[last])))
            count += int(some[-1] - some[0])
    start, end = np.array(spans, np.int64).reshape(-1, 2).T
    waited = merge_overlaps(*np.concatenate(waits, axis=1)), merge_overlaps(*waits[1])
    waits_ns, queue_ns = (sum(overlap_ns(device.busy, clip(times, *span)) for span in on_cpu) for times in waited)
    starved_ns, busy_ns, known_ns = (
        int(covered_ns(times, start, end).sum()) for times in (device.starved, device.busy, device.known)
    )
    cpu_ns = sum(until - since for since, until in on_cpu)
    return LoopTotals(
        count,
        int((end - start).sum()),
        cpu_ns,
        starved_ns,
        waits_ns,
        busy_ns,
        known_ns,
        queue_waits_ns=queue_ns,
        exposed_comm_ns=device.exposed_comm_ns(start, end),
    )


def _synchronized_totals(
    stretch: Array, waits: Mapping[int, Sequence[Synchronization]], device: _ProcessGpuWork, *, only_whole: bool
) -> LoopTotals:
    """Return the wall time between synchronizations of successive steps that left the GPU without work.

    These are at the same place of their steps: the same one among equally many. Calls that block only at times,
    such as freeing memory and memcpys that the driver splits, do not count. With ``only_whole``, because the trace
    lacks GPU work, only synchronizations with the whole device count.
    """
    places: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, row in enumerate(stretch.tolist()):
        calls = [wait for wait in waits.get(row, ()) if wait.kind != FREE and "Async" not in wait.call]
        for place, wait in enumerate(calls):
            if device.was_done(wait) and (_WHOLE_DEVICE.search(wait.call) or not only_whole):
                places[len(calls), place].append((number, wait.end_ns))
    ends = [
        (calls_at[-1][0] - calls_at[0][0], place, calls_at[-1][1] - calls_at[0][1])
        for (_, place), calls_at in places.items()
    ]
    count, _, ns = max(ends, default=(0, 0, 0))
    return LoopTotals(synchronized_steps=count, synchronized_ns=ns) if count else LoopTotals()
