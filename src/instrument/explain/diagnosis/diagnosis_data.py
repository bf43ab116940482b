"""`DiagnosisData`: the verdict and the findings of one trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...base.findings import Evidence, Finding
from ...base.units import counted, duration, percentage, size
from ...read.measures.region_steps import describe_steps_from
from ...read.memory.snapshot import MemorySnapshot, peak_text
from ..metrics.job import Job
from ..metrics.memory_use import MemoryUse, megabytes
from ..metrics.metrics import Metrics
from ..metrics.roofline import Roofline
from ..replay.replayer import Replayer
from ..rules.trace_facts import TraceFacts
from .longest import IdleGap, RegionTimes, joined_regions
from .verdict import Bound

_LISTED = 10  # ranks
_REGIONS, _GAPS = 5, 3  # rows
_GAP = 0.05  # of the step: shorter gaps are not shown
_OFF_PATH = 0.01  # of the time to win: so little is a rounding of the replay


@dataclass(frozen=True)
class DiagnosisData:
    """What is slow in a trace, and why.

    Attributes:
        path: the file.
        verdict: what bounds the steps, in one sentence.
        bound: "overhead", "compute", "memory", "communication", "input", "synchronization", or None if that is not
            known (`coverage` says why).
        parts: the parts of a step in ns, which add up to it; see `instrument.explain.diagnosis.verdict.PARTS`.
        coverage: the evidence that the verdict is based on, or what prevents a bound.
        findings: the findings, those with the most time to win first.
        rank: the rank of the trace; None if it does not say.
        has_steps: whether the trace has steps.
        steps: the number of recorded steps; 1 without steps, as the whole window then counts as one.
        step_ns: the mean time of a step.
        idle_by_cause: the idle time of the GPU per step by cause; see `instrument.explain.metrics.idle.CAUSES`.
        stretch: the length of a step in the window / its length outside; None if that is unknown.
        goodput: the useful operations and their share of the peak; see `goodput_of`.
        memory: the use of the memory of the GPU, from the events of a trace; None if these are not recorded.
        snapshot: the memory snapshot of the process; None if there is none.
        abstained: the rules that lacked evidence, with what the trace lacks.
        failed: the rules that raised an error, with the error.
        metrics: all metrics of the trace.
        roofline: the operators with their operations, bytes and shares of the peak.
        idle_gaps: the longest times during which no GPU works, each with its cause and place.
        ignored: the rules that were left out.
        replaced: the rules of the library that others of the same name replace.
        tuned: the thresholds that were changed, by rule.
        left_out: the files of a folder that were not read, each with what it holds.
        source: the file and the rank, if they were chosen from several; empty for a trace that was named.
        job: the ranks of the job; None if only this trace is known.
        steps_from: the name of the regions whose calls are the steps, with "*" for numbers; empty if the profiler
            marked the steps.
        merged_ranks: the ranks that a merged trace was made from; empty for other traces.
        opened_by: why the window was opened, "schedule" or what requested it; empty if the trace does not say.
        facts: what the rules read, and the trace; None in a diagnosis that was not made by `diagnose`.
        regions: the outermost regions with their times per step, the longest first.
        stretch_range: the lowest and the highest ``stretch`` that the recorded steps and those outside allow.
    """

    path: str
    verdict: str
    bound: Bound | None
    parts: Mapping[str, int]
    coverage: str
    findings: tuple[Finding, ...]
    rank: int | None
    has_steps: bool
    steps: int
    step_ns: float
    idle_by_cause: Mapping[str, int]
    stretch: float | None
    goodput: Mapping[str, Any]
    memory: MemoryUse | None
    abstained: Mapping[str, str]
    failed: Mapping[str, str]
    metrics: Metrics = field(repr=False)
    roofline: Roofline = field(repr=False)
    regions: tuple[RegionTimes, ...] = ()
    idle_gaps: tuple[IdleGap, ...] = ()
    ignored: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    job: Job | None = field(default=None, repr=False, compare=False)
    steps_from: str = ""
    merged_ranks: tuple[int, ...] = ()
    opened_by: str = ""
    facts: TraceFacts | None = field(default=None, repr=False, compare=False)
    snapshot: MemorySnapshot | None = field(default=None, repr=False, compare=False)
    stretch_range: tuple[float, float] | None = None

    @property
    def replayer(self) -> Replayer | None:
        """Replays the trace with changes; None without `facts`."""
        return self.facts.replayer if self.facts else None

    @property
    def has_gpu(self) -> bool:
        """Whether the trace has work of a GPU."""
        return bool(self.metrics["gpu_events"])

    @property
    def each_step(self) -> str:
        """The words after a time per step: "per step", or "in the window" for a trace without steps."""
        return "per step" if self.has_steps else "in the window"

    @property
    def opened_text(self) -> str:
        """Why the window was opened, as a sentence; empty if nothing but its schedule did."""
        return f"Opened by: {self.opened_by}." if self.opened_by not in ("", "schedule") else ""

    @property
    def coverage_text(self) -> str:
        """The evidence for the verdict, or what prevents a bound, as a sentence."""
        return f"{'Based on' if self.bound else 'Why no bound'}: {self.coverage}."

    @property
    def source_texts(self) -> list[str]:
        """Sentences on which file was chosen, what marks the steps, and which files are left out."""
        texts = [f"Diagnosed: {self.source}."] if self.source else []
        if self.merged_ranks:
            texts.append(
                f"A merged trace of {counted(len(self.merged_ranks), 'rank')}: their times add up. To diagnose "
                "the job, give the folder of their own traces."
            )
        if self.steps_from:
            texts.append(describe_steps_from(self.steps_from))
        guessed = self.job.guessed if self.job is not None and self.job.world_size > 1 else ()
        if guessed:
            ranks = ", ".join(map(str, guessed[:_LISTED]))
            more = f" and {len(guessed) - _LISTED} more" if len(guessed) > _LISTED else ""
            texts.append(f"Neither the file nor its name gives the rank; numbered by name: {ranks}{more}.")
        failed = {str(path): reason for path, reason in self.job.failed.items()} if self.job else {}
        for files, said in ((failed, "cannot be read"), (self.left_out, "left out")):
            for path, reason in [*files.items()][:1]:
                example = f"such as {path}: " if len(files) > 1 else f"{path}: "
                texts.append(f"{counted(len(files), 'file')} {said}, {example}{reason}.")
        return texts

    @property
    def mfu_text(self) -> str:
        """The model FLOPs utilization as a sentence; empty if it is unknown."""
        known = self.goodput
        if known["mfu"] is None:
            return ""
        said = f": {known['unknown']}" if known["unknown"] else ""
        if known["recomputed_flops"]:
            said = f", and {percentage(known['hfu'])} with what the backward pass computes again{said}"
        return f"Model FLOPs utilization: {percentage(known['mfu'])} of the peak of {known['peak']}{said}."

    @property
    def longest_regions(self) -> list[RegionTimes]:
        """The longest outermost regions; many whose names differ only in numbers are one row."""
        return joined_regions(self.regions)[:_REGIONS]

    @property
    def regions_note(self) -> str:
        """What explains a region with more GPU time than the step has; empty if there is none."""
        if all(region.gpu_ns <= self.step_ns for region in self.longest_regions):
            return ""
        return "GPU adds up the durations of the region's work: what runs at the same time counts in full."

    @property
    def longest_gaps(self) -> list[str]:
        """The longest idle gaps that take a share of the step worth mentioning, in words."""
        shown = [gap for gap in self.idle_gaps if gap.duration_ns >= _GAP * self.step_ns][:_GAPS]
        return [
            f"{duration(gap.duration_ns)} at {duration(gap.start_ns)}: {gap.cause.replace('_', ' ')}"
            + (f", ended by {gap.where}" if str(gap.where) else "")
            for gap in shown
        ]

    def definition(self, evidence: Evidence) -> str:
        """Return the definition of a number without its full stop; without steps, also without "per step"."""
        text = evidence.definition.rstrip(".:")
        return text if self.has_steps else re.sub(",? per step", "", text)

    def win_text(self, found: Finding) -> str:
        """Return what a finding can win, in words: replayed if it was, and at most; or memory."""
        if found.win_ns is None:
            return "unknown" if found.win_bytes is None else f"at most {size(found.win_bytes)} of memory"
        most = f"at most {duration(found.win_ns)} {self.each_step} ({100 * found.win_ns / self.step_ns:.1f} %)"
        if found.replayed_ns is None:
            return most
        if found.replayed_ns < _OFF_PATH * found.win_ns:
            return f"nothing in a replay, as it is off the critical path; {most}"
        share = 100 * found.replayed_ns / self.step_ns
        return f"{duration(found.replayed_ns)} ({share:.1f} %) in a replay, {most}"

    @property
    def nothing_found(self) -> str:
        """The message that replaces the findings if none is `worth` showing."""
        said = f"; left out: {', '.join(self.ignored)}" if self.ignored else ""
        said += f"; thresholds were changed of: {', '.join(self.tuned)}" if self.tuned else ""
        if not self.step_ns:  # a memory snapshot has no times
            return f"No rule found anything{said}."
        return f"No rule found anything worth 1 % of {'the step' if self.has_steps else 'the window'}{said}."

    @property
    def rules_texts(self) -> list[str]:
        """Sentences on the rules that failed, and on those that replace rules of the library."""
        texts = [f"The rule {name} failed: {error}" for name, error in self.failed.items()]
        if self.replaced:
            texts.append(f"Rules of the library that others of the same name replace: {', '.join(self.replaced)}.")
        return texts

    @property
    def memory_text(self) -> str:
        """The memory in use at the peak by category, as a sentence; empty if it is unknown."""
        if self.snapshot is not None:
            text = peak_text(self.snapshot)
            return f"{text} Memory snapshot: {self.snapshot.path}." if text != self.verdict else ""
        if self.memory is None:
            return ""
        parts = megabytes(self.memory.by_category)
        return (
            f"Memory at its peak: {self.memory.peak_bytes / 1e6:,.1f} MB allocated"
            + f": {parts}" * bool(parts)
            + "."
        )

    def worth(self, share: float = 0.01) -> list[Finding]:
        """Return the findings that can win at least this share of a step, or an unknown time."""
        return [found for found in self.findings if found.win_ns is None or found.win_ns >= share * self.step_ns]
