"""A Trainer of Lightning: seven steps with two batches each."""

import logging
import warnings

import lightning.pytorch as pl
import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = self.layers(batch).square().mean()
        print(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


pl.seed_everything(0, verbose=False)
trainer = pl.Trainer(
    accelerator="cpu", max_steps=7, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), 4))
