"""What is said of the durations of steps."""

from __future__ import annotations

from itertools import count

import pytest

from instrument.report.step_times import headline, step_times
from instrument.traces.summary import Summary, Timing, merge

MS = 1_000_000


def summary(*times_ms: float, first: int = 2, timing: Timing | None = None) -> Summary:
    times = tuple(int(ms * MS) for ms in times_ms)
    numbers = tuple(number for number, _ in zip(count(first), times, strict=False))
    known = (timing,) if timing else ()
    return Summary(len(times), sum(times), (), (), None, None, times, numbers, timing=known)


def test_few_steps_are_listed() -> None:
    """Each with its time, in one unit; the mean is that of the tables."""
    recorded = summary(80, 214, 83, first=10)
    assert headline(recorded) == "Where the step went: 126 ms (mean of steps 10-12)"
    assert next(step_times(recorded)) == "Steps 10-12: 80.0, 214, 83.0 ms (median 83.0 ms)"


def test_one_step() -> None:
    """There is nothing to compare it with."""
    assert headline(summary(80)) == "Where the step went: 80.0 ms (step 2)"
    assert list(step_times(summary(80))) == []


def test_many_steps_have_a_range() -> None:
    """More than ten are not listed."""
    (text,) = step_times(summary(*[5, 7] * 6, 6))
    assert text == "Steps 2-14: median 6.00 ms, from 5.00 ms to 7.00 ms"


def test_a_step_that_is_far_from_the_others() -> None:
    """It is named, with its share of the time."""
    _, far = step_times(summary(5.8, 3.2, 104.3, 3.8, 3.6, 3.5))
    assert far == "Step 4 took 104 ms, 84.0 % of the time in the table below; the others took 3.60 ms (median)."
    _, far = step_times(summary(10, 50))
    assert far == "Step 3 took 50.0 ms, 83.3 % of the time in the table below; the other took 10.0 ms."
    _, far = step_times(summary(10, 50, 10, 50, 10, 11))
    others = "the others took 10.0 ms (median)."
    assert far == f"Steps 3, 5 took 50.0, 50.0 ms, 70.9 % of the time in the table below; {others}"
    _, far = step_times(summary(1, 20, 400, 8000))
    assert far == "The steps differ widely: few of them are like the mean."


@pytest.mark.parametrize(
    ("around_ms", "said"),
    [
        (3.5, "about as long (within 25 %), so they are typical."),
        (1.8, "the recorded ones took 2.0 times as long, in part because they were recorded."),
        (36, "so they are not typical."),
    ],
)
def test_whether_they_are_typical(around_ms: float, said: str) -> None:
    """The steps around them, which were not recorded, are what they are compared with."""
    timing = Timing(int(around_ms * MS), ((0, 19), (23, 42)), 240, 2_400 * MS)
    *_, share, typical = step_times(summary(3.6, 3.6, 3.6, timing=timing))
    assert share == "Recorded: 3 of the 240 steps run so far, 0.5 % of 2.40 s"
    assert typical.startswith("The 40 steps around them took ")
    assert typical.endswith(said)


def test_own_work() -> None:
    """The time that the library took inside windows is given, where it took some."""
    windows = [summary(3, 3, timing=Timing(3 * MS, ((0, 19),), 22, 66 * MS, own_ns)) for own_ns in (40 * MS, 0)]
    said = "While recording, the library itself worked for 40.0 ms"
    assert 1 == sum(said in text for text in step_times(merge(windows)))
    assert not any("itself" in text for text in step_times(windows[1]))


def test_too_few_steps_around_say_nothing() -> None:
    """Two steps, or none, are no measure."""
    for timing in (Timing(MS, ((0, 1),), 5, 9 * MS), Timing(None, (), 5, 9 * MS)):
        assert not any("around" in text for text in step_times(summary(3, 3, timing=timing)))


def test_several_windows() -> None:
    """Their steps are named, the run is as long as the last says, and a step around both counts once."""
    first = summary(3, 3, timing=Timing(3 * MS, ((0, 1), (4, 7)), 8, 66 * MS))
    second = summary(3, 3, first=8, timing=Timing(3 * MS, ((1, 1), (4, 7), (10, 19)), 30, 90 * MS))
    said = list(step_times(merge([first, second])))
    assert said[0] == "Steps 2-3, 8-9: 3.00, 3.00, 3.00, 3.00 ms (median 3.00 ms)"
    assert said[1] == "Recorded: 4 of the 30 steps run so far, 13.3 % of 90.0 ms"
    assert said[2].startswith("The 16 steps around them took 3.00 ms")


def test_a_window_that_was_cut() -> None:
    """It is said how many of its steps are missing and why, until a later part of the window has them."""
    cut = {"planned_steps": (2, 4), "cut": "the loop ended before step 4"}
    first = summary(3, 3, timing=Timing(None, (), 4, 9 * MS, **cut))
    said = "Recorded so far: 2 of the 3 steps 2-4, as the loop ended before step 4."
    assert said in list(step_times(first))
    rest = summary(3, first=4, timing=Timing(None, (), 5, 12 * MS, planned_steps=(2, 4)))
    assert not any("so far:" in text for text in step_times(merge([first, rest])))


def test_steps_without_numbers() -> None:
    """Those of several processes, or of a profiler that does not number them, are counted."""
    twice = merge([summary(3), summary(4)])
    assert headline(twice) == "Where the step went: 3.50 ms (mean of 2 steps)"


@pytest.mark.parametrize("entry", [None, {}, {"timing": None}, {"timing": []}, {"timing": {"run_steps": "x"}}])
def test_timing_of_any_line(entry: object) -> None:
    """A line of the manifest that has no timing, or another one, is none."""
    assert Timing.of(entry) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 7, "x", [7], [[1]], [["a", 2]], [[0, 1, 2]]])
def test_timing_of_a_damaged_line(wrong: object) -> None:
    """What is damaged in a line is left out."""
    timing = {"run_steps": 3, "run_ns": 9, "around_ns": wrong, "around_steps": wrong}
    found = Timing.of({"timing": timing, "planned_steps": wrong, "status": wrong, "reason": wrong})
    assert found == Timing(7 if wrong == 7 else None, (), 3, 9)
