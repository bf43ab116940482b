"""`what_if`: predicts by a replay how long a step would be with what a user wants changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...base.units import counted, duration
from .critical_path import CLASSES, CriticalPath, critical_path
from .replay import Replayer, mean_ns
from .requests import NOTHING, Fixed, Request, joined


@dataclass(frozen=True)
class WhatIf:
    r"""The step as it would be with a change; as text, one sentence.

    Attributes:
        change: the change in words; empty without one.
        before_ns: the recorded length of a step in ns: the mean.
        step_ns: the predicted length in ns: the mean; None if the prediction abstains.
        self_error: the error of the replay without a change: the median over the steps of
            \|replayed - recorded\| / recorded. None if nothing can be replayed.
        max_error: the maximum over the steps.
        steps: the number of steps; 1 without steps, as the whole trace then counts as one.
        has_steps: whether the trace has steps.
        abstained: what prevents a prediction; None if one was made.
        critical_path: what determines the length of the steps with the change; None if the prediction abstains.
    """

    change: str
    before_ns: int
    step_ns: int | None
    self_error: float | None
    max_error: float | None
    steps: int
    has_steps: bool
    abstained: str | None = None
    critical_path: CriticalPath | None = field(default=None, repr=False)

    @property
    def win_ns(self) -> int | None:
        """How much shorter a step becomes, in ns; negative if it becomes longer, None without a prediction."""
        return None if self.step_ns is None else self.before_ns - self.step_ns

    def __str__(self) -> str:
        if self.step_ns is None:
            return f"No prediction: {self.abstained}."
        if not self.change:
            if not self.has_steps:
                return f"The whole trace, which has no steps, takes {duration(self.before_ns)}."
            return f"A step takes {duration(self.before_ns)} (mean of {counted(self.steps, 'step')})."
        change = 100 * (self.step_ns / self.before_ns - 1) if self.before_ns else 0.0
        what = "a step" if self.has_steps else "the whole trace"
        return (
            f"{self.change[0].upper()}{self.change[1:]}, {what} would take {duration(self.step_ns)} instead of "
            f"{duration(self.before_ns)} ({change:+.1f} %)."
        )

    def to_json(self) -> str:
        """Return the prediction as JSON text; see `as_dict` for its keys."""
        return json.dumps(as_dict(self), indent=2, allow_nan=False)


def what_if(replayer: Replayer, request: Request = NOTHING, fixed: Fixed | None = None) -> WhatIf:
    """Return the step as it would be with a change.

    The trace is replayed: each event happens as soon as what it waits for is done. The CPU's own work, the
    durations of GPU work, and the delays of launches, streams and synchronizations are those of the trace. First
    the trace is replayed without the change: if that is over 5 % off, the prediction abstains.

    Args:
        replayer: the replayer of the trace.
        request: what is changed.
        fixed: returns the removal of what a rule finds, by its name.

    Raises:
        TypeError: a value has another type.
        ValueError: a word is not one of those that are accepted, or the trace has no such thing.
    """
    changes = [*request.changes(replayer, fixed)]
    before = mean_ns(replayer.recorded_ns)
    if not replayer.has_cpu:
        return WhatIf("", before, None, None, None, 1, has_steps=False, abstained=replayer.abstained)
    errors, words = replayer.errors, ", ".join(said for said, _ in changes)
    figures = float(np.median(errors)), float(errors.max()), len(errors), bool(replayer.trace.steps)
    if replayer.abstained:
        return WhatIf(words, before, None, *figures, replayer.abstained)
    change = joined(each for _, each in changes)
    return WhatIf(words, before, replayer.step_ns(change), *figures, None, critical_path(replayer, change))


_NUMBERS = (
    "change", "before_ns", "step_ns", "win_ns", "self_error", "max_error", "steps", "has_steps", "abstained",
)  # fmt: skip


def as_dict(guess: WhatIf) -> dict[str, Any]:
    """Return a prediction as a dict of JSON values.

    ``change``, ``before_ns``, ``step_ns``, ``win_ns``, ``self_error``, ``max_error``, ``steps``, ``has_steps`` and
    ``abstained`` are the attributes of `WhatIf`. ``critical_path`` is null, or has ``total_ns`` (of all steps),
    ``classes`` (each with its ``ns`` and ``definition``), ``parts`` (each ``region`` and ``class`` with its
    ``ns``), which both add up to ``total_ns``, and ``off_path`` (each name of GPU work that is never on it, with
    the ``ns`` of its durations and its least ``slack_ns``).
    """
    path = guess.critical_path
    return {
        **{name: getattr(guess, name) for name in _NUMBERS},
        "critical_path": path
        and {
            "total_ns": path.total_ns,
            "classes": {kind: {"ns": ns, "definition": CLASSES[kind]} for kind, ns in path.by_class().items()},
            "parts": [
                {"region": region, "class": kind, "ns": ns} for (region, kind), ns in path.by_region().items()
            ],
            "off_path": [
                {"name": work.name, "ns": work.duration_ns, "slack_ns": work.slack_ns} for work in path.off_path
            ],
        },
    }
