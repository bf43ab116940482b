"""`cpu_verdict`: what bounds the steps of a program that uses no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .cpu_step import cpu_parts
from .idle_causes import INPUT
from .region_times import outermost_regions
from .trace_facts import TraceFacts

CpuBound = Literal["input", "communication", "compute", "overhead"]
_LEAST = 1 / 3  # of the step: a smaller part does not bound it
_LEAST_REGION = 0.1  # of the step: a smaller one explains nothing
_BOUND_BY: dict[CpuBound, str] = {
    "input": "The DataLoader bounds the step: the loop waits for it for",
    "communication": "Communication bounds the step: collectives take",
    "compute": "Operators on the CPU bound the step: they run for",
    "overhead": "Python bounds the step: no operator runs for",
}


def uses_no_gpu(facts: TraceFacts) -> bool:
    """Return whether a trace is of a program without a GPU, with operators; not one whose GPU work is lost."""
    trace = facts.trace
    return (
        bool(trace.operators) and not (trace.gpu or trace.runtime or trace.unread_devices) and facts.window_ns > 0
    )


def cpu_verdict(facts: TraceFacts, what: str) -> tuple[CpuBound | None, str, Mapping[str, int]]:
    """Return the part that bounds the steps of a program without a GPU, the verdict, and the parts per step.

    Args:
        facts: what the trace says.
        what: the steps in words, such as "3 steps of 50.4 ms each".
    """
    parts = cpu_parts(facts.trace, facts.window)
    largest = max(_BOUND_BY, key=lambda name: parts[name])
    share = parts[largest] / facts.window_ns
    bound = largest if share >= _LEAST else None
    said = _BOUND_BY[bound] if bound else f"No clear bound: the largest part, {largest}, is"
    text = f"{said} {100 * share:.0f} % of {what}"
    regions = [region for region in outermost_regions(facts) if not INPUT.search(region.name)]
    part = regions[0].cpu_ns / facts.step_ns if regions else 0.0
    if largest in ("compute", "overhead") and _LEAST_REGION <= part <= 1:
        text += f"; the largest region is {regions[0].name}, with {100 * part:.0f} %"
    elif largest in ("compute", "overhead") and part < _LEAST_REGION:
        text += ", most of it in no region: name its parts with instrument.annotate"
    per_step = {name: facts.per_step(ns) for name, ns in parts.items()}
    return bound, f"{text}. No GPU is used.", per_step
