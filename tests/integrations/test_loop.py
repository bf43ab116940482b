"""`Loop`: what every adapter drives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument.errors import SyncError
from instrument.integrations.loop import AutomaticLoop, Loop
from instrument.patch import Patch


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2))


def test_models_are_not_kept(tmp_path: Path) -> None:
    """A model that was named can go while the loop runs."""
    loop = Loop(tmp_path)
    loop.start()
    named = model()
    gone = weakref.ref(named)
    loop.name(named, named)
    del named
    gc.collect()
    assert gone() is None
    loop.stop()


@pytest.mark.parametrize("modules", [2, False])
def test_models_that_it_has(tmp_path: Path, modules: int | bool) -> None:
    """It knows those that were named until it stops, also where they get no regions."""
    loop = Loop(tmp_path, modules=modules)
    first, second = model(), model()
    loop.start(first)
    loop.name(second)
    assert {first, second} == set(loop.models)
    loop.stop()
    assert not set(loop.models)


def test_copies_begin_anew(tmp_path: Path) -> None:
    """A copy or a pickle of a loop, running or not, has its arguments and none of its state."""
    loop = Loop(tmp_path, at="2-3", modules=2, budget=1)
    loop.start(model())
    for other in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        assert not other.running
        assert other.records(2)
        assert not other.records(1)
    loop.stop()


def test_plan_of_each_run(tmp_path: Path) -> None:
    """A start with another number begins the plan anew; without one, or with the next, it goes on."""
    loop = Loop(tmp_path, at="1,3")
    for first in (0, 2, None, 0):
        loop.start(first_step=first)
        loop.step()
        loop.step()
        loop.stop()
    recorded = [entry["steps"] for entry in loop.windows if entry["status"] == "recorded"]
    assert recorded == [[1, 1], [3, 3], [1, 1]]


def test_automatic_gives_way(tmp_path: Path) -> None:
    """A loop that nobody wrote ends when one starts that somebody did, and does not start beside it."""
    written, automatic = Loop(tmp_path / "a"), AutomaticLoop(out=tmp_path / "b")
    automatic.start()
    written.start()
    assert (written.running, automatic.running, Loop.current()) == (True, False, written)
    automatic.start()
    assert not automatic.running
    written.stop()
    assert Loop.current() is None


def test_regions_left_open(tmp_path: Path) -> None:
    """What an error left open is closed with the region around it, or at the end."""
    loop = Loop(tmp_path)
    loop.start()
    for name in ("step", "forward", "inner"):
        loop.enter(name)
    loop.leave("nothing")
    loop.leave("forward")
    assert [name for name, _ in loop._open] == ["step"]
    loop.stop()
    assert loop._open == []


@pytest.mark.usefixtures("lenient")
def test_failures_are_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours reaches the framework but a `SyncError`, which somebody asked for."""
    loop = Loop(tmp_path)

    def fail(error: Exception) -> Any:
        raise error

    loop.start()
    monkeypatch.setattr(loop._profile, "step", lambda: fail(RuntimeError("ours")))
    loop.step()
    monkeypatch.setattr(loop._profile, "step", lambda: fail(SyncError("asked for")))
    with pytest.raises(SyncError):
        loop.step()
    loop.stop()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"modules": True}, '"modules" must be'),
        ({"names": "short"}, '"names" must be'),
        ({"on_summary": 3}, '"on_summary" must be a function'),
        ({"wait": -1}, "wait must be"),
        ({"syncs": "loud"}, '"level" must be'),
        ({"recordshapes": True}, "record_shapes"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    """They fail at once."""
    with pytest.raises((TypeError, ValueError), match=said):
        Loop(tmp_path, **arguments)


def test_patch_of_a_method_in_copies() -> None:
    """A copy of an object whose method is replaced has its own method."""
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
