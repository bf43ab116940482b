"""`Plan`: what to change first, what each change wins after those before it, and what bounds the step then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ...base.findings import Finding
from ...base.units import duration, percentage
from ...read.tables.table import KERNEL
from ..replay.replay import Change, Replayer, mean_ns
from ..replay.requests import Request, joined
from ..replay.step_waits import step_waits
from ..rules.rule import fix_of
from ..rules.trace_facts import TraceFacts
from .verdict import Bound, bound_of

_ROWS = 6
_WORTH = 0.01  # of the recorded step: a smaller win ends the plan
_CHEAPER_CPU = "--launch 0.1x"
PlanBound = Bound | Literal["kernels"]


class PlanRow(NamedTuple):
    """One change of a plan.

    Attributes:
        change: the change as ``instrument whatif`` takes it, such as "--workers 4".
        text: the change in words, such as "with 4 workers".
        before_ns: the length of a step without it, with the changes of the rows before.
        step_ns: the length of a step with it.
        bound: what bounds the step then, "kernels" if it is not known whether arithmetic or memory limits them;
            None if no class of work alone does.
    """

    change: str
    text: str
    before_ns: int
    step_ns: int
    bound: PlanBound | None


class PlanEnd(NamedTuple):
    """The step after all changes of a plan; as text, the sentence that ends it.

    Attributes:
        step_ns: its length.
        bound: what bounds it, as in `PlanRow`.
        roofline_ns: how long its kernels would take at the peak of arithmetic or of memory, whichever takes longer
            for each; None if that is known of too few of them.
        gpu: the GPU with these peaks.
    """

    step_ns: int
    bound: PlanBound | None
    roofline_ns: int | None
    gpu: str | None

    @property
    def share(self) -> float | None:
        """``roofline_ns`` / ``step_ns``."""
        return None if self.roofline_ns is None else self.roofline_ns / self.step_ns

    def __str__(self) -> str:
        verb = "bound" if self.bound == "kernels" else "bounds"
        text = f"After that, {self.bound or 'no class of work alone'} {verb} it"
        if self.share is None:
            return f"{text}."
        at_peak = f"the roofline of {self.gpu}, at which its kernels take {duration(self.roofline_ns or 0)}"
        return f"{text}: {duration(self.step_ns)} is {percentage(self.share)} of {at_peak}."


@dataclass(frozen=True)
class Plan:
    """Which changes to make, the one that wins most first; as text, a line for each.

    Attributes:
        rows: the changes; at most six, each of which wins 1 % of the recorded step.
        recorded_ns: the recorded length of a step.
        self_error: the error of the replay without a change, as in `WhatIf`; None if nothing can be replayed.
        abstained: the reason why no plan could be made; None if one was made.
        end: the step after all changes; None without a plan.
    """

    rows: tuple[PlanRow, ...] = ()
    recorded_ns: int = 0
    self_error: float | None = None
    abstained: str | None = None
    end: PlanEnd | None = None

    @property
    def words(self) -> str:
        """All changes as ``instrument whatif`` takes them."""
        return " ".join(row.change for row in self.rows)

    def __str__(self) -> str:
        if self.abstained:
            return f"No plan: {self.abstained}."
        if not self.rows:
            return "No plan: no change that is known here would win 1 % of the step."
        return "\n".join((*self.lines(), str(self.end)))

    def lines(self) -> Iterator[str]:
        """Yield a line for each row."""
        for number, row in enumerate(self.rows, 1):
            then = f"then bound by {row.bound}" if row.bound else "then no single bound"
            change = f"{duration(row.before_ns)} -> {duration(row.step_ns)}"
            yield f"{number}. {row.text}: {change}; {then} ({row.change})"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON values: its attributes, and ``whatif`` with all changes.

        ``end`` has the attributes of `PlanEnd`, ``share`` and ``text``.
        """
        return {
            "rows": [row._asdict() for row in self.rows],
            "recorded_ns": self.recorded_ns,
            "self_error": self.self_error,
            "abstained": self.abstained,
            "end": self.end and {**self.end._asdict(), "share": self.end.share, "text": str(self.end)},
            "whatif": self.words,
        }


def plan_of(facts: TraceFacts, findings: Iterable[Finding]) -> Plan:
    """Return the plan for a trace: in turn, the change that makes the step shortest after those before it.

    What findings name is tried, hidden or not, and last a cheaper CPU as with CUDA graphs: its share of the win
    that another change also brings goes to that other one.

    Args:
        facts: the facts of the trace.
        findings: those of the trace, with the hidden ones.
    """
    replayer = facts.replayer
    if facts.unknown_gpu or replayer.abstained:
        return Plan(abstained=replayer.abstained or facts.unknown_gpu)
    recorded_ns = mean_ns(replayer.recorded_ns)
    texts, left = dict[str, str](), dict[str, Change]()
    for words in dict.fromkeys((*_words(findings, _WORTH * recorded_ns), _CHEAPER_CPU)):
        try:
            changes = [*Request.from_words(words).changes(replayer, partial(fix_of, facts))]
        except ValueError:  # the rule found it with other thresholds only, or before it failed
            continue
        texts[words], left[words] = ", ".join(text for text, _ in changes), joined(change for _, change in changes)
    made, step_ns, rows = Change(), recorded_ns, list[PlanRow]()
    bound = _bound(facts, made, step_ns)
    while left and len(rows) < _ROWS:
        words, after_ns = _best(replayer, made, step_ns, left)
        if step_ns - after_ns < _WORTH * recorded_ns:
            break
        made |= left.pop(words)
        bound = _bound(facts, made, after_ns)
        rows.append(PlanRow(words, texts[words], step_ns, after_ns, bound))
        step_ns = after_ns
    end = PlanEnd(step_ns, bound, *_at_roofline(facts, made, [row.change for row in rows], step_ns))
    return Plan(tuple(rows), recorded_ns, float(np.median(replayer.errors)), end=end)


def _bound(facts: TraceFacts, made: Change, step_ns: int) -> PlanBound | None:
    """Return what bounds a step after a change."""
    named = step_waits(facts.replayer, made).bounds(step_ns)
    return (bound_of(facts, named[0]) or "kernels") if named else None


_KNOWN = 0.8  # of the time of kernels that compute: with less known, nothing is said of the roofline
_OTHER_TYPE = "--fix fp32-matmuls"  # the peak is then that of another type, as many times as high as it wins


def _at_roofline(
    facts: TraceFacts, made: Change, words: Collection[str], step_ns: int
) -> tuple[int | None, str | None]:
    """Return how long the kernels of a step take at the roofline after a change, and the GPU; None if unknown."""
    line, gpu = facts.roofline, facts.gpu
    share = np.array([row.share if row.share and not row.implausible else np.nan for row in line.rows] + [np.nan])
    least_ns = gpu.duration_ns * np.minimum(share[line.of_work], 1)
    computes = ~facts.communication & (gpu.category == KERNEL)
    known = computes & ~np.isnan(least_ns)
    if line.peak is None or gpu.duration_ns[known].sum() < _KNOWN * gpu.duration_ns[computes].sum():
        return None, None
    left = 1 - (np.zeros(len(gpu)) if made.saved is None else np.clip(made.saved[facts.gpu_rows], 0, 1))
    if _OTHER_TYPE in words:
        of_type = fix_of(facts, "fp32-matmuls").saved
        least_ns *= 1 if of_type is None else 1 - of_type[facts.gpu_rows]
    took_ns = facts.per_gpu(float(np.minimum(least_ns, gpu.duration_ns * left)[known].sum()))
    return (took_ns, line.peak.name) if 0 < took_ns <= step_ns else (None, None)


def _best(replayer: Replayer, made: Change, step_ns: int, left: Mapping[str, Change]) -> tuple[str, int]:
    """Return the change after which the step is shortest, and how long it is then.

    A cheaper CPU also shortens what more specific changes do: it comes first only if it wins more after the best
    of them than that one does alone.
    """
    after = {words: replayer.step_ns(made | change) for words, change in left.items()}
    first, *others = sorted(after, key=lambda words: after[words])
    if first != _CHEAPER_CPU or not others:
        return first, after[first]
    best = others[0]
    then = replayer.step_ns(made | left[best] | left[first])
    chosen = first if after[best] - then > step_ns - after[best] else best
    return chosen, after[chosen]


def _words(findings: Iterable[Finding], least_ns: float) -> Iterator[str]:
    """Yield the changes that findings name and that may win so much."""
    for finding in findings:
        if finding.change and max(finding.win_ns or 0, finding.hidden_ns or 0) >= least_ns:
            yield finding.change
