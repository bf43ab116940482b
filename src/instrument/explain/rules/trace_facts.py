"""`TraceFacts`: what rules read of a trace, what they can win, and the findings that they yield."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...base.findings import Evidence, Finding, Fix, Severity, Where
from ...base.trace_marks import DETAIL
from ...read.measures.step_lengths import StepLengths, step_lengths
from ...read.measures.synchronizations import Synchronization, columns_of
from ...read.measures.timing import Stretch, Timing
from ...read.memory.snapshot import MemorySnapshot
from ...read.profilers.compile_log import CompileLog
from ...read.tables.intervals import Intervals, clip, merge_overlaps, overlap_ns, total_ns
from ...read.tables.lanes import group_rows
from ...read.tables.notes import by_command, to_record
from ...read.tables.steps import (
    earlier_work,
    main_thread,
    process_of_threads,
    steps_of_process,
    whole_trace,
)
from ...read.tables.table import KERNEL, MEMCPY, Array, Table
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, communication_mask, gpu_numbers
from ..metrics.counters import Counters
from ..metrics.idle import IdleCauses, ProcessSavings, idle_causes, process_savings, times_by_process
from ..metrics.job import Job
from ..metrics.launches import LostWork, lost_work
from ..metrics.memory_use import MemoryUse, memory_use
from ..metrics.metrics import Metrics, metrics_of
from ..metrics.roofline import GpuPeak, Roofline, roofline
from ..metrics.tables import one_of
from ..metrics.utilization import Activity, activity
from ..replay.replay import Change, Replayer, mean_ns, without_events
from ..replay.requests import Request, joined, launched_inside
from ..replay.step_waits import StepWaits, step_waits
from ..waits.audit import audit
from ..waits.report import SyncReport
from ..waits.trace_context import TraceContext

_OVERLAP = 1.1  # times as long as the time that the steps cover
_BUSY = 0.9  # share of the step from which the GPU sets its length
_CPU = 0  # torch's number of this type of device


class Win(int):
    """The most time per step in ns that removing a cause can win.

    Attributes:
        change: returns the removal, for a replay.
        words: the removal in the words of `instrument.explain.replay.requests.Request`; empty if it has none.
        hidden_ns: the most that it could win if nothing else took longer.
    """

    change: Callable[[], Change]
    words: str
    hidden_ns: int

    def __new__(cls, ns: int, change: Callable[[], Change], words: str = "", hidden_ns: int = 0) -> Win:
        """Return a saving of ``ns``."""
        win = super().__new__(cls, ns)
        win.change, win.words, win.hidden_ns = change, words, max(hidden_ns, ns)
        return win

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the number alone: the change holds tables."""
        return int, (int(self),)

    def at_most(self, ns: int) -> Win:
        """Return this win, limited to ``ns``."""
        return Win(min(self, ns), self.change, self.words, min(self.hidden_ns, ns))


def both(one: Win, other: Win) -> Win:
    """Return the win of both changes at once."""
    return Win(one + other, lambda: one.change() | other.change(), "", one.hidden_ns + other.hidden_ns)


LEAST_SHARES: dict[Severity, float] = {"high": 0.1, "medium": 0.03, "low": 0.0}
"""The least share of a step that a finding of each severity wins."""


class MissingEvidenceError(Exception):
    """Raised by a rule whose evidence is missing; the message says what the trace lacks."""


def require(evidence: object, lacking: str) -> None:
    """Raise `MissingEvidenceError` with what the trace lacks, unless there is evidence."""
    if not evidence:
        raise MissingEvidenceError(lacking)


class TraceFacts:
    """What rules read of one trace: its window, the steps and the work that they launched, and what they can win.

    Args:
        trace: as the attribute, and so are ``collectives``, ``timing``, ``job``, ``compile_log`` and ``snapshot``.
        lengths: the lengths of the steps; "measure" if they were not measured before.

    Attributes:
        trace: the trace, whose tables cannot be written: one rule must not change what another one reads.
        collectives: which kernels communicate.
        timing: the timing of the run from the manifest; None if there is none.
        job: the ranks of the job; None if only this trace is known.
        compile_log: the log of torch.compile; None if there is none.
        snapshot: the memory snapshot of the process; None if there is none.
        looked_up: the threads and times whose regions, modules and lines were looked up so far.
    """

    def __init__(
        self,
        trace: Trace,
        collectives: Collectives = "auto",
        timing: Timing | None = None,
        job: Job | None = None,
        compile_log: CompileLog | None = None,
        snapshot: MemorySnapshot | None = None,
        lengths: StepLengths | Literal["measure"] | None = "measure",
    ) -> None:
        self.trace, self.collectives, self.timing, self.job = trace.read_only(), collectives, timing, job
        self.compile_log, self.snapshot = compile_log, snapshot
        self.looked_up: list[tuple[Array, Array]] = []
        self._lengths = lengths
        self._savings = dict[int, ProcessSavings]()
        # by identity, the findings with their wins, and the threads and times at which they show
        self._made = dict[int, tuple[Finding, Win | None, tuple[int, int] | None]]()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy what the facts are computed from; they are computed again where they are read."""
        given = self.trace, self.collectives, self.timing, self.job, self.compile_log, self.snapshot
        return TraceFacts, (*given, self._lengths)

    @cached_property
    def lengths(self) -> StepLengths | None:
        """The lengths of the steps; None without steps or without GPU work."""
        if self._lengths == "measure":
            return step_lengths(self.trace, self.collectives)
        return self._lengths

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of the trace."""
        return metrics_of(self.trace, self.collectives, self.lengths)

    @cached_property
    def _steps_of_process(self) -> Array:
        """The starts and ends of the steps of the process that recorded most; repeated steps count once."""
        return steps_of_process(self.trace)

    @property
    def steps(self) -> int:
        """The number of recorded steps; 1 without steps, as the whole window then counts as one."""
        return max(len(self._steps_of_process), 1)

    @property
    def steps_overlap(self) -> bool:
        """Whether more than a tenth of the time of the steps is that of several."""
        starts, ends = self._steps_of_process.T
        once = total_ns(merge_overlaps(starts, ends))
        return bool((ends - starts).sum() > _OVERLAP * once)

    @cached_property
    def recorded(self) -> tuple[int, int]:
        """The time in ns from the first step's start to the end of the last step's work; else `whole_trace`."""
        return self.metrics.about("step_lengths").window_ns or whole_trace(self.trace)

    @cached_property
    def earlier(self) -> Array:
        """A mask of the rows of `Trace.gpu` launched before the recording, which do not count."""
        return earlier_work(self.trace)

    @cached_property
    def window(self) -> tuple[int, int]:
        """The time that counts, in ns: `recorded`, from the end of the work launched before the recording on.

        A GPU that lags behind the CPU does the work of earlier steps first, and ends that of the last step later
        than the CPU: from the end of the former to the end of the latter, the work of each step runs once.
        """
        first, last = self.recorded
        done = int(self.trace.gpu.end_ns[self.earlier].max(initial=first))
        return (done if first < done < last else first), last

    @property
    def window_ns(self) -> int:
        """The length of the window."""
        return self.window[1] - self.window[0]

    @property
    def step_ns(self) -> float:
        """The mean time of a step: the window divided by the number of steps."""
        return self.window_ns / self.steps

    @property
    def usual_step_ns(self) -> float | None:
        """The median time of the steps around the window, from the manifest; None if it is not known."""
        around = self.timing.around if self.timing else None
        return around[1] if around else None

    @cached_property
    def stretch(self) -> Stretch | None:
        """How many times as long a step takes in the window as outside; None if that is not known."""
        return Stretch.of(self.trace.steps.duration_ns.tolist(), self.timing, self.lengths)

    @cached_property
    def gpu(self) -> Table:
        """The GPU work of the window, without that launched before the recording."""
        gpu = self.trace.gpu
        return gpu if len(self.gpu_rows) == len(gpu) else gpu.where(self.gpu_rows).read_only()

    @cached_property
    def gpu_rows(self) -> Array:
        """The rows of `Trace.gpu` that `gpu` holds."""
        starts = self.trace.gpu.start_ns
        return np.flatnonzero((starts >= self.recorded[0]) & (starts < self.recorded[1]) & ~self.earlier)

    @cached_property
    def gpus(self) -> dict[int, Array]:
        """The rows of `gpu` on each GPU."""
        return dict(group_rows(gpu_numbers(self.gpu)))

    @cached_property
    def kernel_rows(self) -> Array:
        """The rows of `gpu` that are kernels."""
        return np.flatnonzero(self.gpu.category == KERNEL)

    @cached_property
    def kernels(self) -> Table:
        """The kernels of the window: `kernel_rows` of `gpu`."""
        return self.gpu.where(self.kernel_rows).read_only()

    @cached_property
    def communication(self) -> Array:
        """A mask of the rows of `gpu` that communicate."""
        return communication_mask(self.gpu, self.collectives)

    @cached_property
    def activity(self) -> Activity:
        """When the GPUs were busy with each kind of work in the window."""
        done = activity(self.gpu, self.communication)
        return Activity(*(clip(times, *self.window) for times in done))

    @cached_property
    def busy_ns(self) -> int:
        """The time of the window during which any GPU works."""
        return total_ns(self.activity.busy)

    @cached_property
    def _audit(self) -> tuple[SyncReport, list[Synchronization]]:
        return audit(self.trace)

    @property
    def syncs(self) -> SyncReport:
        """The synchronizations of the program by line."""
        return self._audit[0]

    @property
    def waits(self) -> list[Synchronization]:
        """The synchronizations of the program, one by one, without those of the profiler."""
        return self._audit[1]

    @cached_property
    def idle(self) -> IdleCauses:
        """The idle time of the GPUs in the window by cause; none if times of the GPU are not known."""
        window = (self.window[0], self.window[0]) if self.unknown_gpu else self.window
        return idle_causes(self.trace, self.activity.busy, window, self.waits)

    @cached_property
    def counters(self) -> Counters:
        """The sampled counters, for the work in the window."""
        return Counters(replace(self.trace, gpu=self.gpu))

    @cached_property
    def counters_text(self) -> str:
        """Power, energy, clock and temperature in the window as a sentence; empty without samples of them."""
        return self.counters.text(self.window, len(self.trace.steps))

    @cached_property
    def by_memory(self) -> Array:
        """A mask of the rows of `gpu` whose operators the memory bounds."""
        return np.array([row.bound == "memory" for row in self.roofline.rows] + [False])[self.roofline.of_work]

    @property
    def peak(self) -> GpuPeak | None:
        """What the GPU can do; None if it is not known."""
        return self.roofline.peak

    @cached_property
    def roofline(self) -> Roofline:
        """The operators with their FLOPs, bytes and shares of the peak, for the work in the window."""
        return roofline(replace(self.trace, gpu=self.gpu))

    @cached_property
    def memory_events(self) -> Table:
        """The allocations and frees on GPUs."""
        return self.trace.memory.where(self.trace.memory.device_type != _CPU)

    @cached_property
    def memory_use(self) -> MemoryUse | None:
        """What the memory of the GPU is used for; None if that is not recorded."""
        return memory_use(self.trace, self.memory_events)

    @cached_property
    def blocked(self) -> Intervals:
        """When the CPU was blocked by synchronizations."""
        starts, took = columns_of(self.waits, "start_ns", "blocked_ns")
        return merge_overlaps(starts, starts + took)

    @cached_property
    def gpu_limited_ns(self) -> int:
        """The part of the window whose length depends on the GPU.

        That is the whole window if the GPU works 90 % of it, else the time during which the CPU waited for it.
        """
        if self.busy_ns >= _BUSY * self.window_ns:
            return self.window_ns
        waited = overlap_ns(self.activity.busy, self.blocked)
        steps = self.trace.steps  # the GPU may work on after the last one has ended on the CPU
        tail = max(self.window[1] - int(steps.end_ns.max()), 0) if steps else 0
        queue_ns = self.lengths.totals.queue_waits_ns if self.lengths else 0
        return min(waited + tail + queue_ns, self.window_ns)

    @cached_property
    def lost(self) -> LostWork:
        """The launches whose work is not in the trace, or has impossible times."""
        return lost_work(self.trace, self.recorded[0])

    @property
    def unknown_gpu(self) -> str:
        """Why times of the GPU are not known; empty if they are."""
        if not self.trace.gpu:
            return "the trace has no GPU work"
        if self.trace.steps and not self.trace.steps.duration_ns.any():
            return "the recorded steps have no duration"
        return self.lost.too_much or ("" if self.gpu else "the recorded steps have no GPU work")

    def within(self, events: Table) -> Table:
        """Return the events that overlap with the recorded time."""
        first, last = self.recorded
        return events.where((events.end_ns > first) & (events.start_ns < last))

    def per_step(self, ns: float) -> int:
        """Return a time in the window as time per step."""
        return round(ns / self.steps)

    @property
    def each_step(self) -> str:
        """What times per step are said to be in titles, as a trace without steps has none."""
        return "per step" if self.trace.steps else "in the window"

    def share(self, win_ns: float) -> float:
        """Return a time per step as a share of the step."""
        return win_ns / self.step_ns if self.step_ns else 0.0

    @property
    def main_thread(self) -> int:
        """The number of the thread of the program's loop."""
        return main_thread(self.trace)

    @cached_property
    def process_of(self) -> Array:
        """A number for the process of each thread; the last element, for no thread, is -1."""
        return process_of_threads(self.trace)

    @cached_property
    def replayer(self) -> Replayer:
        """Replays the trace with changes."""
        return Replayer(self.trace, self.collectives)

    def require_gpu(self) -> None:
        """Raise `MissingEvidenceError` if times of the GPU are not known, so that what rests on them abstains."""
        require(not self.unknown_gpu, self.unknown_gpu)

    @property
    def lacks_operators(self) -> str | None:
        """Why the trace has no operators, for messages; None if it has some."""
        if self.trace.operators:
            return None
        detail = self.trace.metadata.get(DETAIL)
        recorded = self.to_record(detail=str(detail))
        return "the trace has no operators" + (f", as it was recorded with {recorded}" if detail else "")

    def to_record(self, **argument: Literal[True] | str) -> str:
        """Return an argument of `instrument.profile` as the user of the trace writes it."""
        return to_record(self.trace.metadata, **argument)

    def after_warm_up(self, text: str) -> Fix:
        """Return the fix of what only the first steps show: a later window."""
        if by_command(self.trace.metadata):
            return Fix(text, "instrument run -- train.py", "instrument run --wait 5 --warmup 2 -- train.py")
        return Fix(
            text,
            "instrument.schedule(wait=0, warmup=0, active=3)",
            "instrument.schedule(wait=5, warmup=2, active=3)",
        )

    def require_shapes(self) -> None:
        """Raise `MissingEvidenceError` if there are no operators, or none with shapes."""
        full, shapes = self.to_record(detail="full"), self.to_record(record_shapes=True)
        require(not self.lacks_operators, f"{self.lacks_operators}: record with {full}")
        require(self.trace.operators.shapes.any(), f"the trace has no shapes: record with {shapes}")

    def per_gpu(self, ns: float) -> int:
        """Return a sum of durations of GPU work as time per step: of several GPUs, the mean."""
        return self.per_step(ns / max(len(self.gpus), 1))

    def calls(self, number: float) -> float:
        """Return a number of GPU events as a number per step: of several GPUs, the mean."""
        return number / self.steps / max(len(self.gpus), 1)

    @property
    def each_gpu_step(self) -> str:
        """What is said of `per_gpu` and `calls` in titles."""
        if len(self.gpus) < 2:
            return self.each_step
        return "per step and GPU" if self.trace.steps else "per GPU in the window"

    def step_time(self, name: str, ns: float, definition: str) -> Evidence:
        """Return `per_step` as evidence."""
        return Evidence(name, self.per_step(ns), "ns", definition)

    def cpu_time(self, name: str, ns: float, definition: str) -> Evidence:
        """Return `per_step` of a time of `of_one_process` as evidence."""
        return self.step_time(name, ns, definition + self.whose)

    def gpu_time(self, name: str, ns: float | None, definition: str) -> Evidence:
        """Return `per_gpu` as evidence."""
        return Evidence(name, None if ns is None else self.per_gpu(ns), "ns", definition + self._mean)

    def gpu_count(self, name: str, number: float, definition: str, unit: str = "events") -> Evidence:
        """Return `calls`, or a number of bytes alike, as evidence."""
        return Evidence(name, self.calls(number), unit, definition + self._mean)

    @property
    def _mean(self) -> str:
        return " Mean over the GPUs." if len(self.gpus) > 1 else ""

    def gpu_win(self, rows: Array, saved: Array | float = 1.0) -> Win:
        """Return how much of a step can be won if this GPU work is removed or shortened.

        No more than the time during which no other work computes on the same GPU, and the time whose length
        depends on the GPU. Of several GPUs, the one that wins most counts.

        Args:
            rows: the rows of `gpu`, or a mask of them.
            saved: the part of its duration that each of them saves.
        """
        part = np.zeros(len(self.gpu))
        part[rows] = saved
        computes, most = ~self.communication & (self.gpu.category != MEMCPY), 0.0
        for own in self.gpus.values():
            mine, others = own[part[own] > 0], own[(part[own] <= 0) & computes[own]]
            times, beside = self.times_of(mine), self.times_of(others)
            saved_ns = float((self.gpu.duration_ns[mine] * part[mine]).sum())
            most = max(most, min(saved_ns, total_ns(times) - overlap_ns(times, beside)))
        win_ns = self.per_step(min(most, self.gpu_limited_ns))
        return Win(win_ns, lambda: self.saving(rows, saved), hidden_ns=self.per_step(most))

    def saving(self, rows: Array, saved: Array | float = 1.0) -> Change:
        """Return the change in which this work of `gpu` saves a part of its duration, by default all of it."""
        part = np.zeros(len(self.trace.gpu))
        part[self.gpu_rows[rows]] = saved
        return Change(saved=part)

    def roofline_win(self, saved: Mapping[int, float]) -> Win:
        """Return `gpu_win` of operators.

        Args:
            saved: by the index of an operator in the rows of the roofline, the part of its time that it saves.
        """
        part = np.zeros(len(self.roofline.rows) + 1)
        part[list(saved)] = list(saved.values())
        of_work = part[self.roofline.of_work]
        rows = np.flatnonzero(of_work)
        return self.gpu_win(rows, of_work[rows])

    def times_of(self, rows: Array) -> Intervals:
        """Return when any of these rows of `gpu` runs in the window."""
        return clip(merge_overlaps(self.gpu.start_ns[rows], self.gpu.end_ns[rows]), *self.window)

    def cpu_win(self, *without: Table, but_ns: int = 0) -> Win:
        """Return how much of a step can be won if the CPU saves the time of events: launches then come sooner.

        Of several processes, the one that wins most counts.

        Args:
            *without: the events, which a replay leaves out.
            but_ns: the part of their time that the CPU still needs.
        """
        by_process = times_by_process(self.process_of, without)
        bounds = [self.cpu_bound_ns(process, times, but_ns) for process, times in by_process.items()]
        saved_ns = max((total_ns(times) - but_ns for times in by_process.values()), default=0)
        win_ns, hidden_ns = self.per_step(max(bounds, default=0)), self.per_step(saved_ns)
        return Win(win_ns, lambda: without_events(*without), hidden_ns=hidden_ns)

    def win_by(self, words: str, ns: int, hidden_ns: int = 0) -> Win:
        """Return how much of a step can be won with a change in the words of `Request`."""

        def change() -> Change:
            try:
                return joined(each for _, each in Request.from_words(words).changes(self.replayer))
            except ValueError:  # what a rule sees in the trace is not on a thread that is replayed
                return Change()

        return Win(ns, change, words, hidden_ns)

    def cpu_bound_ns(self, process: int, times: Intervals, but_ns: int = 0) -> int:
        """Return the most that the steps can win if a process saves these times, but not ``but_ns`` of them."""
        saved_ns = max(total_ns(times) - but_ns, 0)
        return min(self._savings_of(process).most_won_ns(times), saved_ns) if saved_ns else 0

    def _savings_of(self, process: int) -> ProcessSavings:
        if process not in self._savings:
            self._savings[process] = process_savings(
                self.trace, self._idle_of(process), self.waits, self.window[1], process, self.process_of
            )
        return self._savings[process]

    def _idle_of(self, process: int) -> IdleCauses:
        """Return the idle time of the GPUs that a process uses."""
        launched = np.flatnonzero(self.gpu.launch >= 0)
        by = self.process_of[self.trace.runtime.thread[self.gpu.launch[launched]]]
        used = [rows for rows in self.gpus.values() if np.isin(rows, launched[by == process]).any()]
        if len(used) in (0, len(self.gpus)) or self.unknown_gpu:
            return self.idle
        rows = np.sort(np.concatenate(used))
        own = replace(self.trace, gpu=self.gpu.where(rows))
        return idle_causes(own, self.times_of(rows), self.window, self.waits)

    def of_one_process(self, events: Table) -> tuple[Table, int]:
        """Return the events of the process that spends most time in them, and that time in ns."""
        spent = {
            process: total_ns(times) for process, times in times_by_process(self.process_of, [events]).items()
        }
        if not spent:
            return events, 0
        most = max(spent, key=lambda process: spent[process])
        return events.where(self.process_of[events.thread] == most), spent[most]

    @property
    def whose(self) -> str:
        """What the definitions of times on the CPU add if several processes launch work."""
        launched = self.trace.runtime.thread[self.gpu.launch[self.gpu.launch >= 0]]
        several = len(np.unique(self.process_of[launched])) > 1
        return " Of several processes, the one that spends most." if several else ""

    def rows(self, table: Table, *names: str) -> Array:
        """Return the rows of a table with one of these names."""
        return np.flatnonzero(one_of(table, "name", names))

    def rows_matching(self, table: Table, pattern: str) -> Array:
        """Return the rows of a table in whose names the regular expression is found."""
        return np.flatnonzero(table.matching("name", re.compile(pattern)))

    def work_of(self, chosen: Array) -> Array:
        """Return the rows of `gpu` that the operators in these rows, or those inside them, launched."""
        return np.flatnonzero(launched_inside(self.trace.operators, chosen, self.gpu.operator))

    def finding(
        self,
        title: str,
        *numbers: Evidence,
        win_ns: int | None = None,
        evidence: Sequence[Evidence] = (),
        fix: Fix | None = None,
        severity: Severity | None = None,
        confidence: Severity = "high",
        coverage: float | None = None,
        win_bytes: int | None = None,
        at: tuple[int, int] | None = None,
        **where: Any,
    ) -> Finding:
        """Return a finding of this trace.

        Args:
            title: the finding in a sentence.
            *numbers: the evidence, as in `Finding`.
            win_ns: as in `Finding`.
            evidence: more of it.
            fix: as in `Finding`.
            severity: as in `Finding`; by default from the share of the step that can be won: "high" from 10 %,
                "medium" from 3 %.
            confidence: as in `Finding`.
            coverage: as in `Finding`.
            win_bytes: as in `Finding`.
            at: the number of a thread and a time on it at which the finding shows; region, module and line are
                looked up there.
            **where: fields of `Where` that are known.
        """
        finding = Finding(
            severity=self._severity(win_ns or 0) if severity is None else severity,
            title=title,
            where=Where(**{"rank": self.trace.rank, **where}),
            evidence=(*numbers, *evidence),
            win_ns=None if win_ns is None else int(win_ns),
            fix=fix,
            confidence=confidence,
            coverage=coverage,
            win_bytes=win_bytes,
        )
        place = None if at is None else (operator.index(at[0]), operator.index(at[1]))
        self._made[id(finding)] = finding, win_ns if isinstance(win_ns, Win) else None, place
        return finding

    def _severity(self, win_ns: int) -> Severity:
        """Return the severity of a finding that can win so much."""
        return next(each for each, share in LEAST_SHARES.items() if self.share(win_ns) >= share)

    def with_win(self, finding: Finding, win_ns: int) -> Finding:
        """Return a finding of `finding` that can win another time, with its severity."""
        made, win, place = self._made.get(id(finding), (finding, None, None))
        severity = finding.severity
        if severity == self._severity(made.win_ns or 0):
            severity = self._severity(win_ns)
        less = replace(finding, win_ns=win_ns, severity=severity)
        self._made[id(less)] = less, win, place
        return less

    def place_of(self, work: Table) -> tuple[int, int] | None:
        """Return the thread and the time of the launch of the longest of these kernels, for ``at``."""
        linked = np.flatnonzero(work.launch >= 0)
        if not len(linked):
            return None
        row = work.launch[linked[np.argmax(work.duration_ns[linked])]]
        return int(self.trace.runtime.thread[row]), int(self.trace.runtime.start_ns[row])

    def place_of_operator(self, row: int) -> tuple[int, int]:
        """Return the thread and the time of an operator, for ``at``."""
        return int(self.trace.operators.thread[row]), int(self.trace.operators.start_ns[row])

    def places_of(self, launches: Array) -> list[Where]:
        """Return the region, module, operator and line of each of these calls of the runtime; -1 is none."""
        runtime = self.trace.runtime
        threads, times = (np.append(column, -1)[launches] for column in (runtime.thread, runtime.start_ns))
        contexts = map(self._contexts(threads, times).context, range(len(launches)))
        return [Where(each.region, each.module, each.op or "", site=each.site) for each in contexts]

    def _contexts(self, threads: Array, times_ns: Array) -> TraceContext:
        self.looked_up.append((threads, times_ns))
        return TraceContext(self.trace, threads, times_ns)

    def win_of(self, finding: Finding) -> Win | None:
        """Return what removing the cause of a finding of `finding` can win; None if no replay can show it."""
        return self._made[id(finding)][1] if id(finding) in self._made else None

    @cached_property
    def step_waits(self) -> StepWaits | None:
        """What a step waits for; None if times of the GPU are not known, or nothing can be replayed."""
        return None if self.unknown_gpu or self.replayer.abstained else step_waits(self.replayer)

    def replayed_ns(self, win: Win) -> int | None:
        """Return how much shorter a step is in a replay; None if nothing can be predicted."""
        if self.replayer.abstained or not (change := win.change()):
            return None
        return max(mean_ns(self.replayer.recorded_ns) - self.replayer.step_ns(change), 0)

    def located(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings with the times, regions, modules and lines that are known at their places."""
        places = {
            index: place
            for index, finding in enumerate(findings)
            if id(finding) in self._made and (place := self._made[id(finding)][2]) is not None
        }
        located = list(findings)
        if not places:
            return located
        threads, times = np.array([*places.values()], np.int64).T
        contexts = self._contexts(threads, times)
        for row, (index, (_, at_ns)) in enumerate(places.items()):
            context, where = contexts.context(row), located[index].where
            where = where._replace(
                region=where.region or context.region,
                site=where.site or context.site,
                module=where.module or context.module,
            )
            located[index] = replace(located[index], where=where, start_ns=at_ns - self.window[0])
        return located
