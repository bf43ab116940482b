"""Lightning's Trainer with the callback, the profiler, and neither, from both of its packages."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from instrument.integrations import adapter as adapter_module
from instrument.integrations import environment
from instrument.integrations.lightning import InstrumentCallback, InstrumentProfiler, callbacks, install
from instrument.integrations.lightning import packages as packages_module
from instrument.integrations.lightning.auto import AutomaticCallback, _patches
from instrument.integrations.loop import Loop

from ..conftest import annotations
from ..support import nsys
from ..support.programs import ROOT, python, run
from ..support.programs import environment as environ
from ..support.ranges import Range, outline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    import pytorch_lightning

# Lightning's own, of small loaders and of what torch no longer likes.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
PACKAGES = pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
SCRIPT = ROOT / "integrations" / "lightning" / "train.py"
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


class Training:
    """What a module of either package does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.losses: list[str] = []
        self.body: Callable[[int], Any] = lambda index: None

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item().hex())
        self.body(batch_idx)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == getattr(self, "cut", None) else None

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    test_step = validation_step

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Module(Training, pl.LightningModule):
    """One optimizer, stepped by Lightning."""


class OtherModule(Training, pytorch_lightning.LightningModule):
    """The same in the other package."""


class Manual(Module):
    """Two optimizers, as of a GAN, stepped by the module: the second one on every other batch if ``rare``."""

    def __init__(self, rare: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rare = rare

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            if not (number and self.rare and batch_idx % 2):
                optimizer.zero_grad()
                self.manual_backward(self.net(batch[0]).square().mean())
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]


def data(batches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(2 * batches, 4, generator=generator)), batch_size=2)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(3, 4))


def trainer(tmp_path: Path, *added: Any, package: Any = pl, **arguments: Any) -> Any:
    quiet: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    return package.Trainer(callbacks=list(added), **quiet | arguments)


def callback(tmp_path: Path, **arguments: Any) -> Any:
    """One that records all steps."""
    plan = {"wait": 0, "warmup": 0, "active": 1000, "tell": lambda text: None}
    return InstrumentCallback(tmp_path / "out", **plan | arguments)


def steps(callback: Any) -> list[Any]:
    """The first and the last step of each window."""
    return [window["steps"] and tuple(window["steps"]) for window in callback.loop.windows]


def windowed(out: Path) -> list[dict[str, Any]]:
    (trace,) = out.glob("window-*/*.gz")
    return annotations(trace)


def shape(events: list[dict[str, Any]]) -> str:
    """The regions as a tree, without those of modules."""
    ranges = [
        Range(e["name"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000), "push_pop", e["tid"], e["pid"])
        for e in events
        if e["name"].removesuffix(" (backward)") not in ("Linear", "ReLU", "Sequential")
    ]
    return outline(ranges)


def left_nothing(trainer: Any, callback: Any) -> bool:
    patched = {"save_checkpoint", "training_step"} & (vars(trainer).keys() | vars(trainer.strategy).keys())
    return not (patched or callback.loop.running or Loop.current() or torch.autograd._profiler_enabled())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide what Lightning says, and let it not take Ctrl-C away."""
    handler = signal.getsignal(signal.SIGINT)
    for package in (pl, pytorch_lightning):
        logging.getLogger(package.__name__).setLevel(logging.WARNING)
    yield
    for package in (pl, pytorch_lightning):
        logging.getLogger(package.__name__).setLevel(logging.INFO)
    signal.signal(signal.SIGINT, handler)


# The script, in processes of its own.


@pytest.fixture(scope="module", params=["lightning", "pytorch_lightning"])
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script printed, and its folder."""
    out = tmp_path_factory.mktemp("script")
    done = run(python(SCRIPT, ["--out", str(out)]), environ({"LIGHTNING": request.param, "COLUMNS": "100"}))
    assert "Where the step went" in done.stderr
    return done.stdout, out


@pytest.fixture(scope="module")
def plain() -> str:
    return run(python(SCRIPT), environ({"INSTRUMENT": "0"})).stdout


def test_script_losses(script: tuple[str, Path], plain: str) -> None:
    """The losses have the bits that they have without us."""
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
    """Two steps were recorded: two batches each, validation and checkpoint between the epochs apart."""
    first, second = (f"ProfilerStep#{number}{part}" for number, part in ((3, BETWEEN + STEP), (4, STEP)))
    expected = "\n".join(part.replace("\n", "\n  ") for part in (first, second))
    events = windowed(script[1])
    assert expected == shape(events)
    names = Counter(event["name"] for event in events)
    assert {"Linear": 18, "Linear (backward)": 12} == {name: names[name] for name in names if "Linear" in name}


@pytest.mark.nsys
def test_script_nsight_systems(tmp_path: Path, plain: str) -> None:
    """The ranges of every step, of the sanity check and of the windows arrive in nsys."""
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


# Steps.


@pytest.mark.parametrize("batches, accumulate, epochs", [(1, 1, 1), (4, 2, 1), (5, 2, 2), (3, 4, 2)])
def test_steps_are_updates(tmp_path: Path, batches: int, accumulate: int, epochs: int) -> None:
    """There are as many steps as updates, also where the last of an epoch has fewer batches."""
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
    """A batch that updates two optimizers is one step; resumed, the run goes on with the next."""
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
    """A step whose update the GradScaler skipped is a step, as for Lightning."""
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
    """A batch that the module skips together with the rest of the epoch is no step, and its regions are closed."""
    module, ours = Module(), callback(tmp_path)
    module.cut = 3
    made = trainer(tmp_path, ours, max_epochs=2, accumulate_grad_batches=2)
    made.fit(module, data(6))
    assert (2, [(0, 1)]) == (made.global_step, steps(ours))
    assert left_nothing(made, ours)
    lines = shape(windowed(tmp_path / "out")).splitlines()
    assert 4 == lines.count("  step")  # in each epoch a whole one and one that was cut short
    assert 8 == lines.count("    micro-step")  # also the one of the batch that was skipped


def test_no_length(tmp_path: Path) -> None:
    """Steps of a stream of unknown length, whose last batch Lightning knows only when it is there."""
    ours = callback(tmp_path)
    made = trainer(tmp_path, ours, accumulate_grad_batches=2)

    class Stream(Module):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step([batch], batch_idx)

    made.fit(Stream(), DataLoader(Endless(), batch_size=1))
    assert (2, [(0, 1)]) == (made.global_step, steps(ours))


def test_resumed(tmp_path: Path) -> None:
    """A resumed run goes on with the number of its next step; nothing of ours is in the checkpoint."""
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


# Runs.


@PACKAGES
def test_apart(tmp_path: Path, package: Any, recorded: Any) -> None:
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
    """A second `fit` counts on, and a `fit` that has nothing to do leaves nothing on."""
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
    """A step that raises leaves no region open and no profiler running, and what was recorded is there."""

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

    made.fit(Module(), data(3))  # the next run is as if nothing was
    assert left_nothing(made, ours)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("broken", ["Patch", "annotate", "profile"])
def test_our_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """What fails in our code neither stops the training nor changes it."""

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
    """A run of one batch ends before the window, which the manifest says."""
    ours = InstrumentCallback(tmp_path / "out", wait=2, warmup=1, active=1)
    trainer(tmp_path, ours, fast_dev_run=True).fit(Module(), data(3), data(1))
    assert ["not reached"] == [window["status"] for window in ours.loop.windows]


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, nothing is patched and nothing begins."""
    monkeypatch.setattr("instrument.config.settings.enabled", False)
    ours, module, seen = callback(tmp_path), Module(), []
    made = trainer(tmp_path, ours)
    module.body = lambda index: seen.append(left_nothing(made, ours))
    made.fit(module, data(2), data(1))
    assert [True, True] == seen


# What it is.


@PACKAGES
def test_of_both_packages(tmp_path: Path, package: Any) -> None:
    """Any Trainer takes the callback, also bare, and the profiler; what is subclassed, too."""

    class Mine(InstrumentCallback):
        pass

    for kind in (InstrumentCallback, Mine):
        ours = kind(tmp_path)
        assert isinstance(ours, kind) and isinstance(ours, package.Callback)
        assert kind.__qualname__ == ours.state_key
        assert ours in package.Trainer(callbacks=ours, logger=False, enable_checkpointing=False).callbacks
    assert isinstance(InstrumentProfiler(tmp_path), package.profilers.Profiler)


def test_copies(tmp_path: Path) -> None:
    """A Trainer with ours in it can be pickled, as for processes that it spawns, and copied, also after a run."""
    ours, profiler = callback(tmp_path, tell=None), InstrumentProfiler(tmp_path / "profiler", wait=3, active=1)
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
    """What is not accepted is said at once."""
    for kind in (InstrumentCallback, InstrumentProfiler):
        with pytest.raises(ValueError, match="active must be an integer >= 1"):
            kind(tmp_path, active=0)
        with pytest.raises(TypeError, match='unknown option "waits"'):
            kind(tmp_path, waits=3)


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Lightning the constructor says how to get it."""
    monkeypatch.setattr(packages_module, "PACKAGES", ("no_such_package.pytorch", "no_such_package"))
    with pytest.raises(ImportError, match="Lightning is not installed: pip install lightning"):
        InstrumentCallback(tmp_path)


def test_summary_goes_to_the_log(tmp_path: Path, caplog: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's log has the summary, standard error where that log is silenced."""
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


# The profiler.


def test_profiler(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's actions are the regions of its steps, and the summary is its report."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.INFO)
    ours = InstrumentProfiler(tmp_path / "out", wait=1, warmup=0, active=1)
    made = trainer(tmp_path, profiler=ours, accumulate_grad_batches=2)
    made.fit(Module(), data(4), data(1))
    events = windowed(tmp_path / "out")
    lines = shape(events).splitlines()
    strategy = "[Strategy]SingleDeviceStrategy"
    chosen = [
        line
        for line in lines
        if any(part in line for part in ("step", "Step", "run_", f"{strategy}.backward", "_next"))
        and ".on_" not in line
    ]
    assert chosen == [
        "ProfilerStep#1",
        "  [_TrainingEpochLoop].train_dataloader_next",
        f"    {DATA}",
        "  step",
        "    run_training_batch",
        f"      {strategy}.training_step",
        f"      {strategy}.backward",
        "    [_TrainingEpochLoop].train_dataloader_next",
        f"      {DATA}",
        "    run_training_batch",
        "      [LightningModule]Module.optimizer_step",
        "        Optimizer.step#SGD.step",
        f"          {strategy}.training_step",
        f"          {strategy}.backward",
    ]
    assert not {"forward", "micro-step"} & {event["name"] for event in events}
    assert caplog.text.count("Where the step went") == 1
    assert "Where the step went" in ours.summary()
    assert left_nothing(made, ours)


def test_profiler_of_a_run_that_fails(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is logged all the same, which Lightning leaves out."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.INFO)
    module = Module()
    module.body = lambda index: 1 / (1 - index)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, profiler=InstrumentProfiler(tmp_path, wait=0, warmup=0, active=9)).fit(module, data(3))
    assert caplog.text.count("Where the step went") == 1


def test_profiler_actions_left_open(tmp_path: Path, recorded: Any) -> None:
    """Actions that nobody stopped, or stopped in another order, or twice, end with the one around them."""
    ours = InstrumentProfiler(tmp_path)
    made = trainer(tmp_path, profiler=ours)
    module = Module()

    def body(index: int) -> None:
        ours.stop("never begun")
        for action in ("a", "b", "c", "c", "left"):
            ours.start(action)
        for action in ("c", "b", "c", "a", "a"):
            ours.stop(action)
        ours.start("left too")

    module.body = body
    names = Counter(event["name"] for event in recorded(lambda: made.fit(module, data(2))))
    expected = {"a": 2, "b": 2, "c": 4, "left": 2, "left too": 2}
    assert expected == {name: names[name] for name in expected}
    assert not ours.loop._open


def test_callback_and_profiler(tmp_path: Path, caplog: Any) -> None:
    """Together they record one window, with each part of a step in it once."""
    ours = callback(tmp_path)
    made = trainer(tmp_path, ours, profiler=InstrumentProfiler(tmp_path / "other", wait=0, active=1))
    made.fit(Module(), data(2))
    assert [(0, 1)] == steps(ours)
    assert not (tmp_path / "other").exists()
    names = Counter(event["name"] for event in windowed(tmp_path / "out"))
    training_step = "[Strategy]SingleDeviceStrategy.training_step"
    expected = {"step": 2, "forward": 0, training_step: 2, "backward": 2, "run_training_epoch": 0}
    assert expected == {name: names[name] for name in expected}
    assert caplog.text.count("uses the arguments of the Trainer's InstrumentCallback") == 1


# With no line changed.


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The environment asks for windows in this folder."""
    plan = {"out": str(tmp_path / "asked"), "wait": 0, "warmup": 0, "active": 2}
    monkeypatch.setenv("INSTRUMENT_RUN", json.dumps(plan))
    environment.loop_from_environment.cache_clear()
    yield tmp_path / "asked"
    environment.loop_from_environment.cache_clear()
    while _patches:
        _patches.popitem()[1].undo()


def automatic(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, AutomaticCallback)]


@PACKAGES
def test_nothing_is_asked(tmp_path: Path, package: Any) -> None:
    """Without the environment variable a Trainer gets nothing, and its class stays as it is."""
    before = package.Trainer.__init__
    install()
    assert (before, []) == (package.Trainer.__init__, callbacks())
    assert [] == [c for c in trainer(tmp_path, package=package).callbacks if isinstance(c, InstrumentCallback)]


@PACKAGES
def test_installed(tmp_path: Path, asked: Path, package: Any) -> None:
    """Each Trainer has one callback that drives the loop of the process, however often it was installed."""
    install()
    install()
    made = trainer(tmp_path, package=package)
    assert 1 == len(automatic(made))
    made.fit(Module() if package is pl else OtherModule(), data(3))
    assert {"step", "forward", "backward"} <= {event["name"] for event in windowed(asked)}


def test_explicit_ones_win(tmp_path: Path, asked: Path) -> None:
    """The first callback, or the profiler, that somebody wrote is the only one that works."""
    install()
    ours, second = callback(tmp_path), callback(tmp_path / "second")
    made = trainer(tmp_path, AutomaticCallback(), ours, second)
    made.fit(Module(), data(3))
    assert ([(0, 2)], []) == (steps(ours), steps(second))
    names = Counter(event["name"] for event in windowed(tmp_path / "out"))
    assert (3, 3) == (names["step"], names["forward"])
    profiler = InstrumentProfiler(tmp_path / "profiler", wait=0, warmup=0, active=2)
    trainer(tmp_path, profiler=profiler).fit(Module(), data(3))
    assert [(0, 1)] == steps(profiler)
    assert not asked.exists()


def test_within_another_loop(tmp_path: Path, asked: Path) -> None:
    """An evaluation within a loop that is told by others is a region of it and does not end it."""
    loop = environment.loop_from_environment()
    loop.start()
    try:
        made = trainer(tmp_path, AutomaticCallback())
        made.validate(Module(), data(1), verbose=False)
        failing = Module()
        failing.validation_step = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            made.validate(failing, data(1), verbose=False)
        assert (True, []) == (loop.running, loop._open)
    finally:
        loop.stop()
    assert "evaluation" in {event["name"] for event in windowed(asked)}


def test_wrong_environment(tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment asks for in vain stops no Trainer."""
    monkeypatch.setenv("INSTRUMENT_RUN", '{"active": 0}')
    environment.loop_from_environment.cache_clear()
    install()
    assert [] == callbacks()
    assert [] == automatic(trainer(tmp_path))


def test_entry_point_is_light() -> None:
    """Loading the entry point imports no more than a few small modules of ours."""
    code = """
import sys
import instrument.integrations.lightning as door
assert door.callbacks() == []
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("instrument.")}))
print(sorted({"torch", "lightning", "pytorch_lightning", "structlog", "wrapt"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ())
    light = ["config", "errors", "guard", "integrations", "interrupts", "log", "patch", "printable", "stderr"]
    assert f"{light}\n[]\n" == done.stdout


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_by_itself(tmp_path: Path, method: str) -> None:
    """Without a training before it, its batches are the steps."""
    ours = callback(tmp_path, wait=1, active=2, repeat=1)
    made = trainer(tmp_path, ours)
    getattr(made, method)(Module(), data(5), **({} if method == "predict" else {"verbose": False}))
    assert [(1, 2)] == steps(ours)
    names = Counter(event["name"] for event in windowed(tmp_path / "out"))
    assert (2, 2) == (names["step"], names["Linear"])
    assert left_nothing(made, ours)


def test_evaluation_too_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What records nothing says so, with the reason."""
    ours = callback(tmp_path, wait=50, active=2, repeat=1)
    trainer(tmp_path, ours).validate(Module(), data(3), verbose=False)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "instrument"]
    assert said.startswith("instrument: no window was recorded in ")
    assert "steps 50-51 were asked for, and the loop ended before step 3" in said
