"""`compare`: says whether steps became faster or slower, which parts changed, and what else differs."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ...base.findings import Finding
from ...base.page_file import Page
from ...base.units import counted, duration
from ...read.jobs.ranks import TraceSet
from ...read.measures.timing import Stretch
from ...read.tables.table import Array
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, count_gpus
from ..diagnosis.chosen_trace import reject_snapshot
from ..diagnosis.diagnose import Diagnosis, diagnose
from ..replay.graph import loop_steps
from ..replay.replay import lower_median
from ..rules.trace_facts import TraceFacts
from .significance import ALPHA, MINIMUM, Significance, significance
from .step_parts import KINDS, Amount, Key, step_parts

_STEPS = 20  # that a recording should have
_MORE = 1.2  # times as many as needed: the next steps may vary more
Verdict = Literal["faster", "slower", "no change seen", "not comparable"]


@dataclass(frozen=True)
class Part:
    """A part of the difference of two steps.

    Attributes:
        kind: one of `step_parts.KINDS`.
        region: the names of the regions, outermost first.
        operator: the operator; empty if there is none.
        kernel: the kernel, memcpy or memset; empty for other kinds.
        before_ns: its time in the step before the change.
        after_ns: its time in the step after the change.
        before_calls: how often it occurs in the step before.
        after_calls: how often it occurs in the step after.
    """

    kind: str
    region: tuple[str, ...]
    operator: str
    kernel: str
    before_ns: int
    after_ns: int
    before_calls: int
    after_calls: int

    @property
    def ns(self) -> int:
        """The time after - the time before."""
        return self.after_ns - self.before_ns

    @property
    def change(self) -> Literal["appeared", "gone", "changed"]:
        """Whether it occurs on one side only."""
        if not self.before_calls:
            return "appeared"
        return "changed" if self.after_calls else "gone"


CHANGES = {
    "gone": "Findings that are gone:",
    "new": "New findings:",
    "became_visible": "Findings that something else hid before:",
    "became_hidden": "Findings that something else hides now:",
}
"""What can become of a finding: the attribute of `Comparison` that holds such findings, and a heading for them."""


@dataclass(frozen=True)
class Comparison(Page):
    """What changed between two recordings.

    Attributes:
        verdict: "faster" or "slower" if the steps differ by more than chance; "no change seen"; "not comparable".
        before_ns: the lower median of the lengths of the steps before the change.
        after_ns: that after it.
        parts: the difference of the two median steps by kind, region, operator and kernel, the largest first;
            the sum of their ``ns`` is ``delta_ns``.
        p_value: the probability of such a difference if the true change is at most 0.5 %; None with fewer than
            four steps on a side.
        detectable: the smallest relative change that these samples show in 80 % of cases; None like ``p_value``.
        reasons: why the recordings cannot be compared, or why "no change seen" says little.
        notes: other differences between the recordings.
        gone: the findings of the first diagnosis that the second one lacks.
        new: the findings of the second that the first one lacks.
        became_visible: those of the second that something else hid in the first.
        became_hidden: those of the first that something else hides in the second.
        lengths_ns: the lengths of the steps before and after, in their order.
        before: the first diagnosis.
        after: the second diagnosis.
    """

    verdict: Verdict
    before_ns: int
    after_ns: int
    parts: tuple[Part, ...]
    p_value: float | None
    detectable: float | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
    lengths_ns: tuple[tuple[int, ...], tuple[int, ...]]
    before: Diagnosis
    after: Diagnosis
    became_visible: tuple[Finding, ...] = ()
    became_hidden: tuple[Finding, ...] = ()

    def findings(self) -> dict[str, tuple[Finding, ...]]:
        """Return the findings that differ, by what became of them."""
        return {name: getattr(self, name) for name in CHANGES}

    @property
    def have_steps(self) -> bool:
        """Whether both recordings have steps."""
        return self.before.has_steps and self.after.has_steps

    @property
    def delta_ns(self) -> int:
        """``after_ns`` - ``before_ns``."""
        return self.after_ns - self.before_ns

    @property
    def steps(self) -> tuple[int, int]:
        """The numbers of steps before and after."""
        before, after = self.lengths_ns
        return len(before), len(after)

    @property
    def relative(self) -> float | None:
        """``delta_ns`` / ``before_ns``; None if the latter is 0."""
        return self.delta_ns / self.before_ns if self.before_ns else None

    def by_kind(self) -> dict[str, int]:
        """Return the difference of each kind of part in ns, the largest first; they add up to ``delta_ns``."""
        return self._sums("kind")

    def by_region(self) -> dict[tuple[str, ...], int]:
        """Return the difference of each region in ns, the largest first; they add up to ``delta_ns``."""
        return self._sums("region")

    def _sums(self, name: str) -> dict[Any, int]:
        sums: Counter[Any] = Counter()
        for part in self.parts:
            sums[getattr(part, name)] += part.ns
        return dict(sorted(sums.items(), key=lambda item: -abs(item[1])))

    def to_json(self) -> str:
        """Return the comparison as JSON text; see `as_dict` for its keys."""
        return json.dumps(as_dict(self), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        lengths = f"{duration(self.before_ns)} -> {duration(self.after_ns)}"
        return f"<comparison: {self.verdict}, {lengths}, {counted(len(self.parts), 'part')}>"

    def _page(self) -> str:
        from ...show.sections.comparison import page_of

        return page_of(self)


def headline(change: Comparison) -> str:
    """Return the verdict in one sentence."""
    what = "a step takes" if change.have_steps else "the whole trace takes"
    medians = f"{what} {duration(change.after_ns)} instead of {duration(change.before_ns)} ({change_text(change)}"
    if change.have_steps:
        medians += f"; medians of {counted(change.steps[0], 'step')} before and {change.steps[1]:,} after"
    medians += ")"
    if change.verdict == "not comparable":
        return f"Not comparable: {'; '.join(change.reasons)}; {medians}."
    if change.verdict == "no change seen" and change.reasons:
        return f"Cannot tell whether it changed: {'; '.join(change.reasons)}; {medians}."
    if change.verdict == "no change seen":
        seen = "" if change.detectable is None else f" ({100 * change.detectable:.1f} % would have been)"
        return f"No change seen{seen}: {medians}."
    return f"{change.verdict.capitalize()}: {medians}."


def change_text(change: Comparison) -> str:
    """Return the relative change in words."""
    return "from nothing" if change.relative is None else f"{100 * change.relative:+.1f} %"


def why_undecided(change: Comparison, limit: float) -> str:
    """Return why a slowdown by ``limit``, such as 0.05, may have been missed; empty if it would have been seen.

    A limit below `MINIMUM` stands for every slowdown that is seen: how small that is then does not matter.
    """
    if change.verdict in ("faster", "slower"):
        return ""
    if change.detectable is None or change.reasons:
        return f"{'; '.join(change.reasons)}; record {_STEPS} or more on each side"
    if limit <= MINIMUM or change.detectable <= limit:
        return ""
    least, few = math.log1p(MINIMUM), min(change.steps)
    times = (math.log1p(change.detectable) - least) / (math.log1p(limit) - least)  # as many standard errors
    needed = 10 * math.ceil(_MORE * few * times**2 / 10)
    return (
        f"{counted(few, 'step')} that vary so much show a change of {100 * change.detectable:.1f} % in 80 % of "
        f"cases, and no smaller one; record about {needed:,} steps on each side"
    )


def details(change: Comparison) -> Iterator[str]:
    """Yield sentences on what the verdict rests on, and on other differences between the recordings."""
    if change.p_value is not None and change.detectable is not None:
        yield (
            f"p = {change.p_value:.4f} against a change of at most 0.5 %; a change of "
            f"{100 * change.detectable:.1f} % would be seen in 80 % of cases."
        )
    for note in change.notes:
        yield f"Note: {note}."


_STRETCH = 1.3  # times: a profile that stretches one side so much more than the other hides the change
_VERSIONS = {
    "CUDA runtime": ("cuda_runtime_version",),
    "driver": ("cuda_driver_version", "CudaDriverVersion"),
    "HIP runtime": ("hip_runtime_version",),
}


class Difference(NamedTuple):
    """A difference between two recordings.

    Attributes:
        text: the difference, in words.
        prevents: whether the lengths of the steps say nothing about the program because of it.
    """

    text: str
    prevents: bool


def differences(before: Diagnosis, after: Diagnosis, change: float) -> list[Difference]:
    """Return the differences, those that prevent a comparison first.

    Args:
        before: one recording.
        after: the other one.
        change: the length of a step after / before, as recorded; 1 if no change was seen.
    """
    different = [*_of_machines(facts_of(before), facts_of(after)), *_of_recordings(before, after, change)]
    return sorted(different, key=lambda each: not each.prevents)


def facts_of(diagnosis: Diagnosis) -> TraceFacts:
    """Return the facts of a diagnosis.

    Raises:
        ValueError: the diagnosis has none, as it was not made by `instrument.diagnose`.
    """
    if diagnosis.facts is None:
        raise ValueError("only diagnoses from instrument.diagnose can be compared")
    return diagnosis.facts


def _of_machines(before: TraceFacts, after: TraceFacts) -> Iterator[Difference]:
    one, two = _used_devices(before), _used_devices(after)
    if bool(before.trace.gpu) != bool(after.trace.gpu):
        which = "before" if before.trace.gpu else "after"
        yield Difference(f"only the trace {which} the change has GPU work", prevents=True)
    elif one and two and one != two:
        yield Difference(f"the devices differ: {', '.join(one)} and {', '.join(two)}", prevents=True)
    traces = before.trace, after.trace
    gpus = [count_gpus(trace.gpu) for trace in traces]
    if all(gpus):
        yield from _unequal("numbers of GPUs", gpus, prevents=True)
    yield from _unequal("numbers of ranks", [trace.world_size or 1 for trace in traces], prevents=True)
    yield from _unequal("ranks", [trace.rank for trace in traces])
    for name, keys in _VERSIONS.items():
        versions = [_value(trace.metadata, keys) for trace in traces]
        if None not in versions:
            yield from _unequal(f"versions of the {name}", versions)


def _unequal(what: str, values: list[Any], *, prevents: bool = False) -> Iterator[Difference]:
    if values[0] != values[1]:
        yield Difference(f"the {what} differ: {values[0]} and {values[1]}", prevents)


def _of_recordings(before: Diagnosis, after: Diagnosis, change: float) -> Iterator[Difference]:
    one, two = _stretch_of(before), _stretch_of(after)
    if one is not None and two is not None:
        less, more = sorted((one, two))
        if more.ratio > _STRETCH * less.ratio and more.low > less.high:  # by more than chance
            text = f"recording made steps {one:.2f} and {two:.2f} times as long"
            grown = change if more is two else 1 / change  # in the direction of the recording
            yield Difference(text, prevents=_explains(less, more, grown))
    if before.has_steps != after.has_steps:
        which = "before" if before.has_steps else "after"
        yield Difference(f"only the trace {which} the change has steps", prevents=True)
    yield from _unequal("profilers", [facts_of(each).trace.format for each in (before, after)])
    options = [_value(facts_of(each).trace.metadata, ("with_stack",)) or 0 for each in (before, after)]
    if options[0] != options[1]:
        yield Difference("only one was recorded with stacks, which slows the CPU", prevents=False)


def _stretch_of(diagnosis: Diagnosis) -> Stretch | None:
    ratio = diagnosis.stretch
    return None if ratio is None else Stretch(ratio, *(diagnosis.stretch_range or (ratio, ratio)))


def _explains(less: Stretch, more: Stretch, grown: float) -> bool:
    """Return whether recording may be all of a change that is seen, or may hide one where none is seen."""
    return 1 <= grown <= more.high / less.low if less.low else True


def _used_devices(facts: TraceFacts) -> list[str]:
    """Return the product names of the GPUs that did work or, if the file numbers them differently, of all."""
    used = set(np.unique(facts.trace.gpu.device).tolist())
    names = {device.name for device in facts.trace.devices if device.id in used and device.name}
    return sorted(names or {device.name for device in facts.trace.devices if device.name})


def _value(metadata: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((metadata[key] for key in keys if key in metadata), None)


Recording = Diagnosis | Trace | TraceSet | str | os.PathLike[str]
_NOTHING = Amount(0, 0)
_LOADER = re.compile(r"_(?:SingleProcess|MultiProcessing)(?=DataLoaderIter)")


def compare(
    before: Recording,
    after: Recording,
    *,
    collectives: Collectives = "auto",
    steps_from: str | None = None,
    rank: int | None = None,
) -> Comparison:
    """Return what changed between two recordings of a program.

    The steps are the sample; see `significance`. The parts divide the two median steps; see
    `step_parts`.

    Args:
        before: the recording before the change: a diagnosis, a trace, the traces of several ranks, or a path.
        after: the recording after the change.
        collectives: which kernels communicate, as in `instrument.metrics`.
        steps_from: a regular expression for the names of the regions that are the steps, as in
            `instrument.diagnose`.
        rank: the rank to compare, of several.

    The last three do not apply to diagnoses, which were made with arguments of their own.

    Raises:
        TypeError: an argument has another type.
        ValueError: a rank or a region does not exist, a regular expression is invalid, or a trace has no events on
            the CPU.
        TraceError, OSError: a file cannot be read, or is a memory snapshot.
    """
    one, two = (
        each
        if isinstance(each, Diagnosis)
        else diagnose(each, collectives=collectives, steps_from=steps_from, rank=rank, what_if=False)
        for each in (before, after)
    )
    facts = facts_of(one), facts_of(two)
    bounds = [_bounds(each) for each in facts]
    samples = [ends - starts for starts, ends in bounds]
    before_ns, after_ns = map(lower_median, samples)
    tested = significance(*samples)
    seen = before_ns and after_ns and (tested.p_value is None or tested.p_value <= ALPHA)
    different = differences(one, two, after_ns / before_ns if seen else 1)
    verdict, reasons = _verdict(different, tested, after_ns - before_ns, (one.has_steps, two.has_steps))
    gone, new = _without(one.worth(), two.worth()), _without(two.worth(), one.worth())
    return Comparison(
        verdict,
        before_ns,
        after_ns,
        _parts(*(_median_parts(each, *times) for each, times in zip(facts, bounds, strict=True))),
        tested.p_value,
        tested.detectable,
        reasons,
        tuple(each.text for each in different if not each.prevents),
        _without(gone, two.hidden),
        _without(new, one.hidden),
        (tuple(samples[0].tolist()), tuple(samples[1].tolist())),
        one,
        two,
        _among(new, one.hidden),
        _among(gone, two.hidden),
    )


def _bounds(facts: TraceFacts) -> tuple[Array, Array]:
    """Return when the steps of one recording start and end, each from the end of the step before."""
    reject_snapshot(facts.trace)
    if not facts.replayer.has_cpu:
        raise ValueError(f"the trace has no events on the CPU: {facts.trace.path}")
    return loop_steps(facts.trace).recorded_bounds(facts.trace)


def _median_parts(facts: TraceFacts, starts: Array, ends: Array) -> dict[Key, Amount]:
    """Return the parts of the first step whose length is the lower median."""
    lengths = ends - starts
    step = int(np.flatnonzero(lengths == lower_median(lengths))[0])
    return step_parts(facts, int(starts[step]), int(ends[step]))


def _verdict(
    different: list[Difference], tested: Significance, delta_ns: int, has_steps: tuple[bool, bool]
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and why it is not "faster" or "slower"."""
    prevented = tuple(each.text for each in different if each.prevents)
    if prevented:
        return "not comparable", prevented
    if not all(has_steps):
        return "no change seen", ("the traces have no steps",)
    if tested.p_value is None:
        return "no change seen", (tested.unknown,)
    if tested.p_value > ALPHA:
        return "no change seen", ()
    if tested.sign * delta_ns <= 0:
        return "no change seen", ("the means and the medians of the steps differ in opposite directions",)
    return ("slower" if delta_ns > 0 else "faster"), ()


def _parts(before: Mapping[Key, Amount], after: Mapping[Key, Amount]) -> tuple[Part, ...]:
    parts = []
    for key in sorted(before.keys() | after.keys()):
        one, two = before.get(key, _NOTHING), after.get(key, _NOTHING)
        parts.append(Part(*key, one.ns, two.ns, one.calls, two.calls))
    return tuple(sorted(parts, key=lambda part: -abs(part.ns)))


def _without(findings: Iterable[Finding], others: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings whose cause the others lack; each of the others has one cause.

    A line is the same if its function is, as an edit above moves it, and a cause without a line or a kernel is the
    same wherever it costs most.
    """
    left, rest = list(findings), list(others)
    for identity in (_rule_and_place, _rule_and_function, _rule_anywhere):
        unmatched, left = left, []
        for each in unmatched:
            wanted = identity(each)
            same = next((other for other in rest if wanted and identity(other) == wanted), None)
            if same is None:
                left.append(each)
            else:
                rest.remove(same)
    return tuple(left)


def _among(findings: Iterable[Finding], others: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings whose cause the others have, too."""
    findings = tuple(findings)
    lacking = [id(each) for each in _without(findings, others)]
    return tuple(each for each in findings if id(each) not in lacking)


def _rule_and_place(finding: Finding) -> tuple[str, ...]:
    """Return what identifies a finding in both recordings: a DataLoader is the same with and without workers."""
    return finding.rule, *(_LOADER.sub("", str(part)) for part in finding.where._replace(step=None, rank=None))


def _rule_and_function(finding: Finding) -> tuple[str, ...]:
    site = finding.where.site
    return (finding.rule, site.file, site.function) if site else ()


def _rule_anywhere(finding: Finding) -> tuple[str, ...]:
    return () if finding.where.site or finding.where.kernel else (finding.rule,)


_NUMBERS = (
    "before_ns", "after_ns", "delta_ns", "relative", "p_value", "detectable", "reasons", "notes", "steps",
)  # fmt: skip


def as_dict(change: Comparison) -> dict[str, Any]:
    """Return a comparison as a dict of JSON values.

    ``verdict``, ``before_ns``, ``after_ns``, ``delta_ns``, ``relative``, ``p_value``, ``detectable``, ``reasons``,
    ``notes`` and ``steps`` are attributes of `Comparison`. ``before`` and ``after`` are the paths. ``kinds`` are
    the differences by kind, each with ``ns`` and ``definition``; ``parts`` are all parts with the attributes of
    `Part` and their ``ns`` and ``change``. Both add up to ``delta_ns``. ``gone``, ``new``, ``became_visible`` and
    ``became_hidden`` are findings, each with ``rule``, ``title`` and ``where``.
    """
    return {
        "verdict": change.verdict,
        "before": change.before.path,
        "after": change.after.path,
        **{name: getattr(change, name) for name in _NUMBERS},
        "kinds": {kind: {"ns": ns, "definition": KINDS[kind]} for kind, ns in change.by_kind().items()},
        "parts": [vars(part) | {"ns": part.ns, "change": part.change} for part in change.parts],
        **{
            name: [{"rule": each.rule, "title": each.title, "where": str(each.where)} for each in findings]
            for name, findings in change.findings().items()
        },
    }
