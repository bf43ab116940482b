"""`Profile.step` with ``global_step``, which resumes the count at the step of a checkpoint."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument

from .training import Recorder, expected, manifest, reasons, statuses, train


def count(out: Path, numbers: list[int], schedule: Any, **arguments: Any) -> tuple[list[int], list[Any]]:
    """Call ``step(global_step=...)`` with each number; return the recorded steps and the lines of the manifest."""
    recorder = Recorder()
    with instrument.profile(out, schedule=schedule, exporter=recorder, **arguments) as prof:
        for number in numbers:
            prof.step(global_step=number)
        assert numbers[-1] == prof.step_num
    return recorder.captured(), manifest(out)


def test_the_number_is_that_of_the_step_that_begins(out: Path) -> None:
    """A loop that counts its updates, as a Trainer does, passes the count as it is, and nothing changes."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        prof.step(global_step=done)

    with instrument.profile(out, schedule="3-5") as prof:
        trained = train(9, step)
    assert expected(9) == trained
    (entry,) = manifest(out)
    assert ("recorded", [3, 5], 9) == (entry["status"], entry["steps"], entry["timing"]["run_steps"])


def test_the_number_of_the_step_that_ended_is_noticed(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that passes the number of the step that ended gets a warning; its steps are one late."""
    with caplog.at_level(logging.WARNING, "instrument"):
        captured, _ = count(out, list(range(9)), "3-4")
    assert [3, 4] == captured
    (message,) = [record.message for record in caplog.records]
    assert "global_step is the number of the step that begins" in message


@pytest.mark.parametrize(
    ("numbers", "schedule", "captured", "lines"),
    [
        # forward, before, over and into windows
        ([1, 100, 101, 102, 103], "101-102", [101, 102], [("recorded", None)]),
        (
            [1, 100, 101, 102],
            "5-6,50,101",
            [101],
            [("not reached", "the loop went from step 1 to step 100")] * 2 + [("recorded", None)],
        ),
        (
            [1, 101, 102, 103],
            "100-102",
            [101, 102],
            [("partial", "the loop went from step 1 to step 101")],
        ),
        # out of an open window: at its end, inside it, in warm-up
        ([1, 2, 3, 4, 50, 51], "3-4", [3, 4], [("recorded", None)]),
        ([1, 2, 3, 50, 51], "3-4", [3], [("partial", "the loop went from step 3 to step 50")]),
        (
            [1, 50, 51],
            instrument.schedule("3-4", warmup=2),
            [],
            [("skipped", "the loop went from step 1 to step 50, in warm-up")],
        ),
        (
            [1, 2, 3, 5, 6, 7, 8],
            "3-6",
            [3, 5, 6],
            [("partial", "the loop went from step 3 to step 5")] * 2,
        ),
        # back
        ([1, 2, 3, 4, 5, 2, 3, 4, 5], "3", [3, 3], [("recorded", None)] * 2),
        (
            [1, 2, 3, 2, 3, 4, 5],
            "3-4",
            [3, 3, 4],
            [("partial", "the loop went from step 3 to step 2"), ("recorded", None)],
        ),
        ([1, 2, 3, 1, 2, 3, 4], "3-9,20", [3, 3], None),
    ],
)
def test_jumps(
    out: Path, numbers: list[int], schedule: Any, captured: list[int], lines: list[tuple[str, str | None]] | None
) -> None:
    """Passed windows have their line, an open one ends, and those that come again are recorded again."""
    found, entries = count(out, numbers, schedule)
    assert captured == [step for step in found if step != numbers[-1]]
    if lines is not None:
        assert lines == reasons(entries)


def test_a_window_has_one_line_that_it_was_not_reached(out: Path) -> None:
    """Also if the loop jumps over it, returns, and ends before it; one that was recorded before has none."""
    _, entries = count(out, [1, 2, 3, 100, 4, 5, 2, 3], "2,7,50,200")
    assert [(1, "recorded"), (2, "not reached"), (3, "not reached"), (1, "recorded"), (4, "not reached")] == (
        statuses(entries)
    )
    _, entries = count(out / "back", [1, 2, 3, 4, 1], "2,9")
    assert [(1, "recorded"), (2, "not reached")] == statuses(entries)


def test_the_steps_of_the_run_are_counted(out: Path) -> None:
    """A jump adds no steps to the run: neither in the timing of a window nor in the warning at its end."""
    _, (entry,) = count(out, [1, 100, 101, 102, 103, 104], "101")
    assert 4 <= entry["timing"]["run_steps"] <= 6


def test_without_a_schedule(out: Path) -> None:
    """The one window ends at the jump, and the rest is recorded in a second part."""
    with instrument.profile(out) as prof:
        train(2, prof.step)
        prof.step(global_step=50)
        train(2, prof.step)
    assert [("recorded", [1, 2]), ("recorded", [50, 51])] == [
        (entry["status"], entry["steps"]) for entry in manifest(out)
    ]


def test_a_schedule_that_is_a_function(out: Path) -> None:
    """The schedule is asked about the new step, and a window that it left open ends."""
    schedule = torch.profiler.schedule(wait=3, warmup=1, active=2, repeat=0)
    captured, entries = count(out, [1, 2, 3, 4, 52, 53, 54, 9, 10, 11, 12], schedule)
    assert [4, 52, 53, 10, 11] == captured
    assert [[4, 4], [52, 53], [10, 11]] == [entry["steps"] for entry in entries]


@pytest.mark.parametrize("back", [5, 30])
def test_requests_after_a_jump(out: Path, back: int) -> None:
    """A requested window opens at the next step, and one that was recorded before is not recorded again."""
    recorder = Recorder()
    with instrument.profile(out, schedule="40", exporter=recorder) as prof:
        for number in range(1, 25):
            if number == 10:
                prof.trigger("before", steps=1, warmup=0)
            prof.step(global_step=number)
        prof.trigger("after", steps=1, warmup=0)
        for number in range(back, 43):
            prof.step(global_step=number)
    assert [10, back, 40] == recorder.captured()
    assert [["before"], ["after"], ["schedule"]] == [entry["opened_by"] for entry in manifest(out)]


def test_with_a_black_box(out: Path) -> None:
    """The box numbers the steps as the profile does."""
    with instrument.profile(out, black_box=True, exporter=Recorder()) as prof:
        for number in [1, 2, 100, 101, 50, 51]:
            prof.step(global_step=number)
            assert prof.black_box is not None
            assert number == prof.step_num == prof.black_box.step_num


@pytest.mark.parametrize("wrong", ["7", 7.5, -1])
def test_wrong_numbers(out: Path, wrong: Any) -> None:
    """The call that makes the error raises it."""
    with (
        instrument.profile(out, schedule="3") as prof,
        pytest.raises((TypeError, ValueError), match="global_step"),
    ):
        for _ in range(3):
            prof.step(global_step=wrong)
    assert 0 == prof.step_num


def test_a_profile_that_does_not_run_only_counts(out: Path) -> None:
    """Before `start` and after `stop`, the number is set, and nothing is recorded."""
    prof = instrument.profile(out, schedule="3")
    prof.step(global_step=3)
    assert (3, []) == (prof.step_num, prof.windows)


def test_a_jump_on_another_thread(out: Path) -> None:
    """The number is set; the window stays open until its own thread steps, and says what it lacks."""
    with instrument.profile(out, schedule="2-3", exporter=Recorder()) as prof:
        for number in (1, 2):
            prof.step(global_step=number)
        thread = threading.Thread(target=prof.step, args=(50,))
        thread.start()
        thread.join()
        assert (50, []) == (prof.step_num, prof.windows)
        prof.step()
    assert [("partial", "steps ended on another thread than the one that opened the window")] == reasons(
        manifest(out)
    )
