"""`compare`: says whether the steps of a program became faster or slower, and which parts of a step changed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..diagnosis.diagnose import Diagnosis, diagnose
from ..diagnosis.memory_snapshot import reject_snapshot
from ..diagnosis.trace_facts import TraceFacts
from ..findings import Finding
from ..guard import guard
from ..page.document import frame, write_page
from ..replay.loop_steps import loop_steps
from ..replay.replayer import lower_median
from ..traces.communication import Collectives
from ..traces.ranks import TraceSet
from ..traces.table import Array
from ..traces.trace import Trace
from ..units import counted, duration
from .comparability import Difference, differences, facts_of
from .comparison_data import ComparisonData, Part, Verdict
from .page_sections import page_of
from .significance import ALPHA, Significance, significance
from .step_parts import KINDS, Amount, Key, step_parts

Recording = Diagnosis | Trace | TraceSet | str | os.PathLike[str]
_NOTHING = Amount(0, 0)
_LOADER = re.compile(r"_(?:SingleProcess|MultiProcessing)(?=DataLoaderIter)")


class Comparison(ComparisonData):
    """What changed between two recordings; read the attributes of `ComparisonData`."""

    def to_json(self) -> str:
        """Return the comparison as JSON text; see `as_dict` for its keys."""
        return json.dumps(as_dict(self), indent=2, allow_nan=False)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as one HTML file, which needs no network, and return its path.

        Raises:
            OSError: the file cannot be written.
        """
        return write_page(path, page_of(self))

    def __repr__(self) -> str:
        lengths = f"{duration(self.before_ns)} -> {duration(self.after_ns)}"
        return f"<comparison: {self.verdict}, {lengths}, {counted(len(self.parts), 'part')}>"

    @guard.contained("page in a notebook")
    def _repr_html_(self) -> str | None:
        return frame(page_of(self))


def compare(
    before: Recording,
    after: Recording,
    *,
    collectives: Collectives = "auto",
    steps_from: str | None = None,
    rank: int | None = None,
) -> Comparison:
    """Return what changed between two recordings of a program.

    The steps are the sample; see `instrument.comparison.significance`. The parts divide the two median steps; see
    `instrument.comparison.step_parts`.

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
    samples = [_Steps(each) for each in facts]
    before_ns, after_ns = (lower_median(steps.lengths_ns) for steps in samples)
    tested = significance(*(steps.lengths_ns for steps in samples))
    seen = before_ns and after_ns and (tested.p_value is None or tested.p_value <= ALPHA)
    found = differences(one, two, after_ns / before_ns if seen else 1)
    verdict, reasons = _verdict(found, tested, after_ns - before_ns, (one.has_steps, two.has_steps))
    return Comparison(
        verdict,
        before_ns,
        after_ns,
        _parts(*(steps.median_parts() for steps in samples)),
        tested.p_value,
        tested.detectable,
        reasons,
        tuple(each.text for each in found if not each.prevents),
        _without(one.worth(), two.worth()),
        _without(two.worth(), one.worth()),
        (tuple(samples[0].lengths_ns.tolist()), tuple(samples[1].lengths_ns.tolist())),
        one,
        two,
    )


class _Steps:
    """The steps of one recording.

    Attributes:
        lengths_ns: their lengths, each from the end of the step before.
    """

    def __init__(self, facts: TraceFacts) -> None:
        reject_snapshot(facts.trace)
        if not facts.replayer.has_cpu:
            raise ValueError(f"the trace has no events on the CPU: {facts.trace.path}")
        self._facts = facts
        self._starts, self._ends = loop_steps(facts.trace).recorded_bounds(facts.trace)
        self.lengths_ns: Array = self._ends - self._starts

    def median_parts(self) -> dict[Key, Amount]:
        """Return the parts of the first step whose length is the lower median."""
        step = int(np.flatnonzero(self.lengths_ns == lower_median(self.lengths_ns))[0])
        return step_parts(self._facts, int(self._starts[step]), int(self._ends[step]))


def _verdict(
    found: list[Difference], tested: Significance, delta_ns: int, has_steps: tuple[bool, bool]
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and why it is not "faster" or "slower"."""
    prevented = tuple(each.text for each in found if each.prevents)
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
    for key in before.keys() | after.keys():
        one, two = before.get(key, _NOTHING), after.get(key, _NOTHING)
        parts.append(Part(*key, one.ns, two.ns, one.calls, two.calls))
    return tuple(
        sorted(parts, key=lambda part: (-abs(part.ns), part.kind, part.region, part.operator, part.kernel))
    )


def _without(findings: list[Finding], others: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings whose rule and place the others lack."""
    known = set(map(_rule_and_place, others))
    return tuple(each for each in findings if _rule_and_place(each) not in known)


def _rule_and_place(found: Finding) -> tuple[str, ...]:
    """Return what identifies a finding in both recordings: a DataLoader is the same with and without workers."""
    return found.rule, *(_LOADER.sub("", str(part)) for part in found.where._replace(step=None, rank=None))


def as_dict(change: Comparison) -> dict[str, Any]:
    """Return a comparison as a dict of JSON values.

    ``verdict``, ``before_ns``, ``after_ns``, ``delta_ns``, ``relative``, ``p_value``, ``detectable``, ``reasons``,
    ``notes`` and ``steps`` are attributes of `Comparison`. ``before`` and ``after`` are the paths. ``kinds`` are
    the differences by kind, each with ``ns`` and ``definition``; ``parts`` are all parts with the attributes of
    `Part` and their ``ns`` and ``change``. Both add up to ``delta_ns``. ``gone`` and ``new`` are findings, each
    with ``rule``, ``title`` and ``where``.
    """
    return {
        "verdict": change.verdict,
        "before": change.before.path,
        "after": change.after.path,
        "before_ns": change.before_ns,
        "after_ns": change.after_ns,
        "delta_ns": change.delta_ns,
        "relative": change.relative,
        "p_value": change.p_value,
        "detectable": change.detectable,
        "reasons": list(change.reasons),
        "notes": list(change.notes),
        "steps": list(change.steps),
        "kinds": {kind: {"ns": ns, "definition": KINDS[kind]} for kind, ns in change.by_kind().items()},
        "parts": [
            {**vars(part), "region": list(part.region), "ns": part.ns, "change": part.change}
            for part in change.parts
        ],
        **{
            name: [{"rule": each.rule, "title": each.title, "where": str(each.where)} for each in findings]
            for name, findings in (("gone", change.gone), ("new", change.new))
        },
    }
