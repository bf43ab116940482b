"""`InstrumentCallback` in the Trainer of both Lightning packages."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrument.integrations import adapter as adapter_module
from instrument.integrations import lightning as module
from instrument.integrations.lightning import InstrumentCallback, InstrumentProfiler
from instrument.integrations.loop import Loop
from instrument.record.windows.profile import Profile

from ..conftest import annotations
from ..support import nsys, warm
from ..support.programs import environment as environ
from ..support.programs import python

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
from tests.integrations.lightning_support import (  # noqa: F401
    DATA,
    PACKAGES,
    SCRIPT,
    Endless,
    ManualModule,
    Module,
    OtherModule,
    callback,
    data,
    is_clean,
    quiet,
    recorded_events,
    region_tree,
    steps,
    trainer,
)

# Lightning warns of small loaders and deprecated functions of torch.


pytestmark = [
    pytest.mark.framework,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


# The script, in its own process

IMPORTS = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(scope="module", params=["lightning", "pytorch_lightning"])
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the script's output and its folder."""
    out = tmp_path_factory.mktemp("script")
    env = environ({"LIGHTNING": request.param, "COLUMNS": "100"})
    done = warm.run(python(SCRIPT, ["--out", str(out)]), env, check=True, imports=IMPORTS)
    assert "Where the step went" in done.stderr
    return done.stdout, out


@pytest.fixture(scope="module")
def plain() -> str:
    return warm.run(python(SCRIPT), environ({"INSTRUMENT": "0"}), check=True, imports=IMPORTS).stdout


def test_script_losses(script: tuple[str, Path], plain: str) -> None:
    """The losses are bit-identical to those without this library."""
    assert plain == script[0]
    assert plain.startswith("steps 6, losses 0x")


STEP = f"""
{DATA}
step
  micro-step
    forward
    Optimizer.zero_grad#AdamW.zero_grad
    backward
  {DATA}
  micro-step
    Optimizer.step#AdamW.step
      forward
      backward"""


BETWEEN = f"""
evaluation
  {DATA}
  {DATA}
checkpoint"""


def test_script_regions(script: tuple[str, Path]) -> None:
    """Two steps of two batches each are recorded, with validation and checkpoint between the epochs."""
    first, second = (f"ProfilerStep#{number}{part}" for number, part in ((3, BETWEEN + STEP), (4, STEP)))
    expected = "\n".join(part.replace("\n", "\n  ") for part in (first, second))
    events = recorded_events(script[1])
    assert expected == region_tree(events)
    names = Counter(event["name"] for event in events)
    assert {"Linear": 18, "Linear (backward)": 12} == {name: names[name] for name in names if "Linear" in name}


@pytest.mark.nsys
def test_script_nsight_systems(tmp_path: Path, plain: str) -> None:
    """A report of nsys has the ranges of every step, the sanity check and the windows."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--out", str(tmp_path / "out")], imports=IMPORTS)
    assert plain == report.stdout[report.stdout.index("steps") :][: len(plain)]
    names = Counter(found.name for found in nsys.ranges(report.file) if found.domain == "instrument")
    expected = {
        "sanity check": 1, "evaluation": 2, "checkpoint": 2, "step": 6 + 2, "micro-step": 12, "forward": 12,
        "backward": 12, "Optimizer.step#AdamW.step": 6, "capture": 1,
    }  # fmt: skip
    assert expected == {name: names[name] for name in expected}


def test_two_processes(tmp_path: Path) -> None:
    """Each rank of DDP records its window."""
    command = python(SCRIPT, ["--out", str(tmp_path), "--strategy", "ddp"])
    warm.run(command, environ(), check=True, imports=IMPORTS)  # starts the second one
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert {0: [3, 3], 1: [3, 3]} == {line["rank"]: line["steps"] for line in lines}  # 2 epochs of 2 steps
    for trace in tmp_path.glob("window-*/*.gz"):
        assert {"step", "micro-step", "forward", "backward"} <= {event["name"] for event in annotations(trace)}


# Steps


@pytest.mark.parametrize("batches, accumulate, epochs", [(1, 1, 1), (4, 2, 1), (5, 2, 2), (3, 4, 2)])
def test_steps_are_updates(tmp_path: Path, batches: int, accumulate: int, epochs: int) -> None:
    """The number of steps is the number of updates, also if the last one of an epoch has fewer batches."""
    adapter = callback(tmp_path)
    pl_trainer = trainer(tmp_path, adapter, accumulate_grad_batches=accumulate, max_epochs=epochs)
    pl_trainer.fit(Module(), data(batches))
    assert math.ceil(batches / accumulate) * epochs == pl_trainer.global_step
    assert [(0, pl_trainer.global_step - 1)] == steps(adapter)
    (window,) = adapter.loop.windows
    firsts = [number * math.ceil(batches / accumulate) for number in range(epochs)]
    assert firsts == window["timing"]["lengths"]["epochs"]
    names = Counter(event["name"] for event in recorded_events(tmp_path / "out"))
    assert pl_trainer.global_step == names["step"]
    assert (batches * epochs if accumulate > 1 else 0) == names["micro-step"]


@pytest.mark.parametrize("rare", [False, True])
def test_two_optimizers(tmp_path: Path, rare: bool) -> None:
    """A batch that updates two optimizers is one step; a resumed run continues with the next number."""
    adapter = callback(tmp_path)
    pl_trainer = trainer(tmp_path, adapter)
    pl_trainer.fit(ManualModule(rare), data(4))
    assert (6 if rare else 8) == pl_trainer.global_step
    assert [(0, 3)] == steps(adapter)
    expected = f"  {DATA}\n  step\n    Optimizer.zero_grad#SGD.zero_grad\n    backward"
    assert expected in region_tree(recorded_events(tmp_path / "out"))
    pl_trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)

    resumed = callback(tmp_path / "resumed")
    trainer(tmp_path, resumed, max_epochs=2).fit(ManualModule(rare), data(4), ckpt_path=tmp_path / "last.ckpt")
    assert [(4, 7)] == steps(resumed)


def test_skipped_updates(tmp_path: Path) -> None:
    """An update that the GradScaler skips is a step, as in Lightning."""
    from lightning.pytorch.plugins import MixedPrecision

    class Infinite(Module):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 1 else 1.0)

    adapter = callback(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    pl_trainer = trainer(tmp_path, adapter, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    pl_trainer.fit(Infinite(), data(3))
    names = Counter(event["name"] for event in recorded_events(tmp_path / "out"))
    assert (3, [(0, 2)]) == (pl_trainer.global_step, steps(adapter))
    assert {"step": 3, "Optimizer.step#SGD.step": 2}.items() <= names.items()


def test_epoch_cut_short(tmp_path: Path) -> None:
    """A batch that the module skips with the rest of its epoch is not a step, and its regions are closed."""
    module, adapter = Module(), callback(tmp_path)
    module.cut = 3
    pl_trainer = trainer(tmp_path, adapter, max_epochs=2, accumulate_grad_batches=2)
    pl_trainer.fit(module, data(6))
    assert (2, [(0, 1)]) == (pl_trainer.global_step, steps(adapter))
    assert is_clean(pl_trainer, adapter)
    lines = region_tree(recorded_events(tmp_path / "out")).splitlines()
    assert 4 == lines.count("  step")  # one complete and one cut short per epoch
    assert 8 == lines.count("    micro-step")  # including the skipped batch


def test_loader_without_length(tmp_path: Path) -> None:
    """The steps of a stream of unknown length are counted, although Lightning detects the last batch late."""
    adapter = callback(tmp_path)
    pl_trainer = trainer(tmp_path, adapter, accumulate_grad_batches=2)

    class Stream(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step([batch], batch_idx)

    pl_trainer.fit(Stream(), DataLoader(Endless(), batch_size=1))
    assert (2, [(0, 1)]) == (pl_trainer.global_step, steps(adapter))


def test_resumed_run(tmp_path: Path) -> None:
    """A resumed run continues with its next step; checkpoints have no state of the callback."""
    adapter = callback(tmp_path)
    pl_trainer = trainer(tmp_path, adapter, accumulate_grad_batches=2)
    pl_trainer.fit(Module(), data(6))
    pl_trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert {} == torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]

    resumed = callback(tmp_path / "resumed", at=4, wait=None, active=1)
    other = trainer(tmp_path, resumed, accumulate_grad_batches=2, max_epochs=2)
    other.fit(Module(), data(6), ckpt_path=tmp_path / "last.ckpt")
    assert [(4, 4)] == steps(resumed)
    assert "ProfilerStep#4" in {event["name"] for event in recorded_events(tmp_path / "resumed" / "out")}


# Runs


@PACKAGES
def test_evaluations_are_regions(tmp_path: Path, package: Any, recorded: Any) -> None:
    """Sanity check, validation, test and prediction are regions; before any training, batches are steps."""
    adapter = callback(tmp_path, at=100, active=1, wait=None)
    pl_trainer = trainer(tmp_path, adapter, package=package)
    module = Module() if package is pl else OtherModule()

    def runs() -> None:
        pl_trainer.validate(module, data(1), verbose=False)
        pl_trainer.fit(module, data(1), data(2))
        pl_trainer.test(module, data(1), verbose=False)
        pl_trainer.predict(module, data(1))

    names = [event["name"] for event in recorded(runs)]
    ours_only = [name for name in names if name in ("sanity check", "evaluation", "test", "predict", "step")]
    assert ["evaluation", "step", "sanity check", "step", "evaluation", "test", "predict"] == ours_only
    assert 1 + 2 + 1 + 2 + 1 + 1 == names.count("Linear")
    assert {"not reached"} == {window["status"] for window in adapter.loop.windows}
    assert is_clean(pl_trainer, adapter)


def test_fit_twice(tmp_path: Path) -> None:
    """A second `fit` continues counting, and a `fit` without batches leaves no hook."""
    adapter = callback(tmp_path, at=3, active=1, wait=None)
    pl_trainer, module = trainer(tmp_path, adapter), Module()
    pl_trainer.fit(module, data(2))
    pl_trainer.fit(module, data(2))
    pl_trainer.fit_loop.max_epochs = 2
    pl_trainer.fit(module, data(2))
    assert [None, (3, 3)] == steps(adapter)
    assert is_clean(pl_trainer, adapter)


@pytest.mark.parametrize("error, raised", [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit)])
@pytest.mark.parametrize("as_profiler", [False, True])
def test_failing_training(tmp_path: Path, error: type[BaseException], raised: type, as_profiler: bool) -> None:
    """A step that raises leaves no open region and no running profiler, and the recording is kept."""

    def fail(index: int) -> None:
        if index == 1:
            raise error

    module = Module()
    module.body = fail
    if as_profiler:
        adapter = InstrumentProfiler(tmp_path / "out", wait=0, warmup=0, active=9)
        pl_trainer = trainer(tmp_path, profiler=adapter)
    else:
        adapter = callback(tmp_path)
        pl_trainer = trainer(tmp_path, adapter, enable_checkpointing=True)
    with pytest.raises(raised):
        pl_trainer.fit(module, data(3), data(1))
    assert is_clean(pl_trainer, adapter)
    assert [(0, 0)] == steps(adapter)
    assert [1] == [window["cut_step"] for window in adapter.loop.windows]
    names = {event["name"] for event in recorded_events(tmp_path / "out")}
    assert "step" in names
    assert not any(map(adapter.loop.is_open, names))
    if as_profiler:
        assert "Where the step went" in adapter.summary()

    pl_trainer.fit(Module(), data(3))  # the next run is not affected
    assert is_clean(pl_trainer, adapter)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("broken", ["Patch", "annotate", "profile"])
def test_failures_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A failure of this library neither stops the training nor changes it."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("internal")

    def losses(*added: Any) -> list[str]:
        module = Module()
        pl_trainer = trainer(tmp_path, *added, accumulate_grad_batches=2, max_epochs=2)
        pl_trainer.fit(module, data(4), data(1))
        return module.losses

    expected = losses()
    adapter = callback(tmp_path)
    if broken == "Patch":
        monkeypatch.setattr(adapter_module, "Patch", fail)
    elif broken == "annotate":
        monkeypatch.setattr("instrument.annotate", fail)
    else:
        monkeypatch.setattr(Profile, "step", fail)
    assert expected == losses(adapter)
    assert Loop.current() is None


def test_fast_dev_run(tmp_path: Path) -> None:
    """A run of one batch ends before the window, which the manifest reports."""
    adapter = InstrumentCallback(tmp_path / "out", wait=2, warmup=1, active=1)
    trainer(tmp_path, adapter, fast_dev_run=True).fit(Module(), data(3), data(1))
    assert ["not reached"] == [window["status"] for window in adapter.loop.windows]


def test_instrument_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSTRUMENT=0 nothing is patched and no loop starts."""
    monkeypatch.setattr("instrument.base.config.settings.enabled", False)
    adapter, module, seen = callback(tmp_path), Module(), []
    pl_trainer = trainer(tmp_path, adapter)
    module.body = lambda index: seen.append(is_clean(pl_trainer, adapter))
    pl_trainer.fit(module, data(2), data(1))
    assert [True, True] == seen


# Construction


@PACKAGES
def test_both_packages(tmp_path: Path, package: Any) -> None:
    """The Trainers of both packages accept the callback, its class, its subclasses, and the profiler."""

    class Mine(InstrumentCallback):
        pass

    for kind in (InstrumentCallback, Mine):
        adapter = kind(tmp_path)
        assert isinstance(adapter, kind) and isinstance(adapter, package.Callback)
        assert kind.__qualname__ == adapter.state_key
        assert adapter in package.Trainer(callbacks=adapter, logger=False, enable_checkpointing=False).callbacks
    assert isinstance(InstrumentProfiler(tmp_path), package.profilers.Profiler)


def test_copying_and_pickling(tmp_path: Path) -> None:
    """A Trainer with a callback can be copied and pickled, as for spawned processes, even after a run."""
    adapter, profiler = (
        callback(tmp_path, on_summary=None),
        InstrumentProfiler(tmp_path / "profiler", wait=3, active=1),
    )
    pl_trainer = trainer(tmp_path, adapter)
    pl_trainer.fit(Module(), data(1))
    for again in (
        pickle.loads(pickle.dumps(adapter)),
        copy.deepcopy(adapter),
        copy.deepcopy(pl_trainer).callbacks[0],
    ):
        assert type(adapter) is type(again)
        assert again.loop is not adapter.loop
        assert adapter.loop.manifest == again.loop.manifest
    pl_trainer = trainer(tmp_path, profiler=profiler)
    pl_trainer.fit(Module(), data(1))
    again = pickle.loads(pickle.dumps(pl_trainer.profiler))
    assert (type(profiler), []) == (type(again), again.loop.windows)
    again = copy.deepcopy(pl_trainer)
    assert again.callbacks[0].loop is again.profiler.loop


def test_wrong_arguments(tmp_path: Path) -> None:
    """Wrong arguments fail at once."""
    for kind in (InstrumentCallback, InstrumentProfiler):
        with pytest.raises(ValueError, match='"active" must be an integer >= 1: 0'):
            kind(tmp_path, active=0)
        with pytest.raises(TypeError, match='unknown option "waits"'):
            kind(tmp_path, waits=3)


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Lightning, the error says how to install it."""
    monkeypatch.setattr(module, "PACKAGES", ("no_such_package.pytorch", "no_such_package"))
    with pytest.raises(ImportError, match="Lightning is not installed: pip install lightning"):
        InstrumentCallback(tmp_path)


def test_summary_goes_to_the_log(tmp_path: Path, caplog: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary goes to Lightning's log, or to standard error if that log is silenced."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    for level, logged in ((logging.INFO, True), (logging.ERROR, False)):
        logger.setLevel(level)
        caplog.clear()
        capfd.readouterr()
        adapter = InstrumentCallback(tmp_path / str(level), wait=0, warmup=0, active=2)
        trainer(tmp_path, adapter).fit(Module(), data(3))
        assert logged == ("Where the step went" in caplog.text)
        if not logged:
            assert "Where the step went" in capfd.readouterr().err
