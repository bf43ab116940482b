"""`steps`: a loop's own iterable, wrapped once, records its windows and changes nothing else."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from tests.support.programs import environment

from .training import Recorder, manifest, recorded, statuses, train


def test_the_loop_is_recorded_by_items(out: Path) -> None:
    """Each item is a step; the items, their order and the training are those of the loop without us."""
    expected = train(8)
    assert expected == train(instrument.steps(range(8), out, wait=1, warmup=1, active=2, repeat=2))
    assert [[2, 3], [6, 7]] == recorded(out)


def test_with_no_schedule_three_steps_after_one_of_warm_up_are_recorded(out: Path) -> None:
    """The default is one window of steps 2 to 4."""
    train(instrument.steps(range(7), out))
    assert [[2, 3, 4]] == recorded(out)


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": "2-3,6"},
        {"schedule": instrument.schedule("2-3,6")},
        {"schedule": lambda step: 3 if step in (3, 6) else 2 * (step == 2)},
    ],
)
def test_a_schedule_is_given_in_its_own_words_or_ready_made(out: Path, arguments: dict[str, Any]) -> None:
    """The arguments of `schedule`, a schedule, or a function of the step."""
    train(instrument.steps(range(9), out, **arguments))
    assert [[2, 3], [6]] == recorded(out)


def test_the_length_is_that_of_the_iterable(out: Path) -> None:
    """A DataLoader keeps its len(); what has none still has none."""
    loader = torch.utils.data.DataLoader(list(range(7)), batch_size=2)
    assert 4 == len(instrument.steps(loader, out))
    with pytest.raises(TypeError, match="has no len"):
        len(instrument.steps(iter(range(3)), out))
    assert [0, 1, 2] == list(instrument.steps(iter(range(3)), out, at=9))


def test_an_early_break_ends_the_open_window(out: Path) -> None:
    """The window that was open is saved as partial as soon as the loop is left."""
    for number in instrument.steps(range(9), out, at="2-5", exporter=Recorder()):
        if number == 3:
            break
    gc.collect()
    (entry,) = manifest(out)
    assert ("partial", [2, 3], "the loop ended in step 3") == (entry["status"], entry["steps"], entry["reason"])


def test_an_exception_in_the_body_passes_through(out: Path) -> None:
    """It reaches the caller as it was raised, and the open window is saved."""
    error: list[Exception] = [ZeroDivisionError("mine")]

    def loop() -> None:
        for number in instrument.steps(range(9), out, at="2-5"):
            if number == 4:
                raise error[0]

    with pytest.raises(ZeroDivisionError) as caught:
        loop()
    assert error.pop() is caught.value
    del caught
    gc.collect()
    assert [(1, "partial")] == statuses(manifest(out))


def test_an_exception_of_the_iterable_passes_through(out: Path) -> None:
    """A loader that fails fails as it does without us."""

    def loader() -> Iterator[int]:
        yield 0
        raise OSError("worker died")

    with pytest.raises(OSError, match="worker died"):
        list(instrument.steps(loader(), out, at=0))
    assert 1 == len(recorded(out))


def test_a_second_epoch_counts_on(out: Path) -> None:
    """Steps are numbered through epochs; a window lies where the schedule says, whichever epoch that is."""
    batches = instrument.steps(range(4), out, at="1,6")
    assert [0, 1, 2, 3] == list(batches)
    assert [0, 1, 2, 3] == list(batches)
    assert [[1], [6]] == recorded(out)
    assert 7 == batches.profile.step_num
    last = {entry["window"]: entry["status"] for entry in manifest(out)}
    assert {1: "recorded", 2: "recorded"} == last


def test_a_progress_bar_around_or_inside_works(out: Path) -> None:
    """A bar such as tqdm is a generator around ours, or ours one around it; a break ends the window."""

    class Bar:
        def __init__(self, iterable: Any) -> None:
            self.iterable, self.total = iterable, len(iterable)

        def __len__(self) -> int:
            return self.total

        def __iter__(self) -> Iterator[Any]:
            yield from self.iterable

    for number in Bar(instrument.steps(range(6), out, at="1-4")):
        if number == 2:
            break
    gc.collect()
    assert [(1, "partial")] == statuses(manifest(out))
    bar = instrument.steps(Bar(range(6)), out / "inside", at=1)
    assert 6 == len(bar)
    assert [0, 1, 2, 3, 4, 5] == list(bar)
    assert [[1]] == recorded(out / "inside")


def test_an_empty_iterable_is_an_empty_loop(out: Path) -> None:
    """No step, no trace; the manifest says that the window was not reached."""
    assert [] == list(instrument.steps([], out))
    (entry,) = manifest(out)
    assert ("not reached", "the loop ended before step 0") == (entry["status"], entry["reason"])


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"iterable": 3}, '"iterable" must be something to iterate over: 3'),
        (
            ValueError,
            {"schedule": instrument.schedule(at=1), "wait": 1},
            '"schedule" was given, so these cannot be: wait',
        ),
        (ValueError, {"wait": 1}, "active must be an integer >= 1, got None"),
        (TypeError, {"recrod_shapes": True, "at": 1}, '"recrod_shapes" is no option: True'),
        (TypeError, {"out": 5, "at": 1}, '"out" must be the path of a folder: 5'),
    ],
)
def test_wrong_arguments_fail_at_the_call(
    out: Path, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    """Not in the first iteration, hours later."""
    with pytest.raises(error, match=re.escape(message)):
        instrument.steps(**{"iterable": [], "out": out, **arguments})


def test_the_last_item_ends_the_loop(out: Path) -> None:
    """No step is announced after the last item: a window that would begin there stays for the next epoch."""
    batches = instrument.steps(range(4), out, at="4-7", exporter=Recorder())
    list(batches)
    assert [("not reached", "the loop ended after step 3")] == [
        (entry["status"], entry["reason"]) for entry in manifest(out)
    ]
    list(batches)
    assert [("recorded", [4, 7])] == [(entry["status"], entry["steps"]) for entry in manifest(out)[1:]]


def test_cycles_are_recorded_once_unless_told_otherwise(out: Path) -> None:
    """A loop of days is not recorded for ever because nobody gave a number of windows."""
    list(instrument.steps(range(20), out, wait=1, active=1, exporter=Recorder()))
    assert [(1, "recorded")] == statuses(manifest(out))
    list(instrument.steps(range(4), out / "ever", wait=1, active=1, repeat=0, exporter=Recorder()))
    assert [(1, "recorded"), (2, "recorded"), (3, "not reached")] == statuses(manifest(out / "ever"))


@pytest.mark.parametrize("leave", ["next(loop)", "prof.start(); prof.step()"])
def test_a_window_that_is_open_at_exit(tmp_path: Path, leave: str) -> None:
    """A program that ends without a word to us leaves its window and a line all the same."""
    code = f"""
import torch, instrument
loop = iter(instrument.steps(range(9), "out", at="0-5"))
prof = instrument.profile("out", schedule="0-5")
{leave}
torch.ones(3) + 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment())
    (entry,) = manifest(tmp_path / "out")
    assert "partial" == entry["status"]
    assert (tmp_path / "out" / entry["files"][0]["path"]).stat().st_size == entry["files"][0]["bytes"]
