"""The time of a step: one CPU that launches, one GPU that computes, and a range."""

from __future__ import annotations

import pytest

from instrument.forecast.gpus import GPUS
from instrument.forecast.steps import step_time
from instrument.forecast.timeline import LAUNCH_NS, VIEW_NS, StepCall
from instrument.syncs.counting.streams import StreamNote

from .tables import element_wise, measured, table

H100 = GPUS["h100"]
LONG, SHORT = element_wise(1 << 28), element_wise(1 << 20)
VIEW = StepCall(None)
CHECKED = {"factor": 1.25, "error": 0.1, "worst": 0.2, "count": 4}


def test_long_operators_are_bound_by_the_gpu() -> None:
    """The CPU runs ahead: the step is the operators one after the other, after the first launch."""
    found = step_time([StepCall(LONG)] * 10, H100, table("h100"))
    alone = measured("h100", LONG)
    assert found.limit == "gpu"
    assert found.gpu_ns == pytest.approx(10 * alone, rel=0.01)
    assert 0 < found.ns - found.gpu_ns < 2 * LAUNCH_NS


def test_short_operators_are_bound_by_the_cpu() -> None:
    """The step is what the CPU takes to launch them, with the last operator."""
    found = step_time([StepCall(SHORT), VIEW] * 1000, H100, table("h100"))
    assert found.limit == "cpu"
    assert found.ns == pytest.approx(1000 * (LAUNCH_NS + VIEW_NS), rel=0.01)
    assert found.least_ns == pytest.approx(found.ns / 2, rel=0.02)  # other hosts are slower or faster


def test_a_wait_stops_the_cpu_from_running_ahead() -> None:
    """After each wait the GPU idles until the next launch arrives."""
    ahead = step_time([StepCall(LONG)] * 100, H100, table("h100"))
    waits = [StreamNote(position, "synchronize", 0) for position in range(1, 101)]
    waiting = step_time([StepCall(LONG)] * 100, H100, table("h100"), waits)
    assert waiting.ns - ahead.ns >= 99 * LAUNCH_NS


def test_the_range_is_twice_the_errors() -> None:
    """The errors of the family and of whole steps on this GPU add up in squares."""
    found = step_time([StepCall(LONG)] * 10, H100, table("h100", steps=CHECKED | {"factor": 1.0}))
    expected = 2 * (0.03**2 + 0.1**2) ** 0.5 * found.gpu_ns
    assert found.most_ns - found.ns == pytest.approx(expected)
    assert found.ns - found.least_ns == pytest.approx(expected)


def test_steps_that_took_longer_than_their_operators() -> None:
    """The factor of a GPU multiplies what the GPU does."""
    plain, longer = (step_time([StepCall(LONG)], H100, table("h100", steps=each)) for each in (None, CHECKED))
    assert longer.gpu_ns == pytest.approx(1.25 * plain.gpu_ns)


def test_bounds() -> None:
    """A step of which nothing was measured is a bound; its upper end is twice as high."""
    found = step_time([StepCall(LONG)] * 10, GPUS["mi300x"], table("h100"))
    assert found.bound_share == 1.0
    assert found.most_ns > found.ns + found.gpu_ns
    half = step_time([StepCall(LONG), StepCall(element_wise(1 << 28, family="other"))], H100, table("h100"))
    assert 0.4 < half.bound_share < 0.5


def test_families() -> None:
    """The parts of the GPU time, the longest first, add up."""
    calls = [StepCall(SHORT), StepCall(LONG._replace(family="copy"))]
    found = step_time(calls, H100, table("h100"))
    assert list(found.by_family) == ["copy", "element-wise"]
    assert sum(found.by_family.values()) == pytest.approx(found.gpu_ns)


def test_nothing_to_do() -> None:
    """A step without operators takes no time."""
    found = step_time([], H100, table("h100"))
    assert (found.ns, found.gpu_ns, found.bound_share) == (0, 0, 0)
