"""Lightning: a callback and a profiler for a Trainer of `lightning.pytorch` or of `pytorch_lightning`.

    trainer = pl.Trainer(callbacks=[InstrumentCallback("runs/x", wait=10, active=3)])

A step is a training batch in which an optimizer is updated. With gradient accumulation that is the last of the
accumulated batches; several optimizers that take turns make one step; an update that a GradScaler skips counts, as
in ``trainer.global_step``.
"""

from .callback import InstrumentCallback, callbacks, install
from .profiler import InstrumentProfiler

__all__ = ["InstrumentCallback", "InstrumentProfiler", "callbacks", "install"]
