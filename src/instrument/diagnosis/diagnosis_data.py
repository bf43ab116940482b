"""`DiagnosisData`: the verdict and the findings of one trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..findings import Evidence, Finding
from ..replay.replayer import Replayer
from ..units import duration
from .idle_gaps import IdleGap
from .memory_use import MemoryUse, megabytes
from .metrics import Metrics
from .roofline import Roofline
from .trace_facts import TraceFacts
from .verdict import Bound

_OFF_PATH = 0.01  # of the time to win: so little is a rounding of the replay


@dataclass(frozen=True)
class DiagnosisData:
    """What is slow in a trace, and why.

    Attributes:
        path: the file.
        verdict: what bounds the steps, in one sentence.
        bound: "overhead", "compute", "memory", "communication", "input", "synchronization", or None if that is not
            known (`coverage` says why).
        parts: the parts of a step in ns, which add up to it; see `instrument.diagnosis.verdict.PARTS`.
        coverage: the evidence that the verdict is based on, or why there is no bound.
        findings: the findings, those with the most time to win first.
        rank: the rank of the trace; None if it does not say.
        has_steps: whether the trace has steps.
        steps: the number of recorded steps; 1 without steps, as the whole window then counts as one.
        step_ns: the mean time of a step.
        idle_by_cause: the idle time of the GPU per step by cause; see `instrument.diagnosis.idle_causes.CAUSES`.
        stretch: the length of a step in the window / its length outside; None if that is unknown.
        goodput: the useful operations and their share of the peak; see `goodput_of`.
        memory: the use of the memory of the GPU; None if it is not recorded.
        abstained: the rules that lacked evidence, with what the trace lacks.
        failed: the rules that raised an error, with the error.
        metrics: all metrics of the trace.
        roofline: the operators with their operations, bytes and shares of the peak.
        idle_gaps: the longest times during which no GPU works, each with its cause and place.
        ignored: the rules that were left out.
        tuned: the thresholds that were changed, by rule.
        left_out: the files of a folder that were not read, each with what it holds.
        facts: what the rules read, and the trace; None in a diagnosis that was not made by `diagnose`.
        regions: the path and the CPU and GPU time per step of the outermost regions, the longest first.
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
    regions: tuple[tuple[str, int, int], ...] = ()
    idle_gaps: tuple[IdleGap, ...] = ()
    ignored: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    facts: TraceFacts | None = field(default=None, repr=False, compare=False)

    @property
    def replayer(self) -> Replayer | None:
        """Replays the trace with changes; None without `facts`."""
        return self.facts.replayer if self.facts else None

    @property
    def each_step(self) -> str:
        """The words after a time per step: "per step", or "in the window" for a trace without steps."""
        return "per step" if self.has_steps else "in the window"

    def definition(self, evidence: Evidence) -> str:
        """Return the definition of a number without its full stop; without steps, also without "per step"."""
        text = evidence.definition.rstrip(".:")
        return text if self.has_steps else text.replace(" per step", "")

    def win_text(self, found: Finding) -> str:
        """Return what a finding can win, in words: replayed if it was, and at most."""
        if found.win_ns is None:
            return "unknown"
        most = f"at most {duration(found.win_ns)} {self.each_step} ({100 * found.win_ns / self.step_ns:.1f} %)"
        if found.replayed_ns is None:
            return most
        if found.replayed_ns < _OFF_PATH * found.win_ns:
            return f"nothing in a replay, as it is off the critical path; {most}"
        share = 100 * found.replayed_ns / self.step_ns
        return f"{duration(found.replayed_ns)} ({share:.1f} %) in a replay, {most}"

    @property
    def nothing_found(self) -> str:
        """The message if there is no finding `worth` showing."""
        said = f"; left out: {', '.join(self.ignored)}" if self.ignored else ""
        said += f"; thresholds were changed of: {', '.join(self.tuned)}" if self.tuned else ""
        return f"No rule found anything worth 1 % of {'the step' if self.has_steps else 'the window'}{said}."

    @property
    def memory_text(self) -> str:
        """The allocated memory at the peak by category, as a sentence; empty if it is unknown."""
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
