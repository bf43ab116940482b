"""Trainers that `instrument run` follows, and evaluations without training."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instrument.integrations.lightning import (
    AutomaticCallback,
    InstrumentCallback,
    InstrumentProfiler,
    _patches,
    callbacks,
    install,
)
from instrument.integrations.loop import loop_from_environment

from ..support.programs import environment as environ

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
from tests.integrations.lightning_support import (  # noqa: F401
    PACKAGES,
    Module,
    OtherModule,
    callback,
    data,
    is_clean,
    quiet,
    recorded_events,
    steps,
    trainer,
)

pytestmark = [
    pytest.mark.framework,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Request windows in this folder by the environment."""
    plan = {"out": str(tmp_path / "requested"), "wait": 0, "warmup": 0, "active": 2}
    monkeypatch.setenv("INSTRUMENT_RUN", json.dumps(plan))
    loop_from_environment.cache_clear()
    yield tmp_path / "requested"
    loop_from_environment.cache_clear()
    while _patches:
        _patches.popitem()[1].undo()


def automatic(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, AutomaticCallback)]


@PACKAGES
def test_not_requested(tmp_path: Path, package: Any) -> None:
    """Without the environment variable a Trainer gets no callback, and its class is unchanged."""
    before = package.Trainer.__init__
    install()
    assert (before, []) == (package.Trainer.__init__, callbacks())
    assert [] == [c for c in trainer(tmp_path, package=package).callbacks if isinstance(c, InstrumentCallback)]


@PACKAGES
def test_installed(tmp_path: Path, requested: Path, package: Any) -> None:
    """Each Trainer has one callback that drives the loop of the process, after any number of installs."""
    install()
    install()
    pl_trainer = trainer(tmp_path, package=package)
    assert 1 == len(automatic(pl_trainer))
    pl_trainer.fit(Module() if package is pl else OtherModule(), data(3))
    assert {"step", "forward", "backward"} <= {event["name"] for event in recorded_events(requested)}


def test_explicit_callbacks_take_precedence(tmp_path: Path, requested: Path) -> None:
    """A callback or profiler of the program takes precedence; of several, the first does."""
    install()
    adapter, second = callback(tmp_path), callback(tmp_path / "second")
    pl_trainer = trainer(tmp_path, AutomaticCallback(), adapter, second)
    pl_trainer.fit(Module(), data(3))
    assert ([(0, 2)], []) == (steps(adapter), steps(second))
    names = Counter(event["name"] for event in recorded_events(tmp_path / "out"))
    assert (3, 3) == (names["step"], names["forward"])
    profiler = InstrumentProfiler(tmp_path / "profiler", wait=0, warmup=0, active=2)
    trainer(tmp_path, profiler=profiler).fit(Module(), data(3))
    assert [(0, 1)] == steps(profiler)
    assert not requested.exists()


def test_within_another_loop(tmp_path: Path, requested: Path) -> None:
    """An evaluation inside another loop is a region of that loop, and does not stop it."""
    loop = loop_from_environment()
    loop.start()
    try:
        pl_trainer = trainer(tmp_path, AutomaticCallback())
        pl_trainer.validate(Module(), data(1), verbose=False)
        failing = Module()
        failing.validation_step = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            pl_trainer.validate(failing, data(1), verbose=False)
        assert loop.running
        assert not any(map(loop.is_open, ("evaluation", "step")))
    finally:
        loop.stop()
    assert "evaluation" in {event["name"] for event in recorded_events(requested)}


def test_wrong_environment(tmp_path: Path, requested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong environment variable does not stop a Trainer."""
    monkeypatch.setenv("INSTRUMENT_RUN", '{"active": 0}')
    loop_from_environment.cache_clear()
    install()
    assert [] == callbacks()
    assert [] == automatic(trainer(tmp_path))


def test_entry_point_is_light() -> None:
    """Loading the entry point imports only a few small modules."""
    code = """
import sys
import instrument.integrations.lightning as door
assert door.callbacks() == []
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("instrument.")}))
print(len([name for name in sys.modules if name.startswith("instrument.")]) < 20)
print(sorted({"torch", "lightning", "pytorch_lightning", "structlog", "wrapt"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ())
    assert "['base', 'integrations']\nTrue\n[]\n" == done.stdout


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_without_training(tmp_path: Path, method: str) -> None:
    """In an evaluation without earlier training, batches are steps."""
    adapter = callback(tmp_path, wait=1, active=2, repeat=1)
    pl_trainer = trainer(tmp_path, adapter)
    getattr(pl_trainer, method)(Module(), data(5), **({} if method == "predict" else {"verbose": False}))
    assert [(1, 2)] == steps(adapter)
    names = Counter(event["name"] for event in recorded_events(tmp_path / "out"))
    assert (2, 2) == (names["step"], names["Linear"])
    assert is_clean(pl_trainer, adapter)


def test_evaluation_too_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation that records nothing logs the reason."""
    adapter = callback(tmp_path, wait=50, active=2, repeat=1)
    trainer(tmp_path, adapter).validate(Module(), data(3), verbose=False)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "instrument"]
    assert message.startswith("instrument: no window was recorded in ")
    assert "steps 50-51 were planned, and the loop ended before step 3" in message
