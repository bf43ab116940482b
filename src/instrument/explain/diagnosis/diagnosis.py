"""`Diagnosis`: the verdict and the findings of one trace; as JSON, too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.findings import Evidence, Finding, Where
from ...base.page_file import Page
from ...base.printable import shell_line
from ...base.run_folder import Phase
from ...base.units import counted, duration, percentage, size
from ...read.measures.region_steps import describe_steps_from
from ...read.memory.snapshot import MemorySnapshot, peak_text
from ...read.memory.snapshot import as_dict as memory_as_dict
from ..metrics.idle import CAUSES
from ..metrics.job import Job
from ..metrics.memory_use import CATEGORIES, MemoryUse, megabytes
from ..metrics.metrics import Metrics
from ..metrics.pipelines import CAUSES as BUBBLES
from ..metrics.pipelines import as_dict as pipeline_as_dict
from ..metrics.roofline import Roofline, RooflineRow
from ..replay.critical_path import CLASSES as PATH_CLASSES
from ..replay.replay import Replayer
from ..replay.requests import Request, Speed, Words
from ..replay.step_waits import WORK, StepWaits
from ..replay.what_if import WhatIf, what_if
from ..rules.rule import RULES, fix_of
from ..rules.trace_facts import TraceFacts
from .longest import IdleGap, RegionTimes, joined_regions
from .plan import Plan, plan_of
from .verdict import Bound, definition_of_part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_LISTED = 10  # ranks
_REGIONS, _GAPS = 5, 3  # rows
_GAP = 0.05  # of the step: shorter gaps are not shown
_OFF_PATH = 0.01  # of the time to win: so little is a rounding of the replay


@dataclass(frozen=True)
class Diagnosis(Page):
    """What is slow in a trace, and why; print it, or read its attributes.

    Attributes:
        path: the file.
        verdict: what bounds the steps, in one sentence.
        bound: "overhead", "compute", "memory", "communication", "copies", "input", "synchronization", "latency",
            or None if nothing bounds the steps alone, or that is not known (`coverage` says why).
        waits: what a step waits for, and what it wins without each; None where no replay says so. See
            `instrument.explain.replay.step_waits.StepWaits`.
        parts: what the GPU does in a step in ns, which add up to it; see
            `instrument.explain.diagnosis.verdict.PARTS`.
        coverage: the evidence that the verdict is based on, or what prevents a bound.
        findings: the findings, those with the most time to win first.
        hidden: what rules found that wins nothing because something else takes longer.
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
        view: the options of the command that chose the steps and what communicates.
        phases: the phases that the run recorded beside the steps, such as evaluations, if the file was chosen.
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
    metrics: Metrics
    roofline: Roofline
    regions: tuple[RegionTimes, ...] = ()
    idle_gaps: tuple[IdleGap, ...] = ()
    ignored: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    view: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    job: Job | None = field(default=None, compare=False)
    steps_from: str = ""
    merged_ranks: tuple[int, ...] = ()
    opened_by: str = ""
    facts: TraceFacts | None = field(default=None, compare=False)
    snapshot: MemorySnapshot | None = field(default=None, compare=False)
    stretch_range: tuple[float, float] | None = None
    waits: StepWaits | None = None
    hidden: tuple[Finding, ...] = ()

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
        return f"{'Based on' if self.bound or self.waits else 'Why no bound'}: {self.coverage}."

    @property
    def source_texts(self) -> list[str]:
        """Sentences on which file was chosen, what marks the steps, and which files are left out."""
        texts = [f"Diagnosed: {self.source}."] if self.source else []
        for phase in self.phases:
            length = (
                ""
                if phase.median_ns is None
                else f", {duration(phase.median_ns)}{' (median)' * (phase.blocks > 1)}"
            )
            shown = shell_line(["instrument", "diagnose", str(phase.window)])
            texts.append(f"Beside the steps: {counted(phase.blocks, 'block')} of {phase.name}{length}: {shown}")
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
        goodput = self.goodput
        if goodput["mfu"] is None:
            return ""
        said = f": {goodput['unknown']}" if goodput["unknown"] else ""
        if goodput["recomputed_flops"]:
            said = f", and {percentage(goodput['hfu'])} with what the backward pass computes again{said}"
        return f"Model FLOPs utilization: {percentage(goodput['mfu'])} of the peak of {goodput['peak']}{said}."

    @property
    def counters_text(self) -> str:
        """Power, energy, clock and temperature as a sentence; empty without samples of them."""
        return self.facts.counters_text if self.facts else ""

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
        most += f"; it also shortens {' and '.join(found.also)}" if found.also else ""
        if found.replayed_ns is None:
            return most
        if found.replayed_ns < _OFF_PATH * found.win_ns:
            return f"nothing in a replay, as something else takes as long; {most}"
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

    def what_if(
        self,
        *,
        without: Words = (),
        speed: Speed = (),
        overlap: Words = (),
        launch: float | str | None = None,
        replace: Words | Mapping[str, str] = (),
        workers: int | str | None = None,
        fuse: Words = (),
        fix: Words = (),
    ) -> WhatIf:
        """Return the step as it would be with a change, by a replay of the trace.

        Args:
            without: what costs nothing, in one text or several: "dataloader" (the loop's wait for its next batch),
                "copies" (memcpys, the calls that launch them, and the waits for them), "sync" (all
                synchronizations), "sync:FILE:LINE" (those at a line), "region:NAME" (all calls of a region, and
                all that they launch).
            speed: how many times as fast kernels become, by regular expressions that are searched in their names:
                "kernel:gemm=2x", several such texts, or a mapping such as ``{"kernel:gemm": 2}``. "kernel:" may be
                left out. "region:NAME=2x": the CPU's work in all calls of a region, and all that they launch.
            overlap: "communication": no other work waits for kernels that communicate.
            launch: the part that the CPU's work still takes, such as "0.1x": all but the loop's waits for a batch
                and for the GPU, as with CUDA graphs or a compiled step.
            replace: how long each kernel of such a name takes, as with another kernel: "kernel:gemm=50us", several
                such texts, or a mapping such as ``{"kernel:gemm": "50us"}``.
            workers: how many workers load batches, where a DataLoader has none; or how many times as many as it
                has, such as "2x".
            fuse: "optimizer": one kernel updates all parameters.
            fix: the names of rules: without what they find, as far as a replay shows it.

        Raises:
            TypeError: an argument has another type.
            ValueError: a word is not one of these, or the trace has no such thing.

        >>> diagnosis.what_if(without="dataloader").step_ns  # doctest: +SKIP
        118246000
        """
        facts = self._replayed_facts()
        request = Request(without, speed, overlap, launch, replace, workers, fuse, fix)
        return what_if(facts.replayer, request, partial(fix_of, facts))

    def plan(self) -> Plan:
        """Return what to change first, and what each change wins after those before it."""
        return self._plan

    @cached_property  # text, JSON and page each ask for it
    def _plan(self) -> Plan:
        return plan_of(self._replayed_facts(), (*self.findings, *self.hidden))

    def _replayed_facts(self) -> TraceFacts:
        if self.facts is None:
            raise ValueError("only a diagnosis from instrument.diagnose has a trace to replay")
        return self.facts

    def to_json(self) -> str:
        """Return the diagnosis as JSON text; see `as_dict` for its keys."""
        return as_text(as_dict(self))

    def to_markdown(self) -> str:
        """Return the diagnosis as Markdown, for a pull request."""
        from ...show.text.diagnosis import to_markdown

        return to_markdown(self)

    def __str__(self) -> str:
        from ...show.text.diagnosis import lines
        from ...show.text.lines import as_text

        return as_text(lines(self)).rstrip("\n")

    def __repr__(self) -> str:
        return f"<diagnosis of {self.path!r}: {counted(len(self.findings), 'finding')}. {self.verdict}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from ...show.text.diagnosis import lines
        from ...show.text.lines import as_rich

        return as_rich(lines(self, options.max_width))

    def _page(self) -> str:
        from ...show.sections.diagnosis import page_of

        return page_of(self)

    def _repr_markdown_(self) -> str:
        # for viewers that show no frames, exports to PDF, and traces with pages too large for a notebook
        return self.to_markdown()


VERSION = 1

DEFINITIONS = {
    "step_ns": "Mean time of a step in ns: from the start of the first, or the end of earlier GPU work if that is "
    "later, to the end of the last one's GPU work.",
    "stretch": "Median step in the window / median step outside; null if the run has no manifest.",
    "stretch_range": "Lower and upper bound of stretch, given how much the steps vary; null like stretch.",
    "goodput.flops": "Floating-point operations of matmuls, attention and convolutions per step.",
    "goodput.recomputed_flops": "Those of them that the backward pass computes again, per step.",
    "goodput.mfu": "Time of flops without the recomputed ones at the peak of the GPUs / time of the step.",
    "goodput.hfu": "Time of flops at the peak of the GPUs / time of the step.",
    "goodput.coverage": "Share of the time of kernels whose operations are known.",
    "goodput.unknown": "Why mfu is null, or implausible.",
    "job.world_size": "Number of ranks of the job, as the files say, else the highest rank plus one.",
    "job.ranks": "Ranks whose trace was read; missing: those without a trace; guessed: numbered by name.",
    "job.even_ranks.step_ns": "Mean step of the median rank in ns; even_ranks is null if that is unknown.",
    "job.even_ranks.even_ns": "The same with all ranks as fast as the median, replayed through collectives.",
    "job.pipelines.idle_share": "Idle time of all stages / their steps.",
    "job.pipelines.unavoidable_share": "(p - 1) / (m + p - 1) for p stages and m microbatches per step.",
    "job.pipelines.stages.busy_ns": "Time per step during which the stage computes.",
    **{f"job.pipelines.stages.idle_ns.{cause}": f"{text} In ns per step." for cause, text in BUBBLES.items()},
    "job.no_pipeline": "Why sends and receives are no pipeline; empty if they are, or there are none.",
    "job.transfers.calls": "Sends and receives of a rank of which both ends are known.",
    "job.transfers.waited_ns": "Time in them, in the window, until the other end was ready.",
    "job.transfers.transfer_ns": "Time in them from then on.",
    "memory.peak_bytes": "Bytes that torch's allocator had allocated at the peak.",
    "memory.reserved_bytes": "Bytes that it had reserved then.",
    "memory.parts.bytes": "Allocated bytes of this category at the peak.",
    "memory.parts.growth_bytes": "Growth per step, from the end of the first step to that of the last.",
    "idle_gaps.start_ns": "Start of the gap in ns, from the start of the window.",
    "idle_gaps.duration_ns": "Length of the gap in ns.",
    "idle_gaps.cause": "The cause of idle_by_cause that holds for most of the gap.",
    "regions.cpu_ns": "Time on the CPU, during the steps, of the calls inside no other region, in ns per step.",
    "regions.gpu_ns": "Sum of the durations of the GPU work that they launched, in ns per step.",
    "findings.win_ns": "The most time in ns per step that removing the cause can win.",
    "findings.replayed_ns": "The time in ns per step that a replay without the cause wins.",
    "findings.win_share": "win_ns / step_ns.",
    "findings.win_bytes": "The most bytes of GPU memory that removing the cause can free at the peak.",
    "findings.start_ns": "When it shows, in ns from the start of the window; null if it has no single time.",
    "replay.self_error": "Median over the steps of |replayed - recorded| / recorded.",
    "replay.max_error": "Maximum over the steps of |replayed - recorded| / recorded.",
    "findings.hidden_ns": "The most time in ns per step that it could win once what bounds the step is gone.",
    "plan.recorded_ns": "Mean time of a recorded step in ns.",
    "plan.rows.before_ns": "Predicted time of a step in ns with the changes of the rows before.",
    "plan.rows.step_ns": "Predicted time of a step in ns with this change, too.",
    "plan.self_error": "As replay.self_error.",
    "plan.end.step_ns": "Predicted time of a step in ns with all changes.",
    "plan.end.roofline_ns": "Time of its kernels in ns at the GPU's peak of arithmetic or of memory, whichever "
    "takes longer for each; null if less than 80 % of the time of the kernels that compute is known.",
    "plan.end.share": "roofline_ns / step_ns.",
    "findings.coverage": "Share of the GPU time or calls for which the trace has what the rule needs.",
    "roofline.calls": "Calls of the operator with these sizes in the window that launched kernels.",
    "roofline.gpu_ns": "Sum of the durations of these kernels in ns.",
    "roofline.flops": "Floating-point operations of one call; a multiplication and an addition are two.",
    "roofline.bytes": "Bytes of each input and of the result of one call, once.",
    "roofline.flops_per_byte": "flops / bytes.",
    "roofline.ridge_flops_per_byte": "Peak operations / peak bytes per second of the GPU for this type.",
    "roofline.share_of_peak": "Operations or bytes per second, whichever side limits, / the peak of that side.",
    "roofline.implausible": "Whether the share is above 1.05, so that shapes or peak cannot be right.",
}
"""The definitions of the numbers that do not carry their own, by key."""

_OPERATORS = 50
_HEAD = (
    "path", "verdict", "bound", "coverage", "rank", "has_steps", "steps", "step_ns", "stretch", "stretch_range",
)  # fmt: skip


def as_text(value: Any) -> str:
    """Return JSON text of what `as_dict` returns."""
    return json.dumps(value, indent=2, default=plain, allow_nan=False)


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a dict of JSON values; while ``version`` is 1, keys are only added.

    ``path``, ``verdict``, ``bound`` (or null), ``coverage`` (what the verdict rests on, or why it abstains),
    ``rank`` (or null), ``has_steps``, ``steps`` (1 without steps: the window counts as one), ``step_ns``,
    ``stretch`` and ``stretch_range`` (or null), ``parts`` and ``idle_by_cause`` (each name with ``ns`` per step
    and ``definition``), ``waits`` (null where no replay says what a step waits for; else each class of its
    critical path with ``ns`` per step, ``definition``, and ``win_ns``: what a step wins without it, or null),
    ``cpu_work`` (null, or what its "overhead" is, each with ``ns`` per step and ``definition``),
    ``cpu_regions`` (null, or rows of innermost ``region`` and ``ns`` per step of its "between_operators"),
    ``goodput`` (see `goodput_of`), ``memory`` (null, or ``device``, ``peak_bytes``, ``reserved_bytes`` at the peak
    or null, and ``parts``: each category with its ``bytes`` at the peak, ``growth_bytes`` per step or null, and
    ``definition``), ``memory_snapshot`` (null, or what `instrument.read.memory.snapshot.as_dict` returns of the
    GPU with the highest peak), ``abstained`` and ``failed`` (rule and reason), ``ignored`` and ``replaced``
    (rules), ``thresholds`` (those that were changed, by rule), ``left_out`` (file and what it holds), ``source``
    (the file and rank, if they were chosen from several), ``phases`` (which the run recorded
    beside the steps: each ``name``, the number of its ``blocks``, their ``median_ns`` or null, and the folder of
    its last ``window``), ``steps_from`` (the regions that are the steps; empty for marked steps),
    ``merged_ranks`` (of a merged trace; else empty), ``opened_by`` (why the window was opened; empty if unknown),
    ``job`` (null for one trace, or ``world_size``, ``ranks`` that were read, ``missing`` ones, ``guessed``
    ones that no file names, ``damaged`` files by rank with what is wrong, ``unreadable`` files with the reason,
    ``even_ranks`` (null, or ``step_ns`` and ``even_ns``), ``pipelines`` (each with its ``stages``),
    ``no_pipeline``, and ``transfers`` by rank), ``metrics`` (each metric that is one number, with ``value``,
    ``unit``, ``definition`` and ``coverage``);
    ``roofline``, the operators with known operations, the longest on the GPU first, each with

    - ``operator``, ``kind`` (of `Work.kind`), ``dtype`` (that the units computed in), ``sizes`` (of `Work.sizes`);
    - ``calls`` in the window, ``gpu_ns`` (the sum of their kernels' durations);
    - ``flops`` and ``bytes`` of one call (or null), ``flops_per_byte``, ``ridge_flops_per_byte`` (from which
      compute limits it), ``bound`` ("compute", "memory" or null);
    - ``share_of_peak`` (operations or bytes per second / the peak of that side, or null), ``implausible`` (whether
      that is more than the GPU can do);

    ``idle_gaps``, the longest, each with ``start_ns``, ``duration_ns``, ``cause`` and ``where``; ``regions``, the
    outermost, each with ``name``, ``cpu_ns`` and ``gpu_ns``; ``replay`` (null, or ``self_error`` and ``max_error``
    of the replay without a change as shares of a step, and ``abstained``: null, or why nothing is replayed);
    ``definitions`` (by key, of the numbers that do not carry their own); and ``findings``, those with the most
    time to win first (an unknown time counts as the least of the severity), each with

    - ``rule``, ``severity``, ``confidence`` ("high", "medium", "low"), ``title``, ``meaning`` (of the rule);
    - ``where``: ``region`` (names, outermost first), ``module``, ``operator``, ``kernel``, ``step``, ``rank``,
      ``site`` (null, or ``file``, ``line``, ``function``); ``start_ns`` (in the window, or null);
    - ``win_ns`` (the most time per step that removing it can win, or null), ``replayed_ns`` (what a replay without
      it wins, or null), ``win_share`` (win_ns / step), ``win_bytes`` (the most memory that it can free, or null);
    - ``evidence``: ``name``, ``value``, ``unit``, ``definition`` of each number;
    - ``change`` (its removal as ``instrument whatif`` takes it; empty if no replay shows it), ``hidden_ns`` (the
      most that it could win once what bounds the step is gone, or null), ``also`` (the classes of ``waits`` that
      it shortens besides that which its rule is about, where it could not win so much without);
    - ``coverage`` (a share, or null), ``fix`` (null, or ``text``, ``before``, ``after``).

    ``hidden`` holds findings that win nothing now because something else takes longer. ``plan`` (null without a
    trace) has ``rows``: the changes in the order in which to make them, each with ``change``, ``text``,
    ``before_ns``, ``step_ns``, and ``bound`` of the step then; ``recorded_ns``, ``self_error`` of the replay,
    ``abstained`` (null, or why there is no plan), ``whatif`` (all changes, as options of one command), and ``end``
    (null, or the step after them: ``step_ns``, ``bound``, ``roofline_ns``, ``gpu`` and ``share``, null where too
    little is known, and all that in a sentence, ``text``).
    """
    return {
        "version": VERSION,
        **{name: getattr(diagnosis, name) for name in _HEAD},
        "parts": {
            name: {"ns": ns, "definition": definition_of_part(name, diagnosis.has_gpu)}
            for name, ns in diagnosis.parts.items()
        },
        "waits": diagnosis.waits
        and {
            name: {"ns": ns, "win_ns": diagnosis.waits.wins.get(name), "definition": PATH_CLASSES[name]}
            for name, ns in diagnosis.waits.parts.items()
        },
        "cpu_work": diagnosis.waits
        and {name: {"ns": ns, "definition": WORK[name]} for name, ns in diagnosis.waits.work.items()},
        "cpu_regions": diagnosis.waits
        and [{"region": name, "ns": ns} for name, ns in diagnosis.waits.regions.items()],
        "idle_by_cause": {
            name: {"ns": ns, "definition": CAUSES[name]} for name, ns in diagnosis.idle_by_cause.items()
        },
        "goodput": diagnosis.goodput,
        **{
            name: [_finding(finding, diagnosis.step_ns) for finding in findings]
            for name, findings in (("findings", diagnosis.findings), ("hidden", diagnosis.hidden))
        },
        "plan": diagnosis.facts and diagnosis.plan().as_dict(),
        "idle_gaps": [gap._asdict() | {"where": _where(gap.where)} for gap in diagnosis.idle_gaps],
        "regions": [each._asdict() for each in diagnosis.regions],
        "abstained": diagnosis.abstained,
        "memory": diagnosis.memory and _memory(diagnosis.memory),
        "memory_snapshot": diagnosis.snapshot and _snapshot(diagnosis.snapshot),
        **{name: getattr(diagnosis, name) for name in ("failed", "ignored", "replaced")},
        "thresholds": diagnosis.tuned,
        **{name: getattr(diagnosis, name) for name in ("left_out", "source")},
        "phases": [each._asdict() | {"window": str(each.window)} for each in diagnosis.phases],
        "job": diagnosis.job and _job(diagnosis.job),
        **{name: getattr(diagnosis, name) for name in ("steps_from", "merged_ranks", "opened_by")},
        "roofline": [_operator(row, diagnosis.roofline) for row in diagnosis.roofline.rows[:_OPERATORS]],
        "metrics": dict(_metrics(diagnosis.metrics)),
        "replay": diagnosis.replayer and _replay(diagnosis.replayer),
        "definitions": DEFINITIONS,
    }


def _job(job: Job) -> dict[str, Any]:
    return {
        "world_size": job.world_size,
        "ranks": list(job.ranks),
        "missing": job.missing,
        "guessed": job.guessed,
        "damaged": {rank: list(lost.reasons) for rank, lost in job.damaged.items()},
        "unreadable": {str(path): reason for path, reason in job.failed.items()},
        "even_ranks": job.even and job.even._asdict(),
        "pipelines": [pipeline_as_dict(each) for each in job.pipelines.pipelines],
        "no_pipeline": job.pipelines.unknown,
        "transfers": {rank: each._asdict() for rank, each in job.exchange.totals.items()},
    }


def _replay(replayer: Replayer) -> dict[str, Any]:
    errors = replayer.errors if replayer.has_cpu else None
    return {
        "self_error": None if errors is None else float(np.median(errors)),
        "max_error": None if errors is None else float(errors.max()),
        "abstained": replayer.abstained,
    }


def _memory(use: MemoryUse) -> dict[str, Any]:
    growth = use.growth_bytes
    return {
        **{name: getattr(use, name) for name in ("device", "peak_bytes", "reserved_bytes")},
        "parts": {
            name: {"bytes": size, "growth_bytes": growth and growth[name], "definition": CATEGORIES[name]}
            for name, size in use.by_category.items()
        },
    }


def _snapshot(snapshot: MemorySnapshot) -> dict[str, Any] | None:
    device = snapshot.fullest_device
    return None if device is None else memory_as_dict(snapshot, device)


_WINS = ("start_ns", "win_ns", "replayed_ns", "win_bytes", "change", "hidden_ns", "also")


def _finding(finding: Finding, step_ns: float) -> dict[str, Any]:
    rule = RULES.get(finding.rule)
    return {
        **{name: getattr(finding, name) for name in ("rule", "severity", "confidence", "title")},
        "meaning": (rule.function.__doc__ or "").partition("\n")[0] if rule else "",
        "where": _where(finding.where),
        **{name: getattr(finding, name) for name in _WINS},
        "win_share": None if finding.win_ns is None or not step_ns else finding.win_ns / step_ns,
        "evidence": [each._asdict() for each in finding.evidence],
        "coverage": finding.coverage,
        "fix": finding.fix and vars(finding.fix),
    }


def _where(where: Where) -> dict[str, Any]:
    return where._asdict() | {"site": where.site and vars(where.site)}


def _operator(row: RooflineRow, line: Roofline) -> dict[str, Any]:
    """Return one operator: work of one call, GPU time of all calls, and what the GPU allows (null if unknown)."""
    ridge = line.peak.ridge(row.kind) if line.peak else None
    return {
        "operator": row.name,
        "kind": row.work.kind,
        "dtype": row.kind,
        "sizes": row.work.sizes,
        "calls": row.calls,
        "gpu_ns": row.gpu_ns,
        "flops": row.work.flops,
        "bytes": row.work.bytes,
        "flops_per_byte": row.work.flops / row.work.bytes if row.work.bytes else None,
        "ridge_flops_per_byte": ridge,
        "bound": row.bound,
        "share_of_peak": row.share,
        "implausible": row.implausible,
    }


def _metrics(metrics: Metrics) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in metrics.items():
        if value is None or isinstance(value, (int, float)):
            about = metrics.about(key)
            fields = {name: getattr(about, name) for name in ("unit", "definition", "coverage")}
            yield key, {"value": value if value is None or math.isfinite(value) else None} | fields


def plain(value: Any) -> Any:
    """Return a number of numpy as one of Python; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)
