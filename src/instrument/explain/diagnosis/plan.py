"""`Plan`: what to change first, what each change wins after those before it, and what bounds the step then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...base.findings import Finding
from ...base.units import duration
from ..replay.replay import Change, Replayer, mean_ns
from ..replay.requests import Request, joined
from ..replay.step_waits import step_waits
from ..rules.rule import fix_of
from ..rules.trace_facts import TraceFacts
from .verdict import Bound, bound_of

_ROWS = 6
_WORTH = 0.01  # of the recorded step: a smaller win ends the plan
_CHEAPER_CPU = "--launch 0.1x"


class PlanRow(NamedTuple):
    """One change of a plan.

    Attributes:
        change: the change as ``instrument whatif`` takes it, such as "--workers 4".
        text: the change in words, such as "with 4 workers".
        before_ns: the length of a step without it, with the changes of the rows before.
        step_ns: the length of a step with it.
        bound: what bounds the step then; None if no class of work alone does, or it is not known.
    """

    change: str
    text: str
    before_ns: int
    step_ns: int
    bound: Bound | None


@dataclass(frozen=True)
class Plan:
    """Which changes to make, the one that wins most first; as text, a line for each.

    Attributes:
        rows: the changes; at most six, each of which wins 1 % of the recorded step.
        recorded_ns: the recorded length of a step.
        self_error: the error of the replay without a change, as in `WhatIf`; None if nothing can be replayed.
        abstained: the reason why no plan could be made; None if one was made.
    """

    rows: tuple[PlanRow, ...] = ()
    recorded_ns: int = 0
    self_error: float | None = None
    abstained: str | None = None

    @property
    def words(self) -> str:
        """All changes as ``instrument whatif`` takes them."""
        return " ".join(row.change for row in self.rows)

    def __str__(self) -> str:
        if self.abstained:
            return f"No plan: {self.abstained}."
        if not self.rows:
            return "No plan: no change that is known here would win 1 % of the step."
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield a line for each row."""
        for number, row in enumerate(self.rows, 1):
            then = f"then bound by {row.bound}" if row.bound else "then no single bound"
            change = f"{duration(row.before_ns)} -> {duration(row.step_ns)}"
            yield f"{number}. {row.text}: {change}; {then} ({row.change})"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON values: its attributes, and ``whatif`` with all changes."""
        return {
            "rows": [row._asdict() for row in self.rows],
            "recorded_ns": self.recorded_ns,
            "self_error": self.self_error,
            "abstained": self.abstained,
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
    while left and len(rows) < _ROWS:
        words, after_ns = _best(replayer, made, step_ns, left)
        if step_ns - after_ns < _WORTH * recorded_ns:
            break
        made |= left.pop(words)
        named = step_waits(replayer, made).bounds(after_ns)
        bound = bound_of(facts, named[0]) if named else None
        rows.append(PlanRow(words, texts[words], step_ns, after_ns, bound))
        step_ns = after_ns
    return Plan(tuple(rows), recorded_ns, float(np.median(replayer.errors)))


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
