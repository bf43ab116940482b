"""`InstrumentCallback`: what a Trainer does becomes steps and regions."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...config import settings
from ...errors import SyncError
from ...guard import guard
from ...patch import Patch, apply, undo
from .packages import LightningMixin, packages

if TYPE_CHECKING:
    from ..loop import Loop

FEATURE = "following Lightning"


def _without(callback: InstrumentCallback, *_: Any, **__: Any) -> None:
    """Leave ``callback`` with a loop that never starts."""
    from ..loop import Loop

    callback._follow(Loop.__new__(Loop))


class InstrumentCallback(LightningMixin):
    """Records windows of optimizer steps, names their parts, and finds waits, in ``Trainer(callbacks=[...])``.

    A step is an optimizer step; a batch where `validate`, `test` or `predict` is called without a `fit` before.

    Regions: "step", "micro-step" where gradients are accumulated, "forward", "backward", "checkpoint", and apart
    from the steps "sanity check", "evaluation", "test" and "predict". Nothing of it enters a checkpoint. Of
    several on one Trainer the first one works.

    Args:
        out: the folder that windows land in.
        arguments: as `instrument.integrations.loop.Loop` takes them: the plan (``wait``, ``active``, ...),
            ``syncs``, ``budget``, ``modules``, ``names``, ``tell`` (by default Lightning's log).

    Attributes:
        loop: what it drives, with the ``windows`` so far.

    Raises:
        TypeError, ValueError: arguments that are not accepted.
        ImportError: Lightning is not installed.
    """

    base = stand_in = "callbacks.Callback"

    @guard.prepared(FEATURE, otherwise=_without)
    def __init__(self, out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> None:
        from ..loop import Loop

        arguments.setdefault("tell", _tell)
        self._follow(Loop(out, **arguments))

    def _follow(self, loop: Loop) -> None:
        self.loop = loop
        self.by_profiler = False  # which draws the parts of a step
        self._patches: list[Patch] = []
        self._updates = 0  # of all optimizers, so far
        self._in_step = False
        self._driving = False  # the loop may be run by others around this
        self._apart = ""  # the evaluation that is open
        self._evaluating = False  # by itself: its batches are the steps

    def _aside(self, trainer: Any) -> bool:
        """Tell whether another callback does the work: one that somebody wrote comes before an automatic one."""
        ours = [callback for callback in trainer.callbacks if isinstance(callback, InstrumentCallback)]
        ours.sort(key=lambda callback: callback.loop.automatic)
        return not settings.enabled or ours[:1] != [self]

    @guard.contained(FEATURE)
    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin, at the step that the run is resumed at."""
        self._end()  # what a run left that nobody ended
        if self._aside(trainer):
            return
        self._updates = trainer.global_step
        self.loop.start(module, first_step=_steps(trainer))
        self._driving = self.loop.running
        if self._driving and not self.by_profiler:
            if module.automatic_optimization:  # else all of the step is in there
                self._name(trainer.strategy, "training_step", "forward")
            self._name(trainer, "save_checkpoint", "checkpoint")

    def _name(self, owner: Any, method: str, region: str) -> None:
        """Make calls of ``method`` a region; no callback is told of where they begin and end."""
        from ..adapter import as_replacement

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def named(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                with self.loop.region(region):
                    return original(*args, **kwargs)

            return as_replacement(original, guard.around(FEATURE, original, named))

        apply([Patch(owner, method, make)], self._patches)

    @guard.contained(FEATURE)
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Open the step, unless this batch goes on with one."""
        if not self._driving:
            return
        if not self._in_step:
            self.loop.enter("step")
            self._in_step = True
        if trainer.accumulate_grad_batches > 1 and not self.by_profiler:
            self.loop.enter("micro-step")

    @guard.contained(FEATURE)
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step if an optimizer was updated."""
        if not self._driving:
            return
        self.loop.leave("micro-step")
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self._leave_step()
            self.loop.step()

    @guard.contained(FEATURE)
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Close a step that the module cut short, by -1 from ``on_train_batch_start``."""
        self._leave_step()

    def _leave_step(self) -> None:
        if self._in_step:
            self.loop.leave("step")
            self._in_step = False

    @guard.contained(FEATURE)
    def on_train_end(self, trainer: Any, module: Any) -> None:
        """End, before Lightning takes the model off the GPU."""
        self._end()

    @guard.contained(FEATURE)
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End."""
        with suppress(SyncError):  # there is an error already
            self._end()

    @guard.contained(FEATURE)
    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End what ended in none of the ways above."""
        self._end()

    def _end(self) -> None:
        self._leave()
        self._in_step = False
        self._evaluating = False
        try:
            undo(self._patches)
        finally:
            if self._driving:
                self._driving = False
                self.loop.stop()

    def _enter(self, trainer: Any, module: Any, name: str) -> None:
        if not self._aside(trainer):
            if not self.loop.running:
                self._evaluating = name != "sanity check" and not self.loop.begun
                self.loop.start(module, steps=self._evaluating)
                self._driving = self.loop.running
            self.loop.enter(name)
            self._apart = name

    @guard.contained(FEATURE)
    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Open the step of an evaluation that runs by itself."""
        if self._evaluating and self._driving:
            self.loop.enter("step")

    @guard.contained(FEATURE)
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """End the step."""
        if self._evaluating and self._driving:
            self.loop.leave("step")
            self.loop.step()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _leave(self) -> None:
        if self._apart:
            self.loop.leave(self._apart)
            self._apart = ""

    @guard.contained(FEATURE)
    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Open "sanity check": validation before the first step."""
        self._enter(trainer, module, "sanity check")

    @guard.contained(FEATURE)
    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        """Close it."""
        self._end()

    @guard.contained(FEATURE)
    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Open "evaluation"."""
        if not trainer.sanity_checking:
            self._enter(trainer, module, "evaluation")

    @guard.contained(FEATURE)
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Close it."""
        if not trainer.sanity_checking:
            self._leave()

    @guard.contained(FEATURE)
    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Open "test"."""
        self._enter(trainer, module, "test")

    @guard.contained(FEATURE)
    def on_test_end(self, trainer: Any, module: Any) -> None:
        """Close it."""
        self._leave()

    @guard.contained(FEATURE)
    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Open "predict"."""
        self._enter(trainer, module, "predict")

    @guard.contained(FEATURE)
    def on_predict_end(self, trainer: Any, module: Any) -> None:
        """Close it."""
        self._leave()


def _steps(trainer: Any) -> int:
    """Return how many steps there were so far: updates of all optimizers, but of several in a batch one."""
    updates = int(trainer.global_step)
    batches = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "total_batch_idx", updates - 1) + 1
    return min(updates, batches)


def _tell(summary: str) -> None:
    """Put the summary where Lightning's own messages are seen; a log that hides them does not hide it."""
    logger = logging.getLogger(packages()[0].__name__)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", summary)
    else:
        sys.stderr.write(summary)
