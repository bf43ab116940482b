"""The black box in the loops of frameworks, with the regions of their adapters."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.record.slow_steps.box import BlackBox

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks

STALLED = 45


def phases(box: BlackBox) -> set[str]:
    """Return the phases of the last step."""
    times = box.clock.last_steps()[-1]
    return {name for name, ns in zip(box.clock.phases, times.phases_ns, strict=True) if ns}


def check(box: BlackBox) -> None:
    """The stall of the forward is found, and every phase is known."""
    assert {"data", "forward", "backward", "optimizer"} <= phases(box)
    stalls = [slow for slow in box.slow_steps if slow.duration_ns > 5e8]
    assert [(slow.step, slow.cause) for slow in stalls] == [(STALLED, "forward")]


class Model(torch.nn.Module):
    """A model whose forward stalls once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == STALLED + 1:
            time.sleep(0.6)
        return {"loss": self.layer(x).square().mean()}


def test_trainer_of_transformers(tmp_path: Path) -> None:
    """The steps of a Trainer are the box's, without an edit of the training."""
    transformers = pytest.importorskip("transformers")
    from instrument.integrations.transformers import InstrumentCallback

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=60, per_device_train_batch_size=2, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 120,
        callbacks=[InstrumentCallback(record=False)],
    )  # fmt: skip
    with instrument.black_box() as box:
        trainer.train()
    check(box)


def test_lightning(tmp_path: Path) -> None:
    """The steps of Lightning's Trainer are the box's."""
    pl = pytest.importorskip("lightning.pytorch")
    from instrument.integrations.lightning import InstrumentCallback

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_steps=60, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[InstrumentCallback(record=False)],
    )  # fmt: skip
    with instrument.black_box() as box:
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(120, 4), batch_size=2))
    check(box)
