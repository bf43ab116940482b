"""`TraceFacts`: what rules read of a trace, what they can win, and the findings that they yield."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...base.findings import Evidence, Finding, Fix, Severity, Where
from ...base.trace_marks import DETAIL
from ...read.tables.intervals import Intervals, clip, merge_overlaps, overlap_ns, total_ns
from ...read.tables.nest import inside_rows
from ...read.tables.steps import process_of_threads
from ...read.tables.table import MEMCPY, Array, Table
from ..metrics.idle import IdleCauses, ProcessSavings, idle_causes, process_savings, times_by_process
from ..replay.replay import Change, without_events
from ..replay.replayer import Replayer, mean_ns
from ..waits.trace_context import TraceContext
from .window_facts import WindowFacts


class Win(int):
    """The most time per step in ns that removing a cause can win.

    Attributes:
        change: returns the removal, for a replay.
    """

    change: Callable[[], Change]

    def __new__(cls, ns: int, change: Callable[[], Change]) -> Win:
        """Return a saving of ``ns``."""
        win = super().__new__(cls, ns)
        win.change = change
        return win

    def at_most(self, ns: int) -> Win:
        """Return this win, limited to ``ns``."""
        return Win(min(self, ns), self.change)


def both(one: Win, other: Win) -> Win:
    """Return the win of both changes at once."""
    return Win(one + other, lambda: one.change() | other.change())


_HIGH, _MEDIUM = 0.1, 0.03  # shares of a step


class MissingEvidenceError(Exception):
    """Raised by a rule whose evidence is missing; the message says what the trace lacks."""


def require(evidence: object, lacking: str) -> None:
    """Raise `MissingEvidenceError` with what the trace lacks, unless there is evidence."""
    if not evidence:
        raise MissingEvidenceError(lacking)


class TraceFacts(WindowFacts):
    """What rules read of one trace, with what they say in common."""

    @cached_property
    def _made(self) -> dict[int, tuple[Finding, Win | None, tuple[int, int] | None]]:
        """The findings by identity, with their wins, and the threads and times at which they show."""
        return {}

    @cached_property
    def _savings(self) -> dict[int, ProcessSavings]:
        return {}

    @cached_property
    def looked_up(self) -> list[tuple[Array, Array]]:
        """The threads and times whose regions, modules and lines were looked up so far."""
        return []

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
        if self.unknown_gpu:
            raise MissingEvidenceError(self.unknown_gpu)

    @property
    def lacks_operators(self) -> str | None:
        """Why the trace has no operators, for messages; None if it has some."""
        if self.trace.operators:
            return None
        detail = self.trace.metadata.get(DETAIL)
        return "the trace has no operators" + (f', as it was recorded with detail="{detail}"' if detail else "")

    def require_shapes(self) -> None:
        """Raise `MissingEvidenceError` if there are no operators, or none with shapes."""
        if self.lacks_operators:
            raise MissingEvidenceError(f'{self.lacks_operators}: record with detail="full"')
        require(self.trace.operators.shapes.any(), "the trace has no shapes: record with record_shapes=True")

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
            times, beside = self._times(mine), self._times(others)
            saved_ns = float((self.gpu.duration_ns[mine] * part[mine]).sum())
            most = max(most, min(saved_ns, total_ns(times) - overlap_ns(times, beside)))
        return Win(self.per_step(min(most, self.gpu_limited_ns)), lambda: self.saving(rows, saved))

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

    def _times(self, rows: Array) -> Intervals:
        return clip(merge_overlaps(self.gpu.start_ns[rows], self.gpu.end_ns[rows]), *self.window)

    def cpu_win(self, *without: Table, but_ns: int = 0) -> Win:
        """Return how much of a step can be won if the CPU saves the time of events: launches then come sooner.

        Of several processes, the one that wins most counts.

        Args:
            *without: the events, which a replay leaves out.
            but_ns: the part of their time that the CPU still needs.
        """
        bounds = [self.cpu_bound_ns(process, times, but_ns) for process, times in self._cpu_times(without)]
        return Win(self.per_step(max(bounds, default=0)), lambda: without_events(*without))

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
        work = self.gpu.where(np.sort(np.concatenate(used)))
        busy = clip(merge_overlaps(work.start_ns, work.end_ns), *self.window)
        return idle_causes(replace(self.trace, gpu=work), busy, self.window, self.waits)

    def _cpu_times(self, events: Sequence[Table]) -> Iterable[tuple[int, Intervals]]:
        """Return for each process when it was in one of the events."""
        return times_by_process(self.process_of, events).items() if events else ()

    def of_one_process(self, events: Table) -> tuple[Table, int]:
        """Return the events of the process that spends most time in them, and that time in ns."""
        spent = {process: total_ns(times) for process, times in self._cpu_times([events])}
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
        codes = [code for code in np.unique(table.name).tolist() if table.strings[code] in names]
        return np.flatnonzero(np.isin(table.name, codes))

    def rows_matching(self, table: Table, pattern: str) -> Array:
        """Return the rows of a table in whose names the regular expression is found."""
        return np.flatnonzero(table.matching("name", re.compile(pattern)))

    def work_of(self, chosen: Array) -> Array:
        """Return the rows of `gpu` that the operators in these rows, or those inside them, launched."""
        mask = np.append(inside_rows(chosen, self.trace.operators.parent), False)
        return np.flatnonzero(mask[self.gpu.operator])

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
        if severity is None:
            share = self.share(win_ns or 0)
            severity = "high" if share >= _HIGH else "medium" if share >= _MEDIUM else "low"
        found = Finding(
            severity=severity,
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
        self._made[id(found)] = found, win_ns if isinstance(win_ns, Win) else None, place
        return found

    def place_of(self, work: Table) -> tuple[int, int] | None:
        """Return the thread and the time of the launch of the longest of these kernels, for ``at``."""
        known = np.flatnonzero(work.launch >= 0)
        if not len(known):
            return None
        row = work.launch[known[np.argmax(work.duration_ns[known])]]
        return int(self.trace.runtime.thread[row]), int(self.trace.runtime.start_ns[row])

    def place_of_operator(self, row: int) -> tuple[int, int]:
        """Return the thread and the time of an operator, for ``at``."""
        return int(self.trace.operators.thread[row]), int(self.trace.operators.start_ns[row])

    def places_of(self, launches: Array) -> list[Where]:
        """Return the region, module, operator and line of each of these calls of the runtime; -1 is none."""
        runtime = self.trace.runtime
        threads, times = (np.append(column, -1)[launches] for column in (runtime.thread, runtime.start_ns))
        contexts = self._contexts(threads, times)
        found = [contexts.context(row) for row in range(len(launches))]
        return [Where(each.region, each.module, each.op or "", site=each.site) for each in found]

    def _contexts(self, threads: Array, times_ns: Array) -> TraceContext:
        self.looked_up.append((threads, times_ns))
        return TraceContext(self.trace, threads, times_ns)

    def win_of(self, finding: Finding) -> Win | None:
        """Return what removing the cause of a finding of `finding` can win; None if no replay can show it."""
        return self._made[id(finding)][1] if id(finding) in self._made else None

    def replayed_ns(self, win: Win) -> int | None:
        """Return how much shorter a step is in a replay, at most the win; None if nothing can be predicted."""
        if self.replayer.abstained or not (change := win.change()):
            return None
        saved = mean_ns(self.replayer.recorded_ns) - self.replayer.step_ns(change)
        return min(max(saved, 0), int(win))

    def located(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings with the times, regions, modules and lines that are known at their places."""
        findings = list(findings)
        known = {
            index: self._made[id(found)][2] for index, found in enumerate(findings) if id(found) in self._made
        }
        placed = {index: place for index, place in known.items() if place is not None}
        if not placed:
            return findings
        places = np.array([*placed.values()], np.int64)
        contexts = self._contexts(places[:, 0], places[:, 1])
        for row, index in enumerate(placed):
            context, where = contexts.context(row), findings[index].where
            where = where._replace(region=where.region or context.region, site=where.site or context.site)
            where = where._replace(module=where.module or context.module)
            findings[index] = replace(findings[index], where=where, start_ns=int(places[row, 1]) - self.window[0])
        return findings
