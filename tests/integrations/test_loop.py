"""`Loop`, which every adapter drives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.errors import SyncError
from instrument.base.patch import Patch
from instrument.integrations.loop import AutomaticLoop, Loop
from instrument.record.windows.profile import Profile

pytestmark = pytest.mark.framework


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2))


def test_models_are_not_kept_alive(tmp_path: Path) -> None:
    """A named model can be freed while the loop runs."""
    loop = Loop(tmp_path)
    loop.start()
    named = model()
    reference = weakref.ref(named)
    loop.name(named, named)
    del named
    gc.collect()
    assert reference() is None
    loop.stop()


@pytest.mark.parametrize("modules", [2, False])
def test_known_models(tmp_path: Path, modules: int | bool) -> None:
    """A loop knows the models named until it stops, even without regions for them."""
    loop = Loop(tmp_path, modules=modules)
    first, second = model(), model()
    loop.start(first)
    loop.name(second)
    assert {first, second} == set(loop.models)
    loop.stop()
    assert not set(loop.models)


def test_copies_have_no_state(tmp_path: Path) -> None:
    """A copy or a pickle of a loop has its arguments and none of its state."""
    loop = Loop(tmp_path, at="2-3", modules=2, budget=1)
    loop.start(model())
    for other in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        assert not other.running
        assert other.records(2)
        assert not other.records(1)
    loop.stop()


def test_schedule_of_each_run(tmp_path: Path) -> None:
    """A start at another step restarts the schedule; one without a step, or at the next step, continues it."""
    loop = Loop(tmp_path, at="1,3")
    for first in (0, 2, None, 0):
        loop.start(first_step=first)
        loop.step()
        loop.step()
        loop.stop()
    recorded = [entry["steps"] for entry in loop.windows if entry["status"] == "recorded"]
    assert recorded == [[1, 1], [3, 3], [1, 1]]


def test_numbers_without_windows(tmp_path: Path) -> None:
    """Without recording, the functions of `on_steps` get the numbers of all steps, in each run of the loop."""
    got: list[instrument.StepNumbers] = []
    loop = Loop(tmp_path, at="2-3", black_box=True, record=False, on_steps=instrument.every(4, got.append))
    for first in (0, 100):
        loop.start(model(), first_step=first)
        for _ in range(6):
            with loop.region("backward"):
                pass
            loop.step()
        loop.stop()
    assert [3, 5, 103, 105] == [numbers["instrument/step"] for numbers in got]
    assert [3, 2, 3, 2] == [numbers["instrument/steps"] for numbers in got]
    assert all("instrument/phase_backward_s" in numbers for numbers in got)
    assert [] == loop.windows
    assert not list(tmp_path.iterdir())


def test_automatic_loop_is_preempted(tmp_path: Path) -> None:
    """An automatic loop ends when an explicit one starts, and does not start beside it."""
    explicit, automatic = Loop(tmp_path / "a"), AutomaticLoop(out=tmp_path / "b")
    automatic.start()
    explicit.start()
    assert (explicit.running, automatic.running, Loop.current()) == (True, False, explicit)
    automatic.start()
    assert not automatic.running
    explicit.stop()
    assert Loop.current() is None


def test_regions_left_open(tmp_path: Path) -> None:
    """Regions that an error leaves open are closed with the enclosing region or at the end."""
    loop = Loop(tmp_path)
    loop.start()
    names = ("step", "forward", "inner")
    for name in names:
        loop.enter(name)
    loop.leave("nothing")
    loop.leave("forward")
    assert ["step"] == [name for name in names if loop.is_open(name)]
    loop.stop()
    assert not any(map(loop.is_open, names))


@pytest.mark.usefixtures("lenient")
def test_failures_are_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Internal errors do not reach the framework; a requested `SyncError` does."""
    loop = Loop(tmp_path)

    def fail(error: Exception) -> Any:
        raise error

    loop.start()
    monkeypatch.setattr(Profile, "step", lambda _: fail(RuntimeError("internal")))
    loop.step()
    monkeypatch.setattr(Profile, "step", lambda _: fail(SyncError("requested")))
    with pytest.raises(SyncError):
        loop.step()
    loop.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": True}, '"modules" must be'),
        ({"names": "short"}, '"names" must be'),
        ({"on_summary": 3}, '"on_summary" must be a function'),
        ({"wait": -1}, '"wait" must be'),
        ({"syncs": "loud"}, '"level" must be'),
        ({"recordshapes": True}, "record_shapes"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    """Wrong arguments fail at once."""
    with pytest.raises((TypeError, ValueError), match=message):
        Loop(tmp_path, **arguments)


def test_copies_have_their_own_methods() -> None:
    """A copy of an object with a patched method has its own method."""
    from instrument.integrations.adapter import as_replacement

    class Trainer:
        def train(self) -> Trainer:
            return self

    trainer, calls = Trainer(), []
    patch = Patch(
        trainer, "train", lambda original: as_replacement(original, lambda: (calls.append(1), original())[1])
    )
    patch.apply()
    assert trainer.train() is trainer
    other = copy.deepcopy(trainer)
    assert other.train() is other
    assert calls == [1]
    patch.undo()
    assert vars(trainer) == {}
