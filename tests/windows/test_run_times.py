"""Tests of `RunTimes`: a profile times every step of its run, and writes it into the manifest."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.config import settings
from instrument.base.run_folder import RUNS, entries_of
from instrument.base.run_lengths import BLOCK, RunLengths
from instrument.record.windows import run_times, schedule_follower
from instrument.record.windows.outcomes import Outcomes
from instrument.record.windows.run_times import RunTimes

from .training import Recorder, manifest


class Clock:
    """A clock that the steps of a loop advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        for module in (schedule_follower, run_times):
            monkeypatch.setattr(module, "perf_counter_ns", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def profile(out: Path, at: str = "2-4", **arguments: Any) -> Any:
    return instrument.profile(out, schedule=instrument.schedule(at), exporter=Recorder(), **arguments)


def take_steps(prof: Any, clock: Clock, steps: int, took: Callable[[int], int]) -> None:
    for _ in range(steps):
        clock.now += took(prof.step_num)
        prof.step()


def lengths_of_run(out: Path) -> RunLengths:
    (line,) = map(json.loads, (out / RUNS).read_text().splitlines())
    lengths = RunLengths.from_json(line["lengths"])
    assert lengths is not None
    return lengths


def test_every_step_counts_once(out: Path, clock: Clock) -> None:
    """The manifest of a run says which steps were slow, which of them were recorded, and all of the time."""
    with profile(out, "20-26") as prof:
        take_steps(prof, clock, 100, lambda step: 900 if step % 25 == 0 else 100)
        clock.now += 70
    lengths = lengths_of_run(out)
    assert ((25, 900), (50, 900), (75, 900)) == lengths.slow
    assert (25,) == lengths.recorded
    assert (96, 9_600, 100) == (lengths.typical_steps, lengths.typical_ns, lengths.usual_ns)
    assert (3, 2_700) == (lengths.slow_steps, lengths.slow_ns)
    assert (900, 70) == (lengths.start_ns, lengths.end_ns)


def test_a_long_run_adds_up(out: Path, clock: Clock) -> None:
    """Over many blocks no step is lost, and the last slow steps keep their numbers."""
    steps = 5 * BLOCK + 7
    with profile(out) as prof:
        take_steps(prof, clock, steps, lambda step: 1_000 if step % 10 == 9 else 100 + step % 3)
    lengths = lengths_of_run(out)
    assert steps - 1 == lengths.steps
    assert clock.now - 1_000 == lengths.start_ns + lengths.loop_ns
    assert len(range(9, steps, 10)) == lengths.slow_steps
    assert {9} == {number % 10 for number, _ in lengths.slow}
    assert steps - 10 < lengths.slow[-1][0] < steps


def test_memory_does_not_grow() -> None:
    """A hundred thousand steps, a tenth of them slow, take no memory of their own."""
    times = RunTimes()

    def step(first: int, last: int) -> None:
        for number in range(first, last):
            times.end_step(number * 100 + 1_000 * (number % 10 == 0))
            if not number % BLOCK:
                times.fold(number)

    times.begin()
    step(1, 10_000)
    tracemalloc.start()
    step(10_000, 110_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 200_000


def test_the_first_steps_of_epochs(out: Path, clock: Clock) -> None:
    """Each loop over `instrument.steps` begins an epoch; stalls there are said to be at its first step."""
    for _ in range(5):
        loop = instrument.steps(range(6), out, at="2", exporter=Recorder())
        for item in loop:
            clock.now += 100 if item else 900
    loop.profile.stop()
    lengths = lengths_of_run(out)
    assert (0, 6, 12, 18, 24) == lengths.epochs
    assert "every 6th step, the first of each epoch," in next(lengths.sentences())


def test_a_phase_beside_the_steps(clock: Clock) -> None:
    """A phase on another thread, during which steps end, is part of them: no step gets shorter."""
    times = RunTimes()
    times.begin()
    for step in range(1, 40):
        clock.now += 100
        times.end_step(clock.now)
        if step == 10:
            times.enter_phase()
        if step == 30:
            times.leave_phase()
    lengths = times.lengths(40)
    assert (100, 38, 3_800, 0) == (
        lengths.usual_ns, lengths.typical_steps, lengths.typical_ns, lengths.phases_ns
    )  # fmt: skip


def test_time_outside_of_steps(out: Path, clock: Clock) -> None:
    """Time between two loops and in a phase belongs to no step."""

    def body(step: int) -> None:
        clock.now += 100
        if step == 10:
            with loop.profile.phase("eval"):
                clock.now += 5_000

    items = list(range(12))
    for _ in range(2):
        loop = instrument.steps(items, out, at="2", exporter=Recorder())
        for item in loop:
            body(item)
        clock.now += 3_000
    loop.profile.stop()
    lengths = lengths_of_run(out)
    assert (22 + 1, 0) == (lengths.steps, lengths.slow_steps)
    assert (3_000, 10_000, 3_000) == (lengths.between_ns, lengths.phases_ns, lengths.end_ns)
    assert {100} == {lengths.usual_ns, lengths.start_ns}


def test_what_the_library_does_between_loops(out: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary after a loop is the library's own time, not the program's between two loops."""
    original = Outcomes.report

    def report(outcomes: Outcomes) -> None:
        clock.now += 2_000
        original(outcomes)

    monkeypatch.setattr(Outcomes, "report", report)
    for _ in range(2):
        loop = instrument.steps(range(12), out, at="2", exporter=Recorder())
        for _ in loop:
            clock.now += 100
        clock.now += 300
    loop.profile.stop()
    lengths = lengths_of_run(out)
    assert 300 == lengths.between_ns
    assert lengths.recording_ns >= 4_000


def test_work_of_the_library_is_part_of_no_step(out: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a window takes to open or to close lengthens no step."""
    for name in ("_record_step", "_close_window"):
        original = getattr(schedule_follower.ScheduleFollower, name)

        def slowly(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            clock.now += 1_000_000
            return original(*args, **kwargs)

        monkeypatch.setattr(schedule_follower.ScheduleFollower, name, slowly)
    with profile(out) as prof:
        take_steps(prof, clock, 40, lambda _: 100)
    lengths = lengths_of_run(out)
    assert (39, 3_900, 0) == (lengths.typical_steps, lengths.typical_ns, lengths.slow_steps)
    assert 4_000_000 == lengths.recording_ns


def test_recorded_steps_are_compared_with_each_other(out: Path, clock: Clock) -> None:
    """Steps that the profiler makes longer are not slow; one among them that stalls is."""
    with profile(out, "30-39") as prof:
        take_steps(prof, clock, 60, lambda step: (2_500 if step == 35 else 500) if 30 <= step < 40 else 100)
    lengths = lengths_of_run(out)
    assert ((35, 2_500),) == lengths.slow
    assert 100 == lengths.usual_ns


def test_a_step_that_began_earlier_is_not_timed(out: Path, clock: Clock) -> None:
    """Of a run that begins late, the first timed step is the next one."""
    prof = profile(out, "3", first_step=0)
    prof.start(late=True)
    take_steps(prof, clock, 30, lambda step: 100 if step else 7)
    prof.stop()
    assert (29, 2_900) == (lengths_of_run(out).steps, lengths_of_run(out).typical_ns)


def test_numbers_follow_a_jump(out: Path, clock: Clock) -> None:
    """Slow steps have the numbers that the program gives."""
    with profile(out) as prof:
        take_steps(prof, clock, 20, lambda _: 100)
        clock.now += 100
        prof.step(1_000)
        take_steps(prof, clock, 20, lambda step: 900 if step == 1_010 else 100)
    assert ((1_010, 900),) == lengths_of_run(out).slow


def test_lines_of_windows_tell_the_whole_run(out: Path, clock: Clock) -> None:
    """Readers of a window get the lengths of the whole run, once it has ended."""
    with profile(out) as prof:
        take_steps(prof, clock, 40, lambda _: 100)
        take_steps(prof, clock, 40, lambda _: 300)
    (line,) = manifest(out)
    (entry,) = entries_of(out)
    assert 80 > line["timing"]["lengths"]["typical_steps"]
    assert 79 == entry["timing"]["lengths"]["typical_steps"] + entry["timing"]["lengths"]["slow_steps"]


@pytest.mark.parametrize("steps", [12, 40])
def test_the_end_of_a_run_says_where_its_time_is(
    out: Path, clock: Clock, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An even loop gets one sentence, a very short one none."""
    monkeypatch.setattr(settings, "summary", True)
    said: list[str] = []
    with profile(out, on_summary=said.append) as prof:
        take_steps(prof, clock, steps, lambda _: 100)
    expected = "instrument: 39 steps in 3.90 us: 100 % in typical steps of 100 ns\n"
    assert [expected] * (steps > 16) == [text for text in said if "steps in" in text]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_writes_nothing(out: Path, clock: Clock) -> None:
    """A child process that inherits a running profile leaves the manifest alone."""
    with profile(out) as prof:
        take_steps(prof, clock, 30, lambda _: 100)
        child = os.fork()
        if child == 0:
            take_steps(prof, clock, 3 * BLOCK, lambda _: 100)
            prof.stop()
            os._exit(0)
        os.waitpid(child, 0)
    assert 29 == lengths_of_run(out).steps


def test_a_process_knows_its_age() -> None:
    """The time before the first step is that since the process started, where the system says it."""
    age_ns = run_times._process_age_ns()
    assert 0 < age_ns < 24 * 3600 * 10**9 if sys.platform == "linux" else age_ns >= 0
