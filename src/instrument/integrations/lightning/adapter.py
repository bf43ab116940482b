"""`TrainerAdapter`: the hooks of one run of a Trainer."""

from __future__ import annotations

from typing import Any

from ..adapter import Adapter
from ..loop import Loop
from .packages import FEATURE


class TrainerAdapter(Adapter):
    """Names parts of a run that no callback marks: the forward pass and the writing of a checkpoint.

    Args:
        loop: the loop that the run drives.
        trainer: the Trainer.
        module: its LightningModule; with None, neither part gets a region.
    """

    feature = FEATURE

    def __init__(self, loop: Loop, trainer: Any, module: Any) -> None:
        super().__init__(loop)
        self._trainer = trainer
        self._module = module

    def install_hooks(self) -> None:
        """Hook the Trainer and its strategy, not their classes."""
        if self._module is None:
            return
        if self._module.automatic_optimization:  # else training_step() contains the whole step
            self.wrap(self._trainer.strategy, "training_step", self.in_region("forward"))
        self.wrap(self._trainer, "save_checkpoint", self.in_region("checkpoint"))
