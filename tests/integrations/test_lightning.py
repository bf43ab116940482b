"""Lightning's Trainer with `InstrumentCallback`, from both of its packages."""

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
from instrument.integrations.lightning import InstrumentCallback, InstrumentProfiler
from instrument.integrations.lightning import packages as packages_module
from instrument.integrations.loop import Loop

from ..conftest import annotations
from ..support import nsys
from ..support.programs import environment as environ
from ..support.programs import python, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
from tests.integrations.lightning_support import (  # noqa: F401
    DATA,
    PACKAGES,
    SCRIPT,
    Endless,
    Manual,
    Module,
    OtherModule,
    callback,
    data,
    left_nothing,
    quiet,
    shape,
    steps,
    trainer,
    windowed,
)

# Lightning's own warnings, of small loaders and deprecated functions of torch.


pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


# The script, in its own process


@pytest.fixture(scope="module", params=["lightning", "pytorch_lightning"])
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what the script printed, and its folder."""
    out = tmp_path_factory.mktemp("script")
    done = run(python(SCRIPT, ["--out", str(out)]), environ({"LIGHTNING": request.param, "COLUMNS": "100"}))
    assert "Where the step went" in done.stderr
    return done.stdout, out


@pytest.fixture(scope="module")
def plain() -> str:
    return run(python(SCRIPT), environ({"INSTRUMENT": "0"})).stdout


def test_script_losses(script: tuple[str, Path], plain: str) -> None:
    """The losses are the same as without this library, to the last bit."""
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
    events = windowed(script[1])
    assert expected == shape(events)
    names = Counter(event["name"] for event in events)
    assert {"Linear": 18, "Linear (backward)": 12} == {name: names[name] for name in names if "Linear" in name}


@pytest.mark.nsys
def test_script_nsight_systems(tmp_path: Path, plain: str) -> None:
    """The report of nsys has the ranges of every step, of the sanity check and of the windows."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--out", str(tmp_path / "out")])
    assert plain == report.stdout[report.stdout.index("steps") :][: len(plain)]
    names = Counter(found.name for found in nsys.ranges(report.file) if found.domain == "instrument")
    expected = {
        "sanity check": 1, "evaluation": 2, "checkpoint": 2, "step": 6 + 2, "micro-step": 12, "forward": 12,
        "backward": 12, "Optimizer.step#AdamW.step": 6, "capture": 1,
    }  # fmt: skip
    assert expected == {name: names[name] for name in expected}


def test_two_processes(tmp_path: Path) -> None:
    """Each rank of DDP records its window."""
    run(python(SCRIPT, ["--out", str(tmp_path), "--strategy", "ddp"]), environ())
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert {0: [3, 3], 1: [3, 3]} == {line["rank"]: line["steps"] for line in lines}  # 2 epochs of 2 steps
    for trace in tmp_path.glob("window-*/*.gz"):
        assert {"step", "micro-step", "forward", "backward"} <= {event["name"] for event in annotations(trace)}


# Steps


@pytest.mark.parametrize("batches, accumulate, epochs", [(1, 1, 1), (4, 2, 1), (5, 2, 2), (3, 4, 2)])
def test_steps_are_updates(tmp_path: Path, batches: int, accumulate: int, epochs: int) -> None:
    """There are as many steps as updates, also if the last of an epoch has fewer batches."""
    ours = callback(tmp_path)
    made = trainer(tmp_path, ours, accumulate_grad_batches=accumulate, max_epochs=epochs)
    made.fit(Module(), data(batches))
    assert math.ceil(batches / accumulate) * epochs == made.global_step
    assert [(0, made.global_step - 1)] == steps(ours)
    names = Counter(event["name"] for event in windowed(tmp_path / "out"))
    assert made.global_step == names["step"]
    assert (batches * epochs if accumulate > 1 else 0) == names["micro-step"]


@pytest.mark.parametrize("rare", [False, True])
def test_two_optimizers(tmp_path: Path, rare: bool) -> None:
    """A batch that updates two optimizers is one step; a resumed run continues with the next."""
    ours = callback(tmp_path)
    made = trainer(tmp_path, ours)
    made.fit(Manual(rare), data(4))
    assert (6 if rare else 8) == made.global_step
    assert [(0, 3)] == steps(ours)
    expected = f"  {DATA}\n  step\n    Optimizer.zero_grad#SGD.zero_grad\n    backward"
    assert expected in shape(windowed(tmp_path / "out"))
    made.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)

    resumed = callback(tmp_path / "resumed")
    trainer(tmp_path, resumed, max_epochs=2).fit(Manual(rare), data(4), ckpt_path=tmp_path / "last.ckpt")
    assert [(4, 7)] == steps(resumed)


def test_skipped_updates(tmp_path: Path) -> None:
    """An update that the GradScaler skips is a step, as for Lightning."""
    from lightning.pytorch.plugins import MixedPrecision

    class Infinite(Module):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 1 else 1.0)

    ours = callback(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    made = trainer(tmp_path, ours, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    made.fit(Infinite(), data(3))
    names = Counter(event["name"] for event in windowed(tmp_path / "out"))
    assert (3, [(0, 2)]) == (made.global_step, steps(ours))
    assert {"step": 3, "Optimizer.step#SGD.step": 2}.items() <= names.items()


def test_epoch_cut_short(tmp_path: Path) -> None:
    """A batch that the module skips with the rest of the epoch is not a step, and its regions are closed."""
    module, ours = Module(), callback(tmp_path)
    module.cut = 3
    made = trainer(tmp_path, ours, max_epochs=2, accumulate_grad_batches=2)
    made.fit(module, data(6))
    assert (2, [(0, 1)]) == (made.global_step, steps(ours))
    assert left_nothing(made, ours)
    lines = shape(windowed(tmp_path / "out")).splitlines()
    assert 4 == lines.count("  step")  # in each epoch one complete and one that was cut short
    assert 8 == lines.count("    micro-step")  # including the skipped batch


def test_no_length(tmp_path: Path) -> None:
    """Steps of a stream of unknown length, whose last batch Lightning detects only when it arrives."""
    ours = callback(tmp_path)
    made = trainer(tmp_path, ours, accumulate_grad_batches=2)

    class Stream(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step([batch], batch_idx)

    made.fit(Stream(), DataLoader(Endless(), batch_size=1))
    assert (2, [(0, 1)]) == (made.global_step, steps(ours))


def test_resumed(tmp_path: Path) -> None:
    """A resumed run continues with the number of its next step; checkpoints contain nothing of the callback."""
    ours = callback(tmp_path)
    made = trainer(tmp_path, ours, accumulate_grad_batches=2)
    made.fit(Module(), data(6))
    made.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert {} == torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]

    resumed = callback(tmp_path / "resumed", at=4, wait=None, active=1)
    other = trainer(tmp_path, resumed, accumulate_grad_batches=2, max_epochs=2)
    other.fit(Module(), data(6), ckpt_path=tmp_path / "last.ckpt")
    assert [(4, 4)] == steps(resumed)
    assert "ProfilerStep#4" in {event["name"] for event in windowed(tmp_path / "resumed" / "out")}


# Runs


@PACKAGES
def test_evaluations_are_regions(tmp_path: Path, package: Any, recorded: Any) -> None:
    """Sanity check, validation, test and prediction are regions; before any training, batches are steps."""
    ours = callback(tmp_path, at=100, active=1, wait=None)
    made = trainer(tmp_path, ours, package=package)
    module = Module() if package is pl else OtherModule()

    def runs() -> None:
        made.validate(module, data(1), verbose=False)
        made.fit(module, data(1), data(2))
        made.test(module, data(1), verbose=False)
        made.predict(module, data(1))

    names = [event["name"] for event in recorded(runs)]
    ours_only = [name for name in names if name in ("sanity check", "evaluation", "test", "predict", "step")]
    assert ["evaluation", "step", "sanity check", "step", "evaluation", "test", "predict"] == ours_only
    assert 1 + 2 + 1 + 2 + 1 + 1 == names.count("Linear")
    assert {"not reached"} == {window["status"] for window in ours.loop.windows}
    assert left_nothing(made, ours)


def test_twice(tmp_path: Path) -> None:
    """A second `fit` continues counting, and a `fit` without batches leaves no hook."""
    ours = callback(tmp_path, at=3, active=1, wait=None)
    made, module = trainer(tmp_path, ours), Module()
    made.fit(module, data(2))
    made.fit(module, data(2))
    made.fit_loop.max_epochs = 2
    made.fit(module, data(2))
    assert [None, (3, 3)] == steps(ours)
    assert left_nothing(made, ours)


@pytest.mark.parametrize(
    "error, raised", [(RuntimeError("mine"), RuntimeError), (KeyboardInterrupt(), SystemExit)]
)
@pytest.mark.parametrize("as_profiler", [False, True])
def test_training_fails(tmp_path: Path, error: BaseException, raised: type, as_profiler: bool) -> None:
    """A step that raises leaves no region open and no profiler running, and the recording is kept."""

    def fail(index: int) -> None:
        if index == 1:
            raise error

    module = Module()
    module.body = fail
    if as_profiler:
        ours = InstrumentProfiler(tmp_path / "out", wait=0, warmup=0, active=9)
        made = trainer(tmp_path, profiler=ours)
    else:
        ours = callback(tmp_path)
        made = trainer(tmp_path, ours, enable_checkpointing=True)
    with pytest.raises(raised):
        made.fit(module, data(3), data(1))
    assert left_nothing(made, ours)
    assert not ours.loop._open
    assert [(0, 0)] == steps(ours)
    assert [1] == [window["cut_step"] for window in ours.loop.windows]
    assert "step" in {event["name"] for event in windowed(tmp_path / "out")}
    if as_profiler:
        assert "Where the step went" in ours.summary()

    made.fit(Module(), data(3))  # the next run is not affected
    assert left_nothing(made, ours)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("broken", ["Patch", "annotate", "profile"])
def test_failures_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A failure of this library neither stops the training nor changes it."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    def losses(*added: Any) -> list[str]:
        module = Module()
        made = trainer(tmp_path, *added, accumulate_grad_batches=2, max_epochs=2)
        made.fit(module, data(4), data(1))
        return module.losses

    expected = losses()
    ours = callback(tmp_path)
    if broken == "Patch":
        monkeypatch.setattr(adapter_module, "Patch", fail)
    elif broken == "annotate":
        monkeypatch.setattr("instrument.annotate", fail)
    else:
        monkeypatch.setattr(ours.loop._profile, "step", fail)
    assert expected == losses(ours)
    assert Loop.current() is None


def test_fast_dev_run(tmp_path: Path) -> None:
    """A run of one batch ends before the window, as the manifest says."""
    ours = InstrumentCallback(tmp_path / "out", wait=2, warmup=1, active=1)
    trainer(tmp_path, ours, fast_dev_run=True).fit(Module(), data(3), data(1))
    assert ["not reached"] == [window["status"] for window in ours.loop.windows]


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSTRUMENT=0 nothing is patched and no loop starts."""
    monkeypatch.setattr("instrument.config.settings.enabled", False)
    ours, module, seen = callback(tmp_path), Module(), []
    made = trainer(tmp_path, ours)
    module.body = lambda index: seen.append(left_nothing(made, ours))
    made.fit(module, data(2), data(1))
    assert [True, True] == seen


# Construction


@PACKAGES
def test_both_packages(tmp_path: Path, package: Any) -> None:
    """The Trainers of both packages accept the callback, also its class, the profiler, and subclasses."""

    class Mine(InstrumentCallback):
        pass

    for kind in (InstrumentCallback, Mine):
        ours = kind(tmp_path)
        assert isinstance(ours, kind) and isinstance(ours, package.Callback)
        assert kind.__qualname__ == ours.state_key
        assert ours in package.Trainer(callbacks=ours, logger=False, enable_checkpointing=False).callbacks
    assert isinstance(InstrumentProfiler(tmp_path), package.profilers.Profiler)


def test_copies(tmp_path: Path) -> None:
    """A Trainer with a callback can be copied and pickled, as for spawned processes, also after a run."""
    ours, profiler = (
        callback(tmp_path, on_summary=None),
        InstrumentProfiler(tmp_path / "profiler", wait=3, active=1),
    )
    made = trainer(tmp_path, ours)
    made.fit(Module(), data(1))
    for again in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), copy.deepcopy(made).callbacks[0]):
        assert type(ours) is type(again)
        assert again.loop is not ours.loop
        assert ours.loop._recording["out"] == again.loop._recording["out"]
    made = trainer(tmp_path, profiler=profiler)
    made.fit(Module(), data(1))
    again = pickle.loads(pickle.dumps(made.profiler))
    assert (type(profiler), []) == (type(again), again.loop.windows)
    again = copy.deepcopy(made)
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
    monkeypatch.setattr(packages_module, "PACKAGES", ("no_such_package.pytorch", "no_such_package"))
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
        ours = InstrumentCallback(tmp_path / str(level), wait=0, warmup=0, active=2)
        trainer(tmp_path, ours).fit(Module(), data(3))
        assert logged == ("Where the step went" in caplog.text)
        if not logged:
            assert "Where the step went" in capfd.readouterr().err
