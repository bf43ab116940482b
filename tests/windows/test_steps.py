"""Tests of `steps`: wrapping a loop's iterable records windows and changes nothing else."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
import instrument.record.windows.steps
from instrument.base.config import settings
from instrument.integrations.loop import Loop
from instrument.integrations.server import Server
from instrument.record.windows.api import new_profile
from tests.support import programs, warm
from tests.support.programs import environment

from .training import Recorder, manifest, names, recorded, statuses, traces, train


def test_the_loop_is_recorded_by_items(out: Path) -> None:
    """Each item is a step; the items, their order and the training do not change."""
    expected = train(8)
    assert expected == train(instrument.steps(range(8), out, wait=1, warmup=1, active=2, repeat=2))
    assert [[2, 3], [6, 7]] == recorded(out)


def test_the_default_schedule(out: Path) -> None:
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
def test_ways_to_give_a_schedule(out: Path, arguments: dict[str, Any]) -> None:
    """`steps` accepts the arguments of `schedule`, a schedule, or a function of the step."""
    batches = instrument.steps(range(9), out, **arguments)
    train(batches)
    batches.profile.stop()
    assert [[2, 3], [6]] == recorded(out)


def test_the_length_equals_the_length_of_the_iterable(out: Path) -> None:
    """A DataLoader keeps its len(); an iterable without len() still has none."""
    loader = torch.utils.data.DataLoader(list(range(7)), batch_size=2)
    assert 4 == len(instrument.steps(loader, out))
    with pytest.raises(TypeError, match="has no len"):
        len(instrument.steps(iter(range(3)), out))
    assert [0, 1, 2] == list(instrument.steps(iter(range(3)), out, at=9))


def test_an_early_break_ends_the_open_window(out: Path) -> None:
    """The open window is saved as partial as soon as the loop is left."""
    for number in instrument.steps(range(9), out, at="2-5", exporter=Recorder()):
        if number == 3:
            break
    gc.collect()
    (entry,) = manifest(out)
    assert ("partial", [2, 3], "the loop ended in step 3") == (entry["status"], entry["steps"], entry["reason"])


def test_an_exception_in_the_body_passes_through(out: Path) -> None:
    """The same exception object reaches the caller, and the open window is saved."""
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
    """The loop gets the loader's error unchanged."""

    def loader() -> Iterator[int]:
        yield 0
        raise OSError("worker died")

    with pytest.raises(OSError, match="worker died"):
        list(instrument.steps(loader(), out, at=0))
    assert 1 == len(recorded(out))


def test_a_second_epoch_continues_the_count(out: Path) -> None:
    """Steps are numbered across epochs, and so are the steps of the schedule."""
    batches = instrument.steps(range(4), out, at="1,6")
    assert [0, 1, 2, 3] == list(batches)
    assert [0, 1, 2, 3] == list(batches)
    assert [[1], [6]] == recorded(out)
    assert 8 == batches.profile.step_num
    last = {entry["window"]: entry["status"] for entry in manifest(out)}
    assert {1: "recorded", 2: "recorded"} == last


def test_calls_inside_the_epoch_loop(out: Path) -> None:
    """Calls of `steps` at the same place continue the count of steps."""
    for _ in range(3):
        for _ in instrument.steps(range(10), out, wait=13, active=2, exporter=Recorder()):
            pass
    assert [(1, "recorded", [13, 14])] == [
        (entry["window"], entry["status"], entry["steps"]) for entry in manifest(out)
    ]


def test_epochs_that_are_left_early(out: Path) -> None:
    """The count of steps continues after an error that the epoch loop catches."""
    for _ in range(4):
        with contextlib.suppress(ZeroDivisionError):
            for number in instrument.steps(
                range(9), out, schedule=lambda step: 3 * (step == 7), exporter=Recorder()
            ):
                if number == 2:
                    1 / 0  # noqa: B018
        gc.collect()
    assert [[7, 7]] == [entry["steps"] for entry in manifest(out)]


def test_a_known_place_reuses_its_profile(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls at the same place share one profile; different arguments are still checked."""
    created: list[Any] = []

    def count_profiles(*arguments: Any, **named: Any) -> Any:
        created.append(named)
        return new_profile(*arguments, **named)

    monkeypatch.setattr(instrument.record.windows.steps, "new_profile", count_profiles)
    for options in ({}, {}, {}, {"recrod_shapes": True}):
        with contextlib.nullcontext() if not options else pytest.raises(TypeError, match="recrod_shapes"):
            batches = instrument.steps(range(2), out, at=9, **options)
            list(batches)
    assert 6 == batches.profile.step_num
    assert 2 == len(created)


@pytest.mark.process
def test_a_cell_that_runs_again(tmp_path: Path) -> None:
    """In a notebook, each run of a cell is recorded; epochs inside it are one run."""
    pytest.importorskip("ipykernel")
    code = """
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
        shell.run_cell("import instrument", store_history=True)
        epochs = "def train():\\n for _ in (1, 2):\\n  for _ in instrument.steps(range(4), 'out', at='1-2'): 0"
        for cell in (epochs, "train()", "train()"):
            shell.run_cell(cell, store_history=True)
    """
    script = programs.program(code, tmp_path)
    warm.run(programs.python(script), programs.environment(), cwd=tmp_path, check=True)
    assert [(1, "recorded"), (1, "recorded")] == statuses(manifest(tmp_path / "out"))


def test_another_training_at_the_same_place_logs_a_warning(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another training logs one warning; further epochs of the recorded training log none."""

    def run(weight: torch.Tensor, epochs: int) -> None:
        for _ in range(epochs):
            optimizer = torch.optim.SGD([weight], 0.1)
            for number in instrument.steps(range(4), out, at="1-2", exporter=exporter):
                weight.sum().backward()
                if number:  # the first item accumulates
                    optimizer.step()

    exporter = Recorder()
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    run(first, 3)
    run(first, 1)
    assert [] == caplog.records
    run(second, 2)
    (record,) = caplog.records
    assert (
        "steps 1-2 were recorded in an earlier loop at this call site, so nothing is recorded here; "
        "use another folder for this training"
    ) in record.message


def test_equal_code_of_two_files_has_two_counts(out: Path) -> None:
    """Equal code in two files, such as two cells of a notebook, has one count of steps each."""
    text = "batches = steps(range(3), out, at=1, exporter=exporter)\nlist(batches)"
    numbers = []
    codes = [compile(text, f"cell-{number}", "exec") for number in (1, 2, 1)]
    for code in codes:
        names: dict[str, Any] = {"steps": instrument.steps, "out": out, "exporter": Recorder()}
        exec(code, names)
        numbers.append(names["batches"].profile.step_num)
    assert [3, 3, 6] == numbers


def test_calls_with_separate_counts(out: Path) -> None:
    """Another folder, plan or place, a nested loop, and a changed `first_step` start a new count."""

    def loop(folder: str, at: int, first_step: int = 0) -> instrument.record.windows.steps.StepIterator[int]:
        return instrument.steps(range(4), out / folder, at=at, first_step=first_step, exporter=Recorder())

    for _ in loop("a", 1):
        assert [0, 1, 2, 3] == list(loop("a", 1))  # nested, at the same place
    for batches, steps in [(loop("b", 1), 4), (loop("a", 2), 4), (loop("a", 2), 8), (loop("c", 9), 4)]:
        list(batches)
        assert steps == batches.profile.step_num
    for first, last in [(4, 8), (8, 12), (100, 104), (100, 108)]:
        batches = loop("c", 9, first)
        list(batches)
        assert last == batches.profile.step_num
    assert [[1, 1]] * 5 + [[2, 2]] == sorted(entry["steps"] for entry in manifest(out / "a"))


def test_a_step_ends_with_its_update(out: Path) -> None:
    """A step ends with the optimizer's step: validation and loading belong to the next one."""
    parameters = [torch.ones(2, requires_grad=True)]
    optimizer = torch.optim.SGD(parameters, 0.1)

    def loader() -> Iterator[int]:
        for number in range(6):
            with instrument.annotate(f"load {number}"):
                yield number

    for number in instrument.steps(loader(), out, at="2,4"):
        with instrument.annotate(f"train {number}"):
            parameters[0].sum().backward()
        optimizer.step()
        with instrument.annotate(f"validate {number}"):
            pass
    found = [[name for name in names(path) if name.split()[0] in ("train", "validate")] for path in traces(out)]
    assert [["validate 1", "train 2"], ["validate 3", "train 4"]] == found


def _regions_of_step(out: Path, at: int, updates: Callable[[int], int], optimizers: int) -> list[str]:
    """Train with ``updates(number)`` updates per item, optimizers in turn; return the regions of step ``at``."""
    created = [torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1) for _ in range(optimizers)]
    for number in instrument.steps(range(at + 2), out, at=at):
        for update in range(updates(number)):
            with instrument.annotate(f"update {update} of {number}"):
                created[update % optimizers].step()
        with instrument.annotate(f"log {number}"):
            pass
    (trace,) = traces(out)
    read = instrument.read_trace(trace)
    (step,) = read.steps.where(read.steps.number == at).start_ns
    regions = read.regions.where(read.regions.start_ns >= step)
    found = [name for name in regions.text("name") if name.startswith(("update", "log"))]
    return found[: found.index(f"log {at}")] if f"log {at}" in found else found


@pytest.mark.parametrize("optimizers", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 4, 40])
def test_several_updates_for_an_item(out: Path, at: int, optimizers: int) -> None:
    """The last update of an item ends the step, with any number of optimizers; no item is split."""
    before = [f"log {at - 1}"] if at > 1 else []  # the first item's number of updates is known only afterwards
    expected = [*before, *(f"update {update} of {at}" for update in range(3))]
    assert expected == _regions_of_step(out, at, lambda number: 3, optimizers)


def test_items_with_more_updates_than_others(out: Path) -> None:
    """No item is split where every third one has an additional update, as for the generator of a GAN."""
    for at, log in ((7, []), (8, []), (9, ["log 8"])):
        expected = [*log, *(f"update {update} of {at}" for update in range(1 + (at % 3 == 2)))]
        assert expected == _regions_of_step(out / str(at), at, lambda number: 1 + (number % 3 == 2), 2)


def test_a_training_on_another_thread(out: Path) -> None:
    """Updates on another thread do not end steps of the loop."""

    def other() -> None:
        thread = threading.Thread(target=train, args=(3,))
        thread.start()
        thread.join()

    batches = instrument.steps(range(9), out, at="4-6")
    numbers: list[int] = []

    def body(number: int) -> None:
        numbers.append(batches.profile.step_num)
        other()

    train(batches, body=body)
    assert list(range(9)) == numbers
    assert [[4, 5, 6]] == recorded(out)
    assert [(1, "recorded")] == statuses(manifest(out))


def _run_items(out: Path, epochs: int, items: int, **arguments: Any) -> None:
    for _ in range(epochs):
        batches = instrument.steps(range(items), out, exporter=Recorder(), **arguments)
        list(batches)
    batches.profile.stop()


def _run_profiles(out: Path, plan: Any, steps: int) -> None:
    for _ in range(2):
        with instrument.profile(out, schedule=plan, exporter=Recorder()) as prof:
            for _ in range(steps):
                prof.step()


def _run_adapter(adapter: Any) -> None:
    start, stop = (
        (adapter.attach, adapter.detach) if isinstance(adapter, Server) else (adapter.start, adapter.stop)
    )
    start()
    adapter.step()
    stop()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda out: _run_items(out, 1, 40, at="100-102"), 'such as at="2-4"'),
        (lambda out: _run_items(out, 9, 4, at="99"), "before step 36"),
        (lambda out: _run_items(out, 1, 0), "there were no steps"),
        (lambda out: _run_items(out, 1, 4, at="3", first_step=10), "before the first step, 10"),
        (lambda out: _run_profiles(out, "9", 1), "create the profile once, outside the epoch loop"),
        (lambda out: _run_profiles(out, "9", 0), "call step() after each step"),
        (lambda out: _run_profiles(out, lambda step: 0, 1), "the schedule has none"),
        (lambda out: _run_adapter(Loop(out, at=9, exporter=Recorder())), 'such as at="0"'),
        (lambda out: _run_adapter(Server(out, file="x/now", exporter=Recorder())), "touch x/now"),
    ],
)
def test_a_loop_without_windows_logs_one_warning(
    out: Path, caplog: pytest.LogCaptureFixture, run: Callable[[Path], None], message: str
) -> None:
    """Each way to record logs one warning, which contains the fix."""
    run(out)
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "instrument")
    assert "no window was recorded" in record.message
    assert message in record.message


@pytest.mark.parametrize(
    ("at", "first_step", "advised"), [("5010", 0, True), ("5010", 5000, False), ("2", 5000, False)]
)
def test_a_resumed_run_that_counts_from_0(
    out: Path, caplog: pytest.LogCaptureFixture, at: str, first_step: int, advised: bool
) -> None:
    """Where the planned steps are beyond the end, the warning says how a resumed run gives its first step."""
    with instrument.profile(out, schedule=at, first_step=first_step, exporter=Recorder()) as prof:
        for _ in range(5):
            prof.step()
    (record,) = caplog.records
    advice = "if the run was resumed, give the number of its first step: first_step="
    assert advised == (advice in record.message)


def test_a_program_without_windows_prints_one_line_at_exit(tmp_path: Path) -> None:
    """Without configured logging, the line goes to standard error at exit, after any further epochs."""
    code = 'import instrument\nfor _ in range(3):\n  for _ in instrument.steps(range(9), "x", at="99"): pass'
    done = warm.run([sys.executable, "-c", code], environment(), cwd=tmp_path, check=True)
    assert [True] == ["no window was recorded in" in line for line in done.stderr.splitlines()]
    assert [(1, "not reached")] == statuses(manifest(tmp_path / "x"))


def test_an_error_that_ends_the_program_is_in_the_manifest(tmp_path: Path) -> None:
    """The windows that a loop did not reach name the error, which the loop itself cannot see."""
    code = 'import instrument\nfor item in instrument.steps(range(9), "x", at="99"): 1 / (3 - item)'
    done = warm.run([sys.executable, "-c", code], environment(), cwd=tmp_path)
    (entry,) = manifest(tmp_path / "x")
    end = "the program ended with ZeroDivisionError: division by zero"
    assert (1, f"the loop ended in step 3; {end}") == (done.returncode, entry["reason"])


def test_a_progress_bar_around_or_inside_works(out: Path) -> None:
    """A bar such as tqdm wraps `steps` or is wrapped by it; a break ends the window."""

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
    """A loop without steps has no trace; the manifest says that the window was not reached."""
    batches = instrument.steps([], out)
    assert [] == list(batches)
    batches.profile.stop()
    (entry,) = manifest(out)
    assert ("not reached", "the loop ended before step 0") == (entry["status"], entry["reason"])


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"iterable": 3}, '"iterable" must be iterable: 3'),
        (
            ValueError,
            {"schedule": instrument.schedule(at=1), "wait": 1},
            '"schedule" cannot be combined with: wait',
        ),
        (ValueError, {"wait": 1}, '"active" must be an integer >= 1 unless "at" or "every" is given: None'),
        (TypeError, {"recrod_shapes": True, "at": 1}, 'unknown option "recrod_shapes" (value True)'),
        (TypeError, {"out": 5, "at": 1}, '"out" must be the path of a folder: 5'),
    ],
)
def test_wrong_arguments_fail_at_the_call(
    out: Path, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    """Wrong arguments raise at the call rather than in the first iteration, which may be hours later."""
    with pytest.raises(error, match=re.escape(message)):
        instrument.steps(**{"iterable": [], "out": out, **arguments})


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_a_window_that_begins_between_epochs(out: Path, warmup: int) -> None:
    """A window that would begin or warm up at the end of an epoch waits for the next epoch."""
    batches = instrument.steps(range(4), out, at="4-7", warmup=warmup, exporter=Recorder())
    list(batches)
    assert [] == list(out.glob("*"))
    list(batches)
    batches.profile.stop()
    assert [("recorded", [4, 7])] == [(entry["status"], entry["steps"]) for entry in manifest(out)]


@pytest.mark.parametrize(
    "plan",
    [{"at": "3-6,9"}, {"wait": 2, "warmup": 1, "active": 4}, {"schedule": lambda step: 2 * (2 < step < 7)}],
)
@pytest.mark.parametrize("items", [1, 2, 5, 6])
def test_a_window_continues_in_the_next_epoch(out: Path, plan: dict[str, Any], items: int) -> None:
    """The end of an epoch saves the steps so far; the next epoch records the rest into another trace."""
    for _ in range(12 // items):
        batches = instrument.steps(range(items), out, exporter=Recorder(), **plan)
        list(batches)
        assert len([entry for entry in batches.profile.windows if entry["files"]]) == len(traces(out))
    entries = [entry for entry in batches.profile.windows if entry["window"] == 1]
    parts = [range(entry["steps"][0], entry["steps"][1] + 1) for entry in entries]
    assert [3, 4, 5, 6] == [step for steps in parts for step in steps]
    assert "recorded" == entries[-1]["status"]
    if "schedule" not in plan:
        reasons = [f"the loop ended before step {steps[-1] + 1}" for steps in parts[:-1]]
        assert reasons == [entry["reason"] for entry in entries[:-1]]
    assert ("at" in plan) == any(entry["window"] == 2 for entry in batches.profile.windows)


def test_a_window_continues_after_a_break(out: Path) -> None:
    """The item with the break is one step and is recorded once; code after the loop is not recorded."""
    for _ in range(3):
        for number in instrument.steps(range(4), out, at="1-4"):
            with instrument.annotate(f"item {number}"):
                pass
            if number == 2:
                break
        gc.collect()
        with instrument.annotate("validate"):
            pass
    assert [["item 1", "item 2"], ["item 0", "item 1"]] == [
        [name for name in names(path) if not name.startswith("ProfilerStep")] for path in traces(out)
    ]
    assert [("partial", [1, 2]), ("recorded", [3, 4])] == [
        (entry["status"], entry["steps"]) for entry in manifest(out)
    ]
    first, rest = (instrument.read_trace(path) for path in traces(out))
    assert ([1, 2], [3, 4]) == (first.steps.number.tolist(), rest.steps.number.tolist())


def test_a_window_that_no_epoch_completes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary at the end of the loop has the missing steps; the window has one line, as partial."""
    monkeypatch.setattr(settings, "summary", True)
    summaries: list[str] = []
    batches = instrument.steps(range(4), out, at="3-5", on_summary=summaries.append)
    train(batches)
    assert ["Recorded so far: 1 of the 3 steps 3-5, because the loop ended before step 4."] == [
        line for line in summaries[0].splitlines() if "so far:" in line
    ]
    batches.profile.stop()
    assert [(1, "partial")] == statuses(manifest(out))


def test_a_window_that_fails_in_its_second_part(out: Path) -> None:
    """A window whose second part fails is not tried again in a later epoch."""
    exporter = Recorder()
    for epoch in range(4):
        exporter.failing = ("start",) if epoch == 1 else ()
        with contextlib.suppress(OSError):  # strict settings raise it
            list(instrument.steps(range(2), out, at="1-6", exporter=exporter))
    assert [("partial", [1, 1]), ("failed", None)] == [
        (entry["status"], entry["steps"]) for entry in manifest(out)
    ]


def test_cycles_are_recorded_once_by_default(out: Path) -> None:
    """Without `repeat` one window is recorded; `repeat=0` records without end."""
    list(instrument.steps(range(20), out, wait=1, active=1, exporter=Recorder()))
    assert [(1, "recorded")] == statuses(manifest(out))
    batches = instrument.steps(range(4), out / "ever", wait=1, active=1, repeat=0, exporter=Recorder())
    list(batches)
    batches.profile.stop()
    assert [(1, "recorded"), (2, "recorded"), (3, "not reached")] == statuses(manifest(out / "ever"))


@pytest.mark.process
@pytest.mark.parametrize("leave", ["next(loop)", "prof.start(); prof.step()"])
def test_a_window_that_is_open_at_exit(tmp_path: Path, leave: str) -> None:
    """A program that ends without `stop` still saves its open window and its line."""
    code = f"""
import torch, instrument
loop = iter(instrument.steps(range(9), "out", at="0-5"))
prof = instrument.profile("out", schedule="0-5")
{leave}
torch.ones(3) + 1
"""
    warm.run([sys.executable, "-c", code], environment(), cwd=tmp_path, check=True)
    (entry,) = manifest(tmp_path / "out")
    assert "partial" == entry["status"]
    assert (tmp_path / "out" / entry["files"][0]["path"]).stat().st_size == entry["files"][0]["bytes"]
