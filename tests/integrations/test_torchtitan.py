"""torchtitan's Trainer, and others with a `train_step`."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.integrations import adapter as adapters
from instrument.integrations import torchtitan
from instrument.integrations.adapter import Adapter
from instrument.integrations.loop import Loop
from instrument.integrations.torchtitan import attach
from tests.integrations.trees import recorded, traces, tree
from tests.support import nsys, warm
from tests.support.programs import ROOT, environment, python

pytestmark = pytest.mark.framework

FOLDER = ROOT / "integrations/torchtitan"
PARTS = [
    "step", "micro-step", "data", "Model", "backward", "clip_grad_norm_", "checkpoint", "evaluation",
    "Optimizer.step", "Optimizer.zero_grad",
]  # fmt: skip
STEP = """\
step
  Optimizer.zero_grad#AdamW.zero_grad
  data
  data
  micro-step
    Model
    backward
  micro-step
    Model
    backward
  clip_grad_norm_
  Optimizer.step#AdamW.step"""
STEPS = f"{STEP}\ncheckpoint\nevaluation\n  Model\n{STEP}\ncheckpoint\nevaluation\n  Model"


def start(*args: str | Path, script: str = "trainer.py", **env: str) -> str:
    return warm.run([*python(FOLDER / script), *args], environment(env), check=True).stdout


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("annotated")
    return folder, start("--out", folder)


def test_same_losses(annotated: tuple[Path, str], tmp_path: Path) -> None:
    """With and without this library, the script prints bit-identical losses."""
    plain = start("--out", tmp_path, INSTRUMENT="0")
    assert len(losses(plain)) == 8
    assert plain == annotated[1]
    assert [] == list(tmp_path.iterdir())


def test_regions_of_the_script(annotated: tuple[Path, str]) -> None:
    """A step has its parts; the checkpoint and validation after it are in its window."""
    assert tree(recorded(annotated[0]), PARTS) == STEPS
    assert [(entry["status"], entry["steps"]) for entry in manifest(annotated[0])] == [("recorded", [3, 4])]


def test_resumed_run(tmp_path: Path) -> None:
    """Steps have the trainer's numbers; cycles count from the first step after the checkpoint."""
    start("--out", tmp_path, "--resume", "100")
    assert [entry["steps"] for entry in manifest(tmp_path)] == [[103, 104]]


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path) -> None:
    """A report of Nsight Systems has the ranges."""
    report = nsys.profile(FOLDER / "trainer.py", tmp_path=tmp_path, args=["--out", str(tmp_path)])
    found = tree(nsys.ranges(report.file), [part for part in PARTS if part not in ("Model",)])
    assert STEP.replace("    Model\n", "") in found


class Trainer:
    """The smallest trainer that can be followed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.step = 0
        self.fail_at = fail_at
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_step(self) -> float:
        loss = self.model(torch.ones(1, 2)).sum()
        loss.backward()
        if self.step == self.fail_at:
            raise RuntimeError("out of data")
        self.optimizer.step()
        return float(loss.detach())

    def train(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            self.step += 1
            found.append(self.train_step())
        return found


class Subclass(Trainer):
    def train_step(self) -> float:
        return 2 * super().train_step()


@pytest.fixture(autouse=True)
def classes_are_restored() -> Iterator[None]:
    before = dict(vars(Trainer)), dict(vars(Subclass))
    yield
    assert before == (dict(vars(Trainer)), dict(vars(Subclass)))
    assert Loop.current() is None


def steps(attached: Adapter) -> list[list[int]]:
    return [entry["steps"] for entry in attached.loop.windows if entry["status"] == "recorded"]


def plain(steps: int, kind: type[Trainer] = Trainer) -> list[float]:
    torch.manual_seed(0)
    return kind().train(steps)


def test_subclass(tmp_path: Path) -> None:
    """A subclass with its own `train_step` makes each step once."""
    with attach(tmp_path, at=2, active=1, trainer=Trainer) as attached:
        assert plain(4, Subclass) == plain(4, Subclass)
    assert tree(recorded(tmp_path), ["step"]) == "step\nstep"
    assert steps(attached) == [[2, 2], [2, 2]]


def test_two_trainings_of_an_instance(tmp_path: Path) -> None:
    """An instance is followed through two trainings, and is restored by `detach`."""
    trainer = Trainer()
    before = dict(vars(trainer))
    attached = attach(tmp_path, at="2,5", trainer=trainer)
    trainer.train(3)
    assert not attached.loop.running
    trainer.train(3)
    attached.detach()
    attached.detach()
    assert {**before, "step": 6} == vars(trainer)
    assert steps(attached) == [[2, 2], [5, 5]]


def test_successive_trainers(tmp_path: Path) -> None:
    """Successive trainers drive the loop in turn, each with its schedule."""
    with attach(tmp_path, at="2,4", trainer=Trainer) as attached:
        Trainer().train(2)
        Trainer().train(5)
    assert steps(attached) == [[2, 2], [2, 2], [4, 4]]


def test_alternating_trainers(tmp_path: Path) -> None:
    """Of two alternating trainers, one drives the loop."""
    with attach(tmp_path, at="0,2", trainer=Trainer) as attached:
        one, other = Trainer(), Trainer()
        for _ in range(3):
            one.train_step()
            other.train_step()
    assert tree(recorded(tmp_path), ["step"]) == "step\nstep"
    assert steps(attached) == [[0, 0], [2, 2]]


def test_error_in_step(tmp_path: Path) -> None:
    """An error in a step propagates, and the step is not in the window."""
    with attach(tmp_path, at=[2], active=3, trainer=Trainer) as attached:
        with pytest.raises(RuntimeError, match="out of data"):
            Trainer(fail_at=4).train(6)
        assert not torch.autograd._profiler_enabled()
        assert not attached.loop.running
        assert not any(map(attached.loop.is_open, ("step", "data")))
    (entry,) = attached.loop.windows
    assert (entry["status"], entry["steps"]) == ("partial", [2, 3])


def test_retried_step(tmp_path: Path) -> None:
    """A step that failed and is retried counts once."""
    trainer = Trainer(fail_at=0)
    with attach(tmp_path, at=1, trainer=trainer) as attached:
        with pytest.raises(RuntimeError):
            trainer.train_step()
        trainer.fail_at = None
        trainer.train_step()
    assert [entry["status"] for entry in attached.loop.windows] == ["not reached"]


@pytest.mark.usefixtures("lenient")
def test_failures_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of this library does not change the losses."""
    expected = plain(4)
    monkeypatch.setattr(Loop, "start", lambda *_, **__: 1 / 0)
    with attach(tmp_path, trainer=Trainer):
        assert plain(4) == expected


@pytest.mark.usefixtures("lenient")
def test_trainer_without_attributes(tmp_path: Path) -> None:
    """A trainer that accepts no attributes trains without being followed."""

    class Slots:
        __slots__ = ()

        def train_step(self) -> int:
            return 1

    with attach(tmp_path, trainer=Slots):
        assert Slots().train_step() == 1


def test_profiler_of_the_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the trainer's own profiler records, no window opens, and a warning is logged."""
    trainer: Any = Trainer()
    trainer.config = SimpleNamespace(profiler=SimpleNamespace(enable_profiling=True))
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    got: list[instrument.StepNumbers] = []
    adapter = attach(tmp_path, trainer=trainer, at="2-3", on_steps=got.append)
    with caplog.at_level(logging.WARNING, "instrument"), adapter, own:
        trainer.train(6)
    assert "enable_profiling" in caplog.text
    assert [] == traces(tmp_path)
    assert [(6, 5)] == [(numbers["instrument/step"], numbers["instrument/steps"]) for numbers in got]
    assert [event.count for event in own.key_averages() if event.key == "step"] == [6]


def test_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`install` follows torchtitan's Trainer for the environment's loop, and has no effect without one."""
    attach_one, found = torchtitan.TorchtitanAdapter.attach, list[Adapter]()
    monkeypatch.setattr(torchtitan.TorchtitanAdapter, "attach", lambda adapter: found.append(attach_one(adapter)))
    module: Any = SimpleNamespace(Trainer=Trainer)
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", module)
    for loop in (None, Loop(tmp_path, at=1)):
        monkeypatch.setattr(adapters, "loop_from_environment", lambda loop=loop: loop)
        torchtitan.install.cache_clear()
        torchtitan.install()
    torchtitan.install.cache_clear()
    (adapter,) = found
    with adapter:
        Trainer().train(3)
    assert [[1, 1]] == steps(adapter)


def test_wrong_arguments(tmp_path: Path) -> None:
    """A trainer that cannot be followed is rejected at once."""
    with pytest.raises(TypeError, match=r'"trainer" must be .* with a method "train_step"'):
        attach(tmp_path, trainer=nn.Linear)
    if importlib.util.find_spec("torchtitan") is None:
        with pytest.raises(ImportError, match="pip install torchtitan"):
            attach(tmp_path)


REAL = ["step", "micro-step", "data", "Llama3Model", "backward", "Optimizer.step"]
REAL_STEP = """\
step
  data
  data
  micro-step
    Llama3Model
    backward
  micro-step
    Llama3Model
    backward
  Optimizer.step#OptimizersContainer.step
    Optimizer.step#AdamW.step"""


def test_real_trainer(tmp_path: Path) -> None:
    """The Trainer of torchtitan trains a Llama with the same losses and the expected tree of steps."""
    missing = [name for name in ("torchtitan", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"torchtitan's Trainer needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    plain = start("--out", tmp_path, script="train.py", INSTRUMENT="0")
    assert len(losses(plain)) == 6
    assert losses(start("--out", tmp_path, script="train.py")) == losses(plain)
    assert tree(recorded(tmp_path), REAL) == f"{REAL_STEP}\n{REAL_STEP}"
    assert [entry["steps"] for entry in manifest(tmp_path)] == [[3, 4]]
