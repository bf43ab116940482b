"""`InstrumentCallback`: records windows of a Trainer's run, driven by its events; added to each if requested."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...base import stderr
from ...base.config import RUN, settings
from ...base.errors import SyncError
from ...base.guard import guard
from ...base.patch import Patch
from ..events import contained_events
from .packages import FEATURE, LightningMixin, loaded, packages

if TYPE_CHECKING:
    from ..loop import Loop
    from .adapter import TrainerAdapter


def _inert_callback(callback: InstrumentCallback, *_: Any, **__: Any) -> None:
    """Give ``callback`` a loop that never starts."""
    from ..loop import Loop

    callback._follow(Loop.__new__(Loop))


@contained_events(FEATURE)
class InstrumentCallback(LightningMixin):
    """Records windows of a run, names its parts, and finds synchronizations, in ``Trainer(callbacks=[...])``.

    A step is an optimizer step, or a batch if `validate`, `test` or `predict` is called without a `fit` before.

    Regions: "step", "micro-step" if gradients are accumulated, "forward", "backward", "checkpoint", and outside
    steps "sanity check", "evaluation", "test" and "predict". Checkpoints contain nothing of the callback. If a
    Trainer has several, only the first one works.

    Args:
        out: the folder for the recorded windows.
        arguments: those of `instrument.integrations.loop.Loop`: the schedule (``wait``, ``active``, ...),
            ``syncs``, ``budget``, ``modules``, ``names``, ``on_summary`` (by default Lightning's log).

    Attributes:
        loop: the loop that the Trainer drives, with the ``windows`` so far.

    Raises:
        TypeError, ValueError: wrong arguments.
        ImportError: Lightning is not installed.
    """

    base = inert = "callbacks.Callback"

    @guard.prepared(FEATURE, otherwise=_inert_callback)
    def __init__(self, out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> None:
        from ..loop import Loop

        arguments.setdefault("on_summary", _log_summary)
        self._follow(Loop(out, **arguments))

    def _follow(self, loop: Loop) -> None:
        self.loop = loop
        self.by_profiler = False  # an `InstrumentProfiler` opens the regions inside a step
        self._adapter: TrainerAdapter | None = None  # while this drives the loop
        self._updates = 0  # of all optimizers, so far
        self._in_step = False
        self._evaluation = ""  # the open region of an evaluation
        self._evaluating = False  # without training: the batches are the steps

    def _inactive(self, trainer: Any) -> bool:
        """Return whether another callback does the work; automatic callbacks yield to others."""
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, InstrumentCallback)]
        callbacks.sort(key=lambda callback: callback.loop.automatic)
        return not settings.enabled or callbacks[:1] != [self]

    def _start(self, trainer: Any, module: Any, hooked: Any = None, **arguments: Any) -> None:
        from .adapter import TrainerAdapter

        self.loop.start(module, **arguments)
        if self.loop.running:
            self._adapter = TrainerAdapter(self.loop, trainer, hooked)
            self._adapter.attach()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the loop, in a resumed run at its next step."""
        self._end()  # an earlier run that no event ended
        if self._inactive(trainer):
            return
        self._updates = trainer.global_step
        hooked = None if self.by_profiler else module
        self._start(trainer, module, hooked, first_step=_steps(trainer))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Open the region of the step, unless the batch continues one."""
        if self._adapter is None:
            return
        if not self._in_step:
            self.loop.enter("step")
            self._in_step = True
        if trainer.accumulate_grad_batches > 1 and not self.by_profiler:
            self.loop.enter("micro-step")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step if an optimizer was updated."""
        if self._adapter is None:
            return
        self.loop.leave("micro-step")
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self._leave_step()
            self.loop.step()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Close a step that the module left by returning -1 from ``on_train_batch_start``."""
        self._leave_step()

    def _leave_step(self) -> None:
        if self._in_step:
            self.loop.leave("step")
            self._in_step = False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop the loop before Lightning moves the model off the GPU, and if no other event did."""
        self._end()

    on_sanity_check_end = teardown = on_train_end

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Stop the loop."""
        with suppress(SyncError):  # the first error counts
            self._end()

    def _end(self) -> None:
        self._leave()
        self._in_step = False
        self._evaluating = False
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.detach()

    def _enter(self, trainer: Any, module: Any, name: str) -> None:
        if not self._inactive(trainer):
            if not self.loop.running:
                self._evaluating = name != "sanity check" and not self.loop.has_begun
                self._start(trainer, module, steps=self._evaluating)
            self.loop.enter(name)
            self._evaluation = name

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Open a step, in an evaluation without training."""
        if self._evaluating and self._adapter is not None:
            self.loop.enter("step")

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """End the step."""
        if self._evaluating and self._adapter is not None:
            self.loop.leave("step")
            self.loop.step()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _leave(self) -> None:
        if self._evaluation:
            self.loop.leave(self._evaluation)
            self._evaluation = ""

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Open the region "sanity check": validation before the first step."""
        self._enter(trainer, module, "sanity check")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Open the region "evaluation"."""
        if not trainer.sanity_checking:
            self._enter(trainer, module, "evaluation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Close the region."""
        if not trainer.sanity_checking:
            self._leave()

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Open the region "test"."""
        self._enter(trainer, module, "test")

    def on_test_end(self, trainer: Any, module: Any) -> None:
        """Close the region."""
        self._leave()

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Open the region "predict"."""
        self._enter(trainer, module, "predict")

    on_predict_end = on_test_end


def _steps(trainer: Any) -> int:
    """Return the number of steps so far: the updates of all optimizers, several in one batch counting once."""
    updates = int(trainer.global_step)
    batches = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "total_batch_idx", updates - 1) + 1
    return min(updates, batches)


def _log_summary(summary: str) -> None:
    """Log the summary by Lightning's logger, or print it if that logger hides it."""
    logger = logging.getLogger(packages()[0].__name__)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", summary)
    else:
        stderr.write(summary, sys.stderr)


_patches: dict[type, Patch] = {}  # by the class of Trainer


class AutomaticCallback(InstrumentCallback):
    """Drives the loop that the environment requests, except in a Trainer with another `InstrumentCallback`."""

    def __init__(self) -> None:
        from ..loop import loop_from_environment

        loop = loop_from_environment()
        if loop is None:
            raise ValueError(f"{RUN} does not request a loop")
        self._follow(loop)


@guard.prepared(FEATURE, otherwise=list)
def callbacks() -> list[Any]:
    """Return the callbacks of the entry point, for each new Trainer: one if the environment requests a loop."""
    if settings.enabled and os.environ.get(RUN):
        from ..loop import loop_from_environment

        if loop_from_environment() is not None:
            return [AutomaticCallback()]
    return []


@guard.contained(FEATURE)
def install() -> None:
    """Add a callback to each Trainer made from now on, of the packages imported so far, unless it has one."""
    if callbacks():
        for package in loaded():
            trainer = package.Trainer
            if trainer not in _patches:
                patch = Patch(trainer, "__init__", _with_callback)
                patch.apply()
                _patches[trainer] = patch  # last: an interrupted call of install() is repeated


def _with_callback(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        with guard.contained(FEATURE):
            if not any(isinstance(callback, InstrumentCallback) for callback in trainer.callbacks):
                trainer.callbacks[:0] = callbacks()

    return init
