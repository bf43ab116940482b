"""Models, data and helpers that the tests of the Lightning adapter share."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from instrument.integrations.lightning import InstrumentCallback
from instrument.integrations.loop import Loop

from ..conftest import annotations
from ..support.programs import ROOT
from ..support.ranges import Range, outline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    import pytorch_lightning


PACKAGES = pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
SCRIPT = ROOT / "integrations" / "lightning" / "train.py"
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


class TrainingMethods:
    """The methods of a module, for either package."""

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


class Module(TrainingMethods, pl.LightningModule):
    """One optimizer, stepped by Lightning."""


class OtherModule(TrainingMethods, pytorch_lightning.LightningModule):
    """The same module for the other package."""


class ManualModule(Module):
    """Two optimizers, as of a GAN, stepped by the module itself; the second every other batch if ``rare``."""

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
    """Return a callback that records all steps."""
    plan = {"wait": 0, "warmup": 0, "active": 1000, "on_summary": lambda text: None}
    return InstrumentCallback(tmp_path / "out", **plan | arguments)


def steps(callback: Any) -> list[Any]:
    """Return the first and the last step of each window."""
    return [window["steps"] and tuple(window["steps"]) for window in callback.loop.windows]


def recorded_events(out: Path) -> list[dict[str, Any]]:
    (trace,) = out.glob("window-*/*.gz")
    return annotations(trace)


def region_tree(events: list[dict[str, Any]]) -> str:
    """Return the regions as a tree, without the regions of modules."""
    ranges = [
        Range(e["name"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000), "push_pop", e["tid"], e["pid"])
        for e in events
        if e["name"].removesuffix(" (backward)") not in ("Linear", "ReLU", "Sequential")
    ]
    return outline(ranges)


def is_clean(trainer: Any, callback: Any) -> bool:
    patched = {"save_checkpoint", "training_step"} & (vars(trainer).keys() | vars(trainer.strategy).keys())
    return not (patched or callback.loop.running or Loop.current() or torch.autograd._profiler_enabled())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide Lightning's messages, and keep it from replacing the handler of Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    for package in (pl, pytorch_lightning):
        logging.getLogger(package.__name__).setLevel(logging.WARNING)
    yield
    for package in (pl, pytorch_lightning):
        logging.getLogger(package.__name__).setLevel(logging.INFO)
    signal.signal(signal.SIGINT, handler)
