"""Lightning: a callback and a profiler for a Trainer of `lightning.pytorch` or of `pytorch_lightning`.

    trainer = pl.Trainer(callbacks=[InstrumentCallback("runs/x", wait=10, active=3)])

A step is a training batch in which an optimizer was updated: the last of those that gradients are accumulated
over, once where several optimizers take turns, and also where a GradScaler skipped the update, as in
``trainer.global_step``.
"""

from .auto import callbacks, install
from .callback import InstrumentCallback
from .profiler import InstrumentProfiler

__all__ = ["InstrumentCallback", "InstrumentProfiler", "callbacks", "install"]
