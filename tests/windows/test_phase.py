"""`Profile.phase`: evaluations beside the steps of a training."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.config import settings
from instrument.record.handover.window_sender import WindowSender
from instrument.record.windows.profile import Profile

from .training import Recorder, expected, manifest, names, statuses, train


def lines(out: Path) -> dict[int | str, tuple[str, list[int] | None]]:
    """Return the status and the steps of each window, by its name."""
    return {entry["window"]: (entry["status"], entry["steps"]) for entry in manifest(out)}


def test_evaluations_have_windows_of_their_own(out: Path) -> None:
    """Every second evaluation is recorded, into a folder of its own, with its region and without the training."""
    with instrument.profile(out, schedule="1-2") as prof:

        def step() -> None:
            prof.step()
            if prof.step_num % 3 == 0:
                with prof.phase("eval", instrument.schedule(every=2, active=1, repeat=2)):
                    (torch.ones(3) + 1).sum()

        trained = train(15, step)
    assert expected(15) == trained
    assert {
        1: ("recorded", [1, 2]),
        "eval-0001": ("recorded", [2, 2]),
        "eval-0002": ("recorded", [4, 4]),
    } == lines(out)
    (trace,) = (out / "window-eval-0001").glob("*.pt.trace.json.gz")
    assert ["ProfilerStep#2", "eval"] == names(trace)
    opened = [entry["opened_by"] for entry in manifest(out) if entry["window"] == "eval-0001"]
    assert [["schedule"]] == opened


def test_the_training_does_not_wait_for_the_files_of_an_evaluation(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the end of the profile waits for the process that finishes windows."""
    waits: list[str] = []
    finish = WindowSender.finish
    monkeypatch.setattr(WindowSender, "finish", lambda self: (waits.append("finish"), finish(self))[1])
    with instrument.profile(out, schedule="8-9") as prof:
        with prof.phase("eval", "0"):
            torch.ones(3).sum()
        prof.step()
        assert [] == waits
    assert waits
    assert ("recorded", [0, 0]) == lines(out)["eval-0001"]


def test_the_summary_of_a_phase(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says whose windows it shows, how many there are, and where; that of the training does not."""
    monkeypatch.setattr(settings, "summary", True)
    printed: list[str] = []
    with instrument.profile(out, schedule="1-2", on_summary=printed.append) as prof:
        for number in range(6):
            torch.ones(3) + 1
            prof.step()
            if number > 2:
                with prof.phase("eval", "0,2"):
                    torch.ones(3) + 1
    (both,) = [text for text in printed if "window-eval-0001" in text]
    (training,) = [text for text in printed if "window-eval-0001" not in text]
    assert both.startswith(f"eval: 2 windows in {out}; a step is one block of this phase\nWhere the step went:")
    assert "0, 2" in both.partition("region")[0]
    assert training.startswith("Where the step went:")


def test_steps_in_a_phase_are_no_training_steps(out: Path) -> None:
    """A function that is given the profile may call `step` in an evaluation."""
    recorder = Recorder()
    with instrument.profile(out, schedule="3-4", exporter=recorder) as prof:
        for number in range(6):
            assert number == prof.step_num
            with prof.phase("eval"):
                prof.step()
                prof.step(global_step=70)
            prof.step()
    assert [3, 4] == recorder.captured()
    assert [1] == [entry["window"] for entry in manifest(out)]


def test_a_phase_in_an_open_window(out: Path) -> None:
    """The training's window goes on and has the evaluation as a region; the evaluation's own is skipped."""
    with instrument.profile(out, schedule="0-1") as prof:
        with prof.phase("eval", "0"):
            torch.ones(3) + 1
        train(3, prof.step)
    found = {entry["window"]: entry["reason"] for entry in manifest(out)}
    assert {1: None, "eval-0001": "another profile of this process has a window"} == found
    (trace,) = (out / "window-0001").iterdir()
    assert "eval" in names(trace)


def test_an_error_in_a_phase(out: Path) -> None:
    """The error passes, the manifest names it, and steps count again."""
    with instrument.profile(out, schedule="99", exporter=Recorder()) as prof:
        with pytest.raises(ValueError, match="too large"), prof.phase("eval", "0"):
            raise ValueError("too large")
        prof.step()
        assert 1 == prof.step_num
    (entry,) = [entry for entry in manifest(out) if entry["window"] == "eval-0001"]
    assert ("partial", "the loop ended in step 0: ValueError: too large") == (entry["status"], entry["reason"])


def test_phases_that_are_not_reached(out: Path) -> None:
    """The end of the training accounts for the windows of its phases."""
    with instrument.profile(out, schedule="1", exporter=Recorder()) as prof:
        for name in ("eval", "sanity"):
            with prof.phase(name, "5"):
                pass
        train(4, prof.step)
    assert ["not reached"] * 2 == [entry["status"] for entry in manifest(out) if entry["window"] != 1]


def test_many_windows_of_a_phase_that_are_not_reached(out: Path) -> None:
    """They have one line, which says how many there are."""
    with instrument.profile(out, schedule="1", exporter=Recorder()) as prof:
        for number in range(3):
            with prof.phase("eval", "1,5,7,9"):
                assert number < 3
        train(4, prof.step)
    entries = [entry for entry in manifest(out) if entry["window"] != 1]
    assert [("eval-0001", "recorded"), ("eval-0002", "not reached")] == statuses(entries)
    assert "the loop ended before step 3; 2 more windows of this phase were not reached" == entries[1]["reason"]


@pytest.mark.parametrize("place", ["start", "suspend_steps"])
def test_an_interrupt_at_the_start_of_a_phase(out: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Ctrl-C passes, and steps count again, although the block never ran."""
    with instrument.profile(out, black_box=True, exporter=Recorder()) as prof:
        block = prof.phase("eval", "0")
        original = getattr(Profile, place)

        def interrupted(*arguments: Any) -> None:
            original(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Profile, place, interrupted)
            with pytest.raises(KeyboardInterrupt), block:
                raise AssertionError("the block ran")
        prof.step()
        assert 1 == prof.step_num
        with prof.phase("eval"):
            prof.step()
        prof.step()
        assert prof.black_box is not None
        assert 2 == prof.step_num == prof.black_box.step_num


def test_with_a_black_box(out: Path) -> None:
    """The box times no evaluation, and goes on after it."""
    with instrument.profile(out, black_box=True, exporter=Recorder()) as prof:
        for _ in range(3):
            prof.step()
            with prof.phase("eval"):
                prof.step()
        assert prof.black_box is not None
        assert 3 == prof.step_num == prof.black_box.step_num


@pytest.mark.parametrize("wrong", ["", "a/b", "step", 3, None])
def test_wrong_names(out: Path, wrong: Any) -> None:
    """The name is part of the name of a folder."""
    with pytest.raises(ValueError, match='"name" must be a word'):
        instrument.profile(out).phase(wrong)


def test_nested_phases(out: Path) -> None:
    """Steps count again at the end of the outermost phase; also through a method that was taken in a phase."""
    recorder = Recorder()
    with instrument.profile(out, schedule="3-4", exporter=recorder) as prof:
        step = prof.step
        for number in range(6):
            assert number == prof.step_num
            with prof.phase("eval"):
                with prof.phase("sub"):
                    taken = prof.step
                step()
                taken()
                prof.step()
            taken()
    assert 6 == prof.step_num
    assert [3, 4] == recorder.captured()


def test_a_phase_on_another_thread(out: Path) -> None:
    """Steps of the training count while another thread evaluates, and those of the evaluation do not."""
    begun, trained = threading.Event(), threading.Event()
    recorder = Recorder()
    with instrument.profile(out, schedule="3-4", exporter=recorder) as prof:

        def evaluate() -> None:
            with prof.phase("eval"):
                prof.step()
                begun.set()
                trained.wait(60)
                prof.step()

        thread = threading.Thread(target=evaluate)
        thread.start()
        begun.wait(60)
        for number in range(6):
            prof.step(global_step=number + 1)
        trained.set()
        thread.join()
    assert 6 == prof.step_num
    assert [3, 4] == recorder.captured()


def test_a_phase_in_a_forked_child(out: Path) -> None:
    """The child runs its phases; their windows are the parent's."""
    with instrument.profile(out, schedule="9") as prof:
        child = os.fork()
        with prof.phase("eval", "0"):
            torch.ones(3).sum()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert ["eval-0001"] == [line["window"] for line in manifest(out) if line["window"] != 1]
    assert 1 == len(list((out / "window-eval-0001").iterdir()))
