"""The Megatron adapter under megatron.training, attached explicitly or by the environment."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument.base.config import RUN
from instrument.integrations.loop import loop_from_environment
from instrument.integrations.megatron import MegatronAdapter, attach, install
from tests.support import megatron_training

pytest.importorskip("megatron.core")
from tests.integrations.megatron_support import outline, recorded_steps

pytestmark = pytest.mark.framework


class Training:
    """A model and its training, with a stand-in for ``megatron.training``."""

    def __init__(self) -> None:
        self.module = importlib.import_module("megatron.training.training")
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.fail_at: int | None = None

    def forward_step(self, data: Any, model: torch.nn.Module) -> torch.Tensor:
        return model(next(data)).mean()

    def forward_backward(self, forward_step_func: Any, data_iterator: Any, model: Any) -> float:
        if self.module.get_args().curr_iteration == self.fail_at:
            raise ZeroDivisionError
        loss = forward_step_func(data_iterator, model[0])
        loss.backward()
        return loss.item()

    def pretrain(self, **args: Any) -> list[float]:
        data = iter(lambda: torch.ones(2, 4), None)
        found: list[float] = self.module.pretrain(
            self.forward_step, [self.model], self.optimizer, self.forward_backward, data, **args
        )
        return found


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``megatron.training`` importable, without importing it."""
    megatron_training.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in ("megatron.training.training", "megatron.training"):
        sys.modules.pop(name, None)
    vars(sys.modules["megatron"]).pop("training", None)


PROFILE = {"profile": True, "profile_step_start": 10, "profile_step_end": 12, "train_iters": 14}


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (PROFILE, [[10, 11]]),
        (PROFILE | {"use_pytorch_profiler": True}, [[10, 11]]),
        (PROFILE | {"iteration": 10}, [[10, 11]]),
        (PROFILE | {"iteration": 11}, [[11, 11]]),
        (PROFILE | {"iteration": 100, "profile_step_start": 110, "profile_step_end": 112, "train_iters": 115},
         [[110, 111]]),
        (PROFILE | {"iterations_to_skip": [4, 5], "train_iters": 12}, [[10, 11]]),
        (PROFILE | {"old_release": True, "iteration": 9}, [[10, 11]]),
        (PROFILE | {"train_iters": 12}, [[10, 11]]),
        (PROFILE | {"profile_step_start": 0, "profile_step_end": 1}, [[0, 0]]),
        (PROFILE | {"iteration": 13}, []),
        (PROFILE | {"profile_ranks": [1, 2]}, []),
        (PROFILE | {"profile_ranks": [0]}, [[10, 11]]),
    ],
    ids=str,
)  # fmt: skip
def test_profile_arguments(package: None, tmp_path: Path, args: dict[str, Any], steps: list[Any]) -> None:
    """The iterations from start to before end are recorded once, also in a resumed run."""
    with attach(tmp_path / "out", modules=False) as attached:
        training = Training()
        training.pretrain(**args)
    recorded = [entry["steps"] for entry in attached.windows if entry["status"] in ("recorded", "partial")]
    assert recorded == steps
    assert training.module.own_profilers == []
    assert training.module.get_args().profile is True


def test_explicit_schedule(package: None, tmp_path: Path) -> None:
    """A schedule given to `attach` is followed instead of Megatron's arguments, by one profiler."""
    with (
        attach(tmp_path / "out", wait=2, warmup=0, active=1, modules=False) as attached,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        training = Training()
        training.pretrain(**PROFILE)
    assert recorded_steps(attached) == [[2, 2]]
    assert training.module.own_profilers == []


@pytest.mark.parametrize("use_torch", [False, True])
def test_empty_profile_arguments(package: None, tmp_path: Path, use_torch: bool) -> None:
    """Profile arguments without an iteration are left to Megatron."""
    args = PROFILE | {"profile_step_end": 10, "use_pytorch_profiler": use_torch, "train_iters": 11}
    with attach(tmp_path / "out", modules=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training()
        training.pretrain(**args)
    assert training.module.own_profilers == ["torch" if use_torch else "cuda"]


@pytest.mark.parametrize("imported", ["before", "after"])
def test_regions_of_an_iteration(package: None, tmp_path: Path, imported: str) -> None:
    """A step is the call of train_step; evaluation and checkpoint follow it in the same window."""
    training = Training() if imported == "before" else None
    with attach(tmp_path / "out", wait=1, warmup=0, active=2) as attached:
        training = training or Training()
        found = training.pretrain(train_iters=5, eval_interval=3, save_interval=2)
    shown = r"ProfilerStep.*|step|evaluation|checkpoint|Optimizer.step.*|Linear"
    step = ["  step", "    Linear", "    Optimizer.step#SGD.step"]
    assert outline(tmp_path / "out", shown) == [
        "ProfilerStep#1", *step, "  checkpoint", "ProfilerStep#2", *step, "  evaluation", "    Linear"
    ]  # fmt: skip
    assert recorded_steps(attached) == [[1, 2]]
    assert found == Training().pretrain(train_iters=5, eval_interval=3)


def test_last_iteration(package: None, tmp_path: Path) -> None:
    """A window in which the training ends contains the last iteration; a second training continues counting."""
    with attach(tmp_path / "out", wait=1, warmup=0, active=3, repeat=2, modules=False) as attached:
        training = Training()
        training.pretrain(train_iters=3)
        assert attached.windows[0]["steps"] == [1, 2]
        training.pretrain(iteration=3, train_iters=9)
    assert attached.windows[-1]["steps"] == [5, 7]


def test_error_in_an_iteration(package: None, tmp_path: Path) -> None:
    """The error reaches the caller; the profiler is off, no region is open, and the recording is kept."""
    with attach(tmp_path / "out", wait=1, warmup=0, active=4) as attached:
        training = Training()
        training.fail_at = 3
        with pytest.raises(ZeroDivisionError):
            training.pretrain(**PROFILE)
        assert not torch.autograd._profiler_enabled()
        assert [(entry["status"], entry["steps"]) for entry in attached.windows] == [("partial", [1, 2])]
        training.fail_at = None
        training.pretrain()
    assert training.module.train_step.__wrapped__ if hasattr(training.module.train_step, "__wrapped__") else True
    assert training.module.train_step.__module__ == training.module.__name__
    assert not hasattr(training.module.train_step, "__wrapped__")


def test_install(package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lenient: None) -> None:
    """`install` drives the loop that the environment requests, and yields to `attach`."""
    arguments = {"out": str(tmp_path / "out"), "wait": 0, "warmup": 0, "active": 1, "modules": False}
    monkeypatch.setenv(RUN, json.dumps(arguments))
    attach_one, adapters = MegatronAdapter.attach, list[MegatronAdapter]()
    monkeypatch.setattr(MegatronAdapter, "attach", lambda adapter: adapters.append(adapter) or attach_one(adapter))
    for cache in (loop_from_environment, install):
        cache.cache_clear()
    try:
        install()
        install()
        training = Training()
        training.pretrain(train_iters=3)
        loop = loop_from_environment()
        assert loop is not None
        assert [entry["steps"] for entry in loop.windows] == [[0, 0]]
        with attach(tmp_path / "own", wait=0, warmup=0, active=1, modules=False) as attached:
            training.pretrain(train_iters=3)
        assert recorded_steps(attached) == [[0, 0]]
        assert not hasattr(training.module.train_step, "__wrapped__")
    finally:
        monkeypatch.undo()
        for cache in (loop_from_environment, install):
            cache.cache_clear()
        for adapter in adapters:
            adapter.detach()


def test_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment variable nothing is attached."""
    monkeypatch.delenv(RUN, raising=False)
    adapters: list[MegatronAdapter] = []
    monkeypatch.setattr(MegatronAdapter, "attach", adapters.append)
    for cache in (loop_from_environment, install):
        cache.cache_clear()
    install()
    install.cache_clear()
    assert [] == adapters


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong arguments fail at once, and a missing Megatron with the command that installs it."""
    with pytest.raises(ValueError, match='"first_step" must be an integer >= 0: -1'):
        attach(first_step=-1)
    with pytest.raises(ValueError, match='"modules" must be'):
        attach(modules=-1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install megatron-core"):
        attach()
