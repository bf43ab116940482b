"""`Counts`: what the steps of a dry run do on the GPU, in integers that are the same on every machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .calls import CallRecord
from .compilation import Compiled
from .step_counts import Prices, StepCounts, step_counts
from .text import lines

VERSION = 1


@dataclass(frozen=True)
class Counts:
    """What the steps of a dry run do on the GPU; print it, or read its attributes.

    Attributes:
        first: the first step, with what comes before it since the run or its optimizer began.
        step: a typical later step: the earliest of those that most later steps equal in operators and tensors. If
            there is a single step, that one.
        steps: the number of steps.
        compiled: what torch.compile did in the run.
        record: all operators in order, with their places.
    """

    first: StepCounts
    step: StepCounts
    steps: int
    compiled: Compiled
    record: CallRecord = field(repr=False, compare=False)

    def to_json(self) -> str:
        """Return the counts as JSON; while ``version`` is 1, keys are only added."""
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a dict of JSON values."""
        return {
            "version": VERSION, "steps": self.steps, "step": self.step.as_dict(), "first": self.first.as_dict(),
            "compiled": self.compiled.as_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(lines(self.step, self.first, self.steps, [*self.compiled.lines()]))


def counts_of(
    record: CallRecord, steps: int, synchronizations: Callable[[int], int], compiled: Compiled
) -> Counts:
    """Return the counts of a run.

    Args:
        record: what it called.
        steps: the number of its steps; at least 1.
        synchronizations: returns how often the CPU waits in the step with a number.
        compiled: what torch.compile did.
    """
    spans = {number: record.step(number) for number in range(1, steps + 1)}
    later = {number: span for number, span in spans.items() if number > 1}
    alike = _alike(record)
    work = {number: alike[span.call].tobytes() for number, span in later.items()}
    usual = Counter(work.values()).most_common(1)
    typical = next((number for number, done in work.items() if done == usual[0][0]), 1)
    prices = Prices()
    first, step = (
        step_counts(number, spans[number], prices, synchronizations(number), compiled.in_step(number))
        for number in (1, typical)
    )
    return Counts(first, step, steps, compiled, record)


def _alike(record: CallRecord) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a number for each call, the same for those that differ only in scalars, as in Adam's bias."""
    kinds: dict[Any, int] = {}
    numbers = [
        kinds.setdefault((call.operator, tuple(call.tensors), call.results), len(kinds)) for call in record.calls
    ]
    return np.array(numbers, np.int32)
