"""Hugging Face Transformers: `InstrumentCallback` for its Trainer, `annotate_generation` for its models."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from traceback import walk_stack
from typing import Any, ClassVar

from torch import nn

from ..base import log
from ..base.config import settings
from ..base.guard import contained_events, guard
from ..base.imports import ImportHook
from .adapter import Adapter, Removal
from .generation import annotate_generation
from .loop import Loop, loop_from_environment

try:
    from transformers import TrainerCallback
    from transformers.utils.logging import get_logger
except ImportError as error:
    raise ImportError("transformers, or a part of it, is missing: pip install transformers") from error

__all__ = ["InstrumentCallback", "annotate_generation", "install"]

FEATURE = "following the Trainer"
REGIONS = {
    "compute_loss": "forward",
    "evaluate": "evaluation",
    "predict": "evaluation",
    "_save_checkpoint": "checkpoint",
}
"""The methods of a Trainer that are regions: no event of the Trainer marks their beginning."""
LOOPS = ("_run_epoch", "_finalize_training", "training_step")
"""The methods whose errors end the training, in which case ``on_train_end`` is not called."""


class TrainerAdapter(Adapter):
    """Follows one training of one Trainer.

    Args:
        loop: the loop that the training drives.
        trainer: the Trainer; None if it cannot be found.
        on_error: called when an error ends the training.
    """

    feature = FEATURE

    def __init__(self, loop: Loop, trainer: Any, on_error: Callable[[], None]) -> None:
        super().__init__(loop)
        self._trainer: Callable[[], Any] = weakref.ref(trainer) if trainer is not None else lambda: None
        self._on_error = on_error
        self._thread = get_ident()

    def install_hooks(self) -> None:
        """Hook the methods of this object, also those of a subclass; other Trainers are not affected."""
        trainer = self._trainer()
        if trainer is None:
            return
        for owner, method in (*((trainer, name) for name in LOOPS), (trainer.callback_handler, "call_event")):
            self.wrap(owner, method, self._watch)
        for method, name in REGIONS.items():
            self.wrap(trainer, method, self.in_region(name))
        if trainer.args.gradient_accumulation_steps > 1:
            self.wrap(trainer, "training_step", self.in_region("micro-step"))
        if hasattr(trainer.model, "generate"):
            self.apply(Removal(annotate_generation(trainer.model).remove))

    def _watch(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            self._on_error()
            raise

    def has_stopped_training(self, callers: list[Any]) -> bool:
        """Return whether the Trainer stopped training without an event, as after an error of another callback.

        This can be seen only on its own thread, from the objects whose methods run on it.
        """
        trainer = self._trainer()
        return self._thread == get_ident() and all(caller is not trainer for caller in callers)


@contained_events(FEATURE)
class LoopCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Drives ``loop`` by the events of a Trainer, with a `TrainerAdapter` while it trains."""

    _active_callbacks: ClassVar[list[LoopCallback]] = []

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._adapter: TrainerAdapter | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_adapter": None}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start the loop at the Trainer's next step, also in a resumed run."""
        self._end()  # a training that failed, or that starts over with smaller batches
        if not settings.enabled:
            return
        callers = _callers()
        for other in list(self._active_callbacks):
            if other._adapter is not None and other._adapter.has_stopped_training(callers):
                other._end()
        kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", ())
        trainers = (caller for caller in callers if isinstance(caller, kind))
        trainer = next((caller for caller in trainers if self in caller.callback_handler.callbacks), None)
        if self._must_yield(trainer):
            return
        models = [model] if isinstance(model, nn.Module) else []
        self.loop.start(*models, first_step=state.global_step)
        if self.loop.running:
            self._active_callbacks.append(self)
            self._adapter = TrainerAdapter(self.loop, trainer, self._end)
            self._adapter.attach()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that the next step is the first of an epoch."""
        self.loop.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the region of the step; its batches are loaded."""
        if self._adapter is not None:
            self.loop.leave("step")
            self.loop.enter("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the optimizer step."""
        if self._adapter is not None:
            self.loop.leave("step")
            logs = control.should_log  # `trainer.log` clears it, as a function of `on_steps`
            self.loop.step()
            control.should_log |= logs

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close an unfinished step."""
        if self._adapter is not None:
            self.loop.leave("step")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write an open window and remove every hook."""
        self._end()

    def _must_yield(self, trainer: Any) -> bool:
        return self.loop.running  # by a Trainer whose training contains this one

    @guard.contained(FEATURE)
    def _end(self) -> None:
        adapter, self._adapter = self._adapter, None
        if self in self._active_callbacks:
            self._active_callbacks.remove(self)
        if adapter is not None:
            adapter.detach()


class InstrumentCallback(LoopCallback):
    """Records windows of a training, names its parts, and finds synchronizations, in ``Trainer(callbacks=[...])``.

    A step is an optimizer update, numbered by ``state.global_step``. Regions: "step", "micro-step" if gradients
    are accumulated, "forward", "backward", "evaluation", "checkpoint", the optimizer, the DataLoader and the
    modules, and in evaluation those of `annotate_generation`. The training is unchanged, and all hooks are removed
    when it ends or fails.

    Args:
        out: the folder for the recorded windows.
        on_summary: called with the text of the summary; the Trainer's logger by default, at a level that shows.
        arguments: those of `instrument.integrations.loop.Loop`: the schedule (``wait``, ``active``, ...),
            ``modules``, ``syncs``, ``budget``, ``record_shapes``, ...

    Raises:
        TypeError, ValueError: wrong arguments.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[InstrumentCallback("runs/gpt2", wait=1, active=3)])
    """

    @guard.prepared(FEATURE, otherwise=lambda self, *_, **__: LoopCallback.__init__(self, Loop.__new__(Loop)))
    def __init__(
        self,
        out: str | os.PathLike[str] = "runs/instrument",
        *,
        on_summary: Callable[[str], None] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(Loop(out, on_summary=on_summary or _log_summary, **arguments))


class AutomaticCallback(LoopCallback):
    """Drives the loop that the environment requests, except in a Trainer with an `InstrumentCallback`."""

    def __init__(self) -> None:
        loop = loop_from_environment()
        assert loop is not None  # or `install` did nothing
        super().__init__(loop)

    def _must_yield(self, trainer: Any) -> bool:
        callbacks = trainer.callback_handler.callbacks if trainer is not None else []
        written = any(isinstance(callback, InstrumentCallback) for callback in callbacks)
        return super()._must_yield(trainer) or written


def _callers() -> list[Any]:
    """Return the objects whose methods run on this thread; a Trainer does not pass itself to its callbacks."""
    return [caller.f_locals.get("self") for caller, _ in walk_stack(sys._getframe(1).f_back)]


def install() -> None:
    """Add a callback to every Trainer made from now on if the environment requests a loop."""
    if loop_from_environment() is not None:
        ImportHook("transformers.trainer", _add_default_callback).apply()


def _add_default_callback(module: Any) -> None:
    with guard.contained(FEATURE):
        callbacks = getattr(module, "DEFAULT_CALLBACKS", None)
        if not isinstance(callbacks, list):
            log.warning("this version of transformers is followed with an InstrumentCallback only")
        elif AutomaticCallback not in callbacks:
            module.DEFAULT_CALLBACKS = [*callbacks, AutomaticCallback]


def _log_summary(text: str) -> None:
    logger = get_logger("transformers.trainer")
    level = max(logging.WARNING, logger.getEffectiveLevel())  # one that the logger shows, as the user wants it
    logger.log(level, "\n%s", text)
