"""Tests of the timing of steps: the library times the steps around windows, and only these."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import instrument
from instrument.base.config import settings
from instrument.base.run_folder import entry_of
from instrument.integrations.server import OnDemandSchedule
from instrument.record.windows import timing
from instrument.record.windows.profile import Profile
from instrument.record.windows.timing import AROUND, WindowTiming

from .training import Recorder, content, manifest, traces, train


class Clock:
    """A clock that the steps of a loop advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: self.now)


def run(out: Path, clock: Clock, steps: int, took: Any, **arguments: Any) -> Any:
    with instrument.profile(out, exporter=Recorder(), **arguments) as prof:
        for number in range(steps):
            clock.now += took(number)
            prof.step()
    return prof


def test_medians_and_the_share_of_the_run(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest has the medians of the recorded and the surrounding steps, and the run's length so far."""
    clock = Clock(monkeypatch)
    schedule = instrument.schedule("50-52", warmup=2)

    def took(number: int) -> int:
        return 300 if number in (50, 51, 52) else 9_000 if number in (48, 49) else 100 + number

    prof = run(out, clock, 200, took, schedule=schedule)
    around = [100 + number for number in (*range(48 - AROUND, 48), *range(53, 53 + AROUND))]
    timing = prof.windows[0]["timing"]
    assert {name: value for name, value in timing.items() if name != "lengths"} == {
        "recorded_ns": 300,
        "around_ns": int(sorted(around)[AROUND - 1] + sorted(around)[AROUND]) // 2,
        "around_each_ns": around,
        "around_steps": [[48 - AROUND, 47], [53, 52 + AROUND]],
        "own_ns": 0,
        "run_steps": 53 + AROUND,
        "untimed_steps": None,
        "run_ns": sum(map(took, range(53 + AROUND))),
    }


def test_only_steps_around_windows_are_timed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from a window, `step` only compares numbers and does not enter the slow path, but at the first step."""
    slow_steps = set[int]()
    clock = Clock(monkeypatch)

    def noted(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_back is not None and frame.f_back.f_code is Profile.step.__code__:
            slow_steps.add(clock.now)  # the number of the step, as each takes 1 ns

    sys.setprofile(noted)
    try:
        run(out, clock, 500, lambda _: 1, schedule=instrument.schedule("100,300"))
    finally:
        sys.setprofile(None)
    assert sorted(slow_steps) == [1, *range(100 - AROUND, 102 + AROUND), *range(300 - AROUND, 302 + AROUND)]


def test_three_long_steps_are_enough(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a slow loop, the window's line is written after three more steps."""
    prof = run(out, Clock(monkeypatch), 30, lambda _: 2 * 10**9, schedule=instrument.schedule("1"))
    assert prof.windows[0]["timing"]["around_steps"] == [[2, 4]]
    assert prof.windows[0]["timing"]["run_steps"] == 2 + 3


@pytest.mark.parametrize("on_demand", [False, True])
def test_plans_without_a_known_next_window(out: Path, monkeypatch: pytest.MonkeyPatch, on_demand: bool) -> None:
    """With functions and windows on demand, a limited number of steps after a window is timed too."""
    plan: Any = OnDemandSchedule(0, 1) if on_demand else lambda step: 3 * (step == 30)

    def took(number: int) -> int:
        if on_demand and number == 29:
            plan.request("start")
        return 100 + number

    prof = run(out, Clock(monkeypatch), 500, took, schedule=plan)
    (timing,) = (entry["timing"] for entry in prof.windows if entry["status"] == "recorded")
    assert [[30 - AROUND, 29], [31, 30 + AROUND]] == timing["around_steps"]
    assert 31 + AROUND == timing["run_steps"]


def test_no_more_steps_are_kept_than_are_shown() -> None:
    """While nothing is written, as after the last planned window, the times of later steps are not kept."""
    times = WindowTiming()
    times.start(0)
    times.open()
    times.close(0)
    for number in range(1, 500):
        times.begin(number, recording=False)
        times.end()
    assert AROUND == len(times.timing(500)["around_each_ns"])


def test_the_first_step_is_not_compared(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, also of a resumed run, counts for the run but not for the steps around a window."""
    for first in (0, 70):
        prof = run(
            out, Clock(monkeypatch), 8, lambda number: 10 if number else 900, first_step=first,
            schedule=instrument.schedule(f"{first + 3}-{first + 4}"),
        )  # fmt: skip
        timing = prof.windows[0]["timing"]
        assert [[first + 1, first + 2], [first + 5, first + 7]] == timing["around_steps"]
        assert 10 == timing["around_ns"]
        assert (8, None, 900 + 7 * 10) == (timing["run_steps"], timing["untimed_steps"], timing["run_ns"])


@pytest.mark.parametrize(("first", "untimed"), [(0, [0, 0]), (1, [0, 0]), (101, [0, 100])])
def test_a_run_that_is_detected_late(
    out: Path, monkeypatch: pytest.MonkeyPatch, first: int, untimed: list[int]
) -> None:
    """Steps that ended before the profile started count for the run, but their time is unknown."""
    clock = Clock(monkeypatch)
    prof = instrument.profile(out, schedule=f"{first + 3}", exporter=Recorder(), first_step=first)
    prof.start(late=True)
    for number in range(first, first + 8):
        clock.now += 10 if number else 0
        prof.step()
    prof.stop()
    timing = prof.windows[0]["timing"]
    assert (first + 8, untimed) == (timing["run_steps"], timing["untimed_steps"])
    assert 10 * (8 if first else 7) == timing["run_ns"]
    begin = max(first, 1)
    assert [[begin, first + 2], [first + 4, first + 7]] == timing["around_steps"]
    assert 10 == timing["around_ns"]


@pytest.mark.parametrize("failing", [3, 4, 5])
def test_a_step_that_an_error_cuts_short(out: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The step counts as recorded only if it is the only one, and is excluded from the median and the run."""
    clock = Clock(monkeypatch)

    def took(number: int) -> int:
        if number == failing:
            clock.now += 500
            raise ZeroDivisionError
        return 10

    with pytest.raises(ZeroDivisionError):
        run(out, clock, 9, took, schedule=instrument.schedule("3-5"))
    (entry,) = manifest(out)
    has_whole_steps = failing > 3
    reason = f"the loop ended in step {failing}: ZeroDivisionError"
    assert ("partial", reason) == (entry["status"], entry["reason"])
    assert ([3, failing - has_whole_steps], failing) == (entry["steps"], entry["cut_step"])
    timing = entry["timing"]
    assert (10 if has_whole_steps else None, failing) == (timing["recorded_ns"], timing["run_steps"])


def test_the_trace_excludes_a_step_that_was_cut_short(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trace's steps and the means exclude the step; the summary names it."""
    monkeypatch.setattr(settings, "summary", True)
    with pytest.raises(ZeroDivisionError), instrument.profile(out, schedule="3-5", first_step=2) as prof:
        train(4, prof.step, lambda number: 1 / (3 - number))
    (path,) = traces(out)
    assert [3, 4] == instrument.read_trace(path).steps.number.tolist()
    summary = capfd.readouterr().err
    assert "(mean of steps 3-4; step 5 was cut short)" in summary
    reason = "because the loop ended in step 5: ZeroDivisionError: division by zero."
    assert f"Recorded so far: 2 of the 3 steps 3-5, {reason}" in " ".join(summary.split())


def test_a_step_that_another_profiler_cuts_short(out: Path) -> None:
    """The metadata of the trace names the step, whose rest is not recorded."""

    def interfere(number: int) -> None:
        if number == 4:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                pass

    with instrument.profile(out, schedule="2-5") as prof:
        train(7, prof.step, interfere)
    (entry,) = manifest(out)
    assert ([2, 3], 4) == (entry["steps"], entry["cut_step"])
    (path,) = traces(out)
    assert [2, 3] == instrument.read_trace(path).steps.number.tolist()


@pytest.mark.parametrize("updates", [False, True])
def test_an_item_in_which_the_loop_ends(out: Path, updates: bool) -> None:
    """The step was cut short if its update is missing; in a loop without updates it counts."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def loop() -> None:
        for number in instrument.steps(range(9), out, at="3-5"):
            parameter.grad = torch.ones(1) / (number - 5 or 1)
            if number == 5:
                raise ZeroDivisionError
            if updates:
                optimizer.step()

    with pytest.raises(ZeroDivisionError):
        loop()
    gc.collect()
    (entry,) = manifest(out)
    assert (([3, 4], 5) if updates else ([3, 5], None)) == (entry["steps"], entry["cut_step"])


def test_the_next_window_ends_the_timing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing after the first window ends as the second begins; neither surroundings contain a recorded step."""
    prof = run(
        out, Clock(monkeypatch), 9, lambda number: 10 + number, schedule=instrument.schedule(at=[2, 6], active=2)
    )
    first, second = (entry["timing"] for entry in prof.windows)
    assert (first["around_steps"], first["around_ns"], first["recorded_ns"]) == ([[1, 1], [4, 4]], 12, 12)
    assert (second["around_steps"], second["around_ns"], second["recorded_ns"]) == (
        [[1, 1], [4, 5], [8, 8]],
        14,
        16,
    )


def test_the_trace_has_the_steps_that_ran(out: Path) -> None:
    """A window that the loop's end cut short has the steps before the one that was only announced."""
    with instrument.profile(out, schedule=instrument.schedule("2-9", warmup=1)) as prof:
        train(4, prof.step)
    trace = content(traces(out)[0])
    assert (trace["instrument_steps"], trace["instrument_warmup"]) == ("2-3", "1")
    assert instrument.read_trace(traces(out)[0]).steps.number.tolist() == [2, 3]


def test_the_manifest_entry_of_a_trace(out: Path) -> None:
    """`entry_of` finds the entry from the path of the trace; damaged lines and other folders give None."""
    with instrument.profile(out, schedule=instrument.schedule("1")) as prof:
        train(3, prof.step)
    (path,) = traces(out)
    assert entry_of(path) == manifest(out)[0]
    with (out / "manifest.jsonl").open("ab") as file:
        file.write(b'{"files": 3, "x": "' + f"{path.parent.name}/{path.name}".encode() + b'"}\n[1]\n\xff{\n')
    assert entry_of(path) == prof.windows[0]
    assert entry_of(out / "other" / "x.json") is None
    assert entry_of(Path("x.json")) is None


def test_the_end_of_the_loop_writes_all_lines(out: Path) -> None:
    """Each window has its line when the loop ends, even if later steps were still to be timed."""
    with instrument.profile(out, schedule=instrument.schedule("1,3")) as prof:
        train(5, prof.step)
    assert [entry["status"] for entry in manifest(out)] == ["recorded", "recorded"]
