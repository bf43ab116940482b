"""`profile(modules=...)` and `steps(modules=...)`: the layers of a model as regions in windows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instrument


def _trained(loop: Iterable[object], model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in loop:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def _regions(folder: Path) -> set[str]:
    (path,) = folder.glob("window-*/*.json.gz")
    return set(instrument.read_trace(path).regions.text("name"))


LAYERS = {"Sequential", "Linear", "Linear (backward)", "backward", "Optimizer.step#SGD.step"}


def test_modules_of_a_loop(tmp_path: Path) -> None:
    """`steps(modules=...)` shows the layers and the parts of the step, and leaves neither hooks nor references."""
    model = nn.Sequential(nn.Linear(2, 2))
    loop = instrument.steps(range(4), tmp_path, at=2, modules=model)
    _trained(loop, model)
    loop.profile.stop()
    assert _regions(tmp_path) >= LAYERS
    assert not model[0]._forward_hooks
    kept = weakref.ref(model)
    del model, loop
    gc.collect()
    assert kept() is None


def test_modules_of_a_later_loop(tmp_path: Path) -> None:
    """The model of a later loop at the same call site is shown there."""
    for epoch, model in enumerate([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)]):
        loop = instrument.steps(range(3), tmp_path, at=4, modules=model)
        _trained(loop, model)
        assert epoch or not loop.profile.finished
    loop.profile.stop()
    assert "Linear" in _regions(tmp_path)


def test_modules_of_a_profile(tmp_path: Path) -> None:
    """`profile(modules=...)` takes several models."""
    models = [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)]
    with instrument.profile(tmp_path, schedule="1-2", modules=models) as prof:
        for _ in range(3):
            for model in models:
                model(torch.ones(1, 2)).sum().backward()
            prof.step()
    assert _regions(tmp_path) >= {"Sequential", "Linear", "backward"}


@pytest.mark.parametrize("wrong", [4, "model", [nn.Linear(2, 2), "x"], nn.Linear])
def test_wrong_modules(tmp_path: Path, wrong: Any) -> None:
    """What is no module is refused at once."""
    for function in (instrument.profile, lambda *given, **named: instrument.steps([], *given, **named)):
        with pytest.raises(TypeError, match=r'"modules" must be a torch\.nn\.Module, or several'):
            function(tmp_path, modules=wrong)
