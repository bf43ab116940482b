"""Train a small network with Lightning's Trainer: two batches a step, validation and a checkpoint each epoch."""

import argparse
import logging
import os
import tempfile
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    if os.environ.get("LIGHTNING") == "pytorch_lightning":
        import pytorch_lightning as pl
    else:
        import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. This script needs it: pip install {error.name.split('.')[0]}") from None

from instrument.integrations.lightning import InstrumentCallback

warnings.filterwarnings("ignore", category=UserWarning)  # about workers, loggers and small batches
logging.getLogger(f"{pl.__name__}.utilities.rank_zero").setLevel(logging.WARNING)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 8)
        self.losses: list[str] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.head(self.encoder(inputs)), labels)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item().hex())
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int) -> DataLoader:
    data = TensorDataset(torch.randn(16 * count, 32), torch.randint(8, (16 * count,)))
    return DataLoader(data, batch_size=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()

    pl.seed_everything(7, verbose=False)
    model = Classifier()
    trainer = pl.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        accelerator="auto",
        devices=2 if args.strategy.startswith("ddp") else 1,
        strategy=args.strategy,
        callbacks=[InstrumentCallback(args.out, wait=2, warmup=1, active=2)],
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches(6), batches(2))
    if trainer.is_global_zero:
        print(f"steps {trainer.global_step}, losses {' '.join(model.losses)}")


if __name__ == "__main__":
    main()
