"""Trains in each framework beside its own torch profiler, with and without this library; prints both outcomes."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from foreign import run_in_fork

import instrument.integrations.accelerate
import instrument.integrations.lightning
import instrument.integrations.transformers

warnings.simplefilter("ignore")
CPU = [ProfilerActivity.CPU]
EARLY = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1}
MID = {"wait": 1, "warmup": 0, "active": 4, "repeat": 1}
Result = dict[str, Any]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        self.losses: list[str] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item().hex())
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def random_rows(count: int) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def run_lightning(out: Path | None, profiler: Any, plan: dict[str, Any], **arguments: Any) -> Result:
    adapters = [instrument.integrations.lightning.InstrumentCallback(out, on_summary=print, **plan)] if out else []
    data = torch.utils.data.DataLoader(random_rows(24), batch_size=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    module = Module()
    trainer = pl.Trainer(profiler=profiler(), callbacks=adapters, enable_checkpointing=False, **quiet, **arguments)
    trainer.fit(module, data, data)
    return {"losses": module.losses, "windows": adapters[0].loop.windows if adapters else []}


class LossModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class ProfilerCallback(transformers.TrainerCallback):
    """A user's callback that profiles a Trainer with torch's profiler and stops it before training ends."""

    def __init__(self, begin: int, end: int, **options: Any) -> None:
        self.begin, self.end, self.step = begin, end, 0
        self.profiler = profile(activities=CPU, **options)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.begin:
            self.profiler.start()
        elif state.global_step == self.end:
            self.profiler.stop()
        elif self.begin < state.global_step < self.end:
            self.profiler.step()


def run_transformers(out: Path | None, plan: dict[str, Any], **options: Any) -> Result:
    adapters = (
        [instrument.integrations.transformers.InstrumentCallback(out, on_summary=print, **plan)] if out else []
    )
    arguments = transformers.TrainingArguments(
        "unused", max_steps=8, per_device_train_batch_size=2, report_to=[], save_strategy="no", logging_steps=1,
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"x": row} for row in random_rows(16)]
    callbacks = [*adapters, ProfilerCallback(2, 5, **options)]
    trainer = transformers.Trainer(LossModule(), arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "windows": adapters[0].loop.windows if adapters else []}


def run_accelerate(out: Path | None, plan: dict[str, Any]) -> Result:
    handler = accelerate.ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 1})
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[handler])
    adapter = instrument.integrations.accelerate.attach(out, accelerator=accelerator, **plan) if out else None
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    with accelerator.profile() as profiler:
        for row in random_rows(8):
            loss = model(row).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            profiler.step()
    if adapter is not None:
        adapter.detach()
    lines = (out / "manifest.jsonl").read_text().splitlines() if out else []
    return {"losses": losses, "windows": [json.loads(line) for line in lines]}


def cases() -> dict[str, Callable[[Path | None], Result]]:
    own = {"schedule": torch.profiler.schedule(wait=1, warmup=1, active=1)}
    return {
        "lightning dev": lambda out: run_lightning(
            out, lambda: "pytorch", EARLY, fast_dev_run=2, accelerator="cpu"
        ),
        "lightning": lambda out: run_lightning(out, PyTorchProfiler, MID, max_epochs=2, accelerator="cpu"),
        "transformers": lambda out: run_transformers(out, MID),
        "transformers scheduled": lambda out: run_transformers(out, MID, **own),
        "accelerate": lambda out: run_accelerate(out, MID),
    }


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with profile(activities=CPU):
        torch.ones(1)
    results = {}
    for name, case in cases().items():
        out = Path(sys.argv[1]) / name
        results[name] = [
            run_in_fork(lambda case=case: case(None)),
            run_in_fork(lambda case=case, out=out: case(out)),
        ]
    print(json.dumps(results))
