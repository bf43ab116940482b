"""The longest gaps during which no GPU works, each with its cause and what ends it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..findings import Where
from .idle_causes import CAUSES
from .trace_facts import TraceFacts

_LISTED = 10
_LEAST = 0.001  # of the step


class IdleGap(NamedTuple):
    """A gap.

    Attributes:
        start_ns: when it begins, from the start of the window.
        duration_ns: how long it lasts.
        cause: the one of `instrument.diagnosis.idle_causes.CAUSES` that holds for most of it.
        where: the place of the call that launches the work after it, which is ``kernel``.
    """

    start_ns: int
    duration_ns: int
    cause: str
    where: Where


def longest_gaps(facts: TraceFacts) -> tuple[IdleGap, ...]:
    """Return the longest gaps of the window, at most ten, without those below a thousandth of a step."""
    idle, gpu = facts.idle, facts.gpu
    length = idle.end_ns - idle.start_ns
    order = np.argsort(-length, kind="stable")[:_LISTED]
    order = order[length[order] >= _LEAST * facts.step_ns]
    if not len(order):
        return ()
    causes = np.stack([idle.by_cause[cause][order] for cause in CAUSES])
    most = np.argmax(causes, axis=0)
    following = np.searchsorted(gpu.start_ns, idle.end_ns[order])
    known = np.append(np.arange(len(gpu)), -1)[np.minimum(following, len(gpu))]
    places = facts.places_of(np.append(gpu.launch, -1)[known])
    gaps = []
    for gap, cause, row, where in zip(order.tolist(), most.tolist(), known.tolist(), places, strict=True):
        step = int(gpu.step[row]) if row >= 0 else -1
        where = where._replace(
            kernel=gpu.strings[gpu.short_name[row]] or gpu.strings[gpu.name[row]] if row >= 0 else "",
            step=int(facts.trace.steps.number[step]) if step >= 0 else None,
        )
        start = int(idle.start_ns[gap]) - facts.window[0]
        gaps.append(IdleGap(start, int(length[gap]), list(CAUSES)[cause], where))
    return tuple(gaps)
