"""Loggers of metrics take the numbers of `on_steps` as they are: the real packages, offline."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument

INTERVAL = 20
MEAN = "instrument/step_time_mean_s"


@pytest.fixture
def logged() -> list[instrument.StepNumbers]:
    """The numbers that the loop gave, to compare with what was logged."""
    return []


def train(out: Path, logged: list[instrument.StepNumbers], function: Any) -> None:
    """Run 50 steps, whose numbers go to ``logged`` and to ``function``."""
    reported = [instrument.every(INTERVAL, each, samples=8) for each in (logged.append, function)]
    with instrument.profile(out, on_steps=reported) as prof:
        for _ in range(50):
            with instrument.annotate("data"):
                torch.ones(100).sum()
            prof.step()
    assert [19, 39, 49] == [numbers["instrument/step"] for numbers in logged]


def test_tensorboard(tmp_path: Path, logged: list[instrument.StepNumbers]) -> None:
    """A scalar for each number, at the right steps."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train(tmp_path / "run", logged, lambda n: writer.add_scalars("training", n, n["instrument/step"]))
    for name in logged[0]:
        events = accumulator.EventAccumulator(str(tmp_path / f"training_{name}"))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("training")]
        assert [(n["instrument/step"], pytest.approx(n[name], rel=1e-6)) for n in logged] == found


def test_wandb(tmp_path: Path, logged: list[instrument.StepNumbers], monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb.log` is the function; the last numbers are the summary of the run."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", project="test", dir=str(tmp_path))
    run.define_metric("instrument/*", step_metric="instrument/step")
    train(tmp_path / "run", logged, wandb.log)
    summary = {name: value for name, value in dict(run.summary).items() if name.startswith("instrument/")}
    run.finish()
    assert logged[-1] == summary


@pytest.mark.filterwarnings("ignore")  # of its packages
def test_mlflow(tmp_path: Path, logged: list[instrument.StepNumbers]) -> None:
    """`mlflow.log_metrics` takes the numbers, at the step that they name."""
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        train(tmp_path / "run", logged, lambda n: mlflow.log_metrics(n, step=n["instrument/step"]))
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, MEAN)
    assert [(n["instrument/step"], n[MEAN]) for n in logged] == [(each.step, each.value) for each in history]


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightning(tmp_path: Path, logged: list[instrument.StepNumbers]) -> None:
    """`log_dict` of the module is the function, also for the rest of an epoch; evaluations are in no step time."""
    pl = pytest.importorskip("lightning.pytorch")
    from instrument.integrations.lightning import InstrumentCallback

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            torch.ones(1).add_(1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    reported = [instrument.every(INTERVAL, each) for each in (logged.append, module.log_dict)]
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, log_every_n_steps=INTERVAL, val_check_interval=10,
        logger=pl.loggers.CSVLogger(str(tmp_path)),
        callbacks=[InstrumentCallback(tmp_path / "run", on_steps=reported)],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.ones(25, 4))
    trainer.fit(module, loader, loader)
    assert [19, 24, 39, 49] == [numbers["instrument/step"] for numbers in logged]
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as rows:
        means = [float(row[MEAN]) for row in csv.DictReader(rows) if row[MEAN]]
    assert [numbers[MEAN] for numbers in logged] == pytest.approx(means, rel=1e-5)
    assert all(numbers["instrument/phase_evaluation_s"] > 0 for numbers in logged)
    assert not list((tmp_path / "run").rglob("*"))


def test_the_page_has_every_name(tmp_path: Path, logged: list[instrument.StepNumbers]) -> None:
    """Each number has its row, with a unit if its name ends in one."""
    page = (Path(__file__).parents[2] / "docs" / "dashboards.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*)\|", page, re.MULTILINE)
    units = {name: unit for names, unit in rows for name in re.findall(r"`(\w+)`", names)}
    train(tmp_path / "run", logged, lambda _: None)
    names = {name.removeprefix("instrument/") for name in logged[0]}
    assert {name for name in names if name not in units} == set()
    assert all("s" in units[name] for name in names if name.endswith("_s"))


def test_json(tmp_path: Path, logged: list[instrument.StepNumbers]) -> None:
    """The numbers are plain ones, so that any other logger takes them."""
    lines: list[str] = []
    train(tmp_path / "run", logged, lambda n: lines.append(json.dumps(n)))
    assert [dict(numbers) for numbers in logged] == [json.loads(line) for line in lines]
