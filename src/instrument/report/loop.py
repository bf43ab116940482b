"""Says what bounds the loop, the CPU or the GPU, and how far the CPU ran ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ..traces.step_lengths import StepLengths
from ..units import duration, percent

_LITTLE = 0.01  # of a step: not worth a word
_MUCH = 0.1  # of a step: worth one where it is communication
_WINDOW = "of {} time after the first step"  # from the end of that one, or of its work on the GPU, on


def describe_loop(lengths: StepLengths) -> Iterator[str]:
    """Yield what bounds the loop, or why that is not known, and what says so."""
    totals = lengths.totals
    idle, waits = percent(totals.gpu_waits_ns, totals.gpu_ns), percent(totals.cpu_waits_ns, totals.cpu_ns)
    if lengths.bound == "gpu":
        queue = " (in launches, because the GPU's queue was full)" * (
            2 * totals.queue_waits_ns > totals.cpu_waits_ns
        )
        waited = f", and waited for it {waits} % {_WINDOW.format('its')}{queue}"
        waited *= totals.cpu_waits_ns > _LITTLE * totals.cpu_ns
        comm = totals.exposed_comm_ns
        bounds = "Communication" if 2 * comm > totals.gpu_ns else "The GPU"
        share = f", {percent(comm, totals.gpu_ns)} % of it exposed communication" * (comm > _MUCH * totals.gpu_ns)
        yield f"{bounds} bounds the loop: {_step(lengths)}{share}. The CPU {_ahead(lengths)}{waited}."
    elif lengths.bound == "cpu":
        yield (
            f"The CPU bounds the loop: {_step(lengths)}, and the GPU waited for launches "
            f"{idle} % {_WINDOW.format('the')}."
        )
    elif lengths.bound == "both":
        turns = "The loop synchronizes, so that CPU and GPU take turns"
        if not lengths.synchronizes:
            turns = "CPU and GPU bound the loop by turns, as launches at times fill the queue of the GPU"
        yield (
            f"{turns}: {_step(lengths)}; the GPU waited for launches {idle} %, the CPU for the GPU {waits} % "
            f"{_WINDOW.format('their')}."
        )
    else:
        ahead = f" The CPU {_ahead(lengths)}." if lengths.run_ahead_ns else ""
        yield f"Whether the CPU or the GPU bounds the loop is not known: {lengths.unknown}.{ahead}"
        if lengths.synchronized_step_ns is not None:
            yield f"Between synchronizations {_took(lengths.synchronized_step_ns)}."


def _step(lengths: StepLengths) -> str:
    """How long a step takes, and by what clock."""
    step_ns = lengths.step_ns or 0
    if lengths.clock == "synchronizations":
        return f"{_took(step_ns)} of wall time between synchronizations"
    if lengths.clock == "cpu":
        return f"{_took(step_ns)} there"
    spans = [step.gpu_ns for step in lengths.steps if step.gpu_ns is not None]
    overlap = " (their work overlaps)" * (sum(spans) > 1.1 * step_ns * len(spans))
    return f"on the GPU a step ended every {duration(step_ns)}{overlap}"


def _took(ns: float) -> str:
    return f"a step took {duration(ns)}"


def _ahead(lengths: StepLengths) -> str:
    """How far the CPU ran ahead at the end of a step, at most."""
    _, most = lengths.run_ahead_ns or (0, 0)
    step_ns = lengths.gpu_step_ns
    if most <= _LITTLE * (step_ns or 0):
        return "did not run ahead"
    return f"ran up to {duration(most)}" + (f" ({most / step_ns:.1f} steps)" if step_ns else "") + " ahead"
