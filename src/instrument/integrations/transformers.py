"""Hugging Face Transformers: `InstrumentCallback` for its Trainer, `annotate_generation` for its models."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, ClassVar

from torch import nn

from .. import compat, log
from ..config import settings
from ..guard import guard
from .adapter import Adapter
from .environment import loop_from_environment
from .generation import annotate_generation
from .loop import Loop

try:
    from transformers import TrainerCallback
    from transformers.utils.logging import get_logger
except ImportError as error:
    raise ImportError("transformers, or a part of it, is missing: pip install transformers") from error

__all__ = ["InstrumentCallback", "annotate_generation", "install"]

FEATURE = "following the Trainer"
# What the methods of a Trainer are called. It has no event for the beginning of these.
REGIONS = {
    "compute_loss": "forward",
    "evaluate": "evaluation",
    "predict": "evaluation",
    "_save_checkpoint": "checkpoint",
}
# An error that leaves one of these ends the training, and then there is no `on_train_end`.
LOOPS = ("_run_epoch", "_finalize_training", "training_step")


class _Follower(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Drives ``loop`` by the events of a Trainer, and names its methods from the begin to the end of training."""

    _following: ClassVar[list[_Follower]] = []  # those that drive a loop now

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._attachment: Adapter | None = None  # to the Trainer that trains
        self._trainer: weakref.ref[Any] | None = None
        self._thread = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_attachment": None, "_trainer": None}

    @guard.contained(FEATURE)
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin with the step that comes next, also in a run that is resumed."""
        self._end()  # of a training that failed, or that begins anew with smaller batches
        if not settings.enabled:
            return
        callers = _callers()
        for other in list(self._following):
            other._end_unless_in(callers)
        kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", ())
        trainers = (this for this in callers if isinstance(this, kind))
        trainer = next((this for this in trainers if self in this.callback_handler.callbacks), None)
        if self._gives_way(trainer):
            return
        models = [model] if isinstance(model, nn.Module) else []
        self.loop.start(*models, first_step=state.global_step)
        if self.loop.running:
            self._attachment = Adapter(self.loop)
            self._following.append(self)
            if trainer is not None:
                self._trainer, self._thread = weakref.ref(trainer), get_ident()
                self._follow(trainer)

    @guard.contained(FEATURE)
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the region of the step: the batches are there."""
        if self._attachment is not None:
            self.loop.leave("step")
            self.loop.enter("step")

    @guard.contained(FEATURE)
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the optimizer step."""
        if self._attachment is not None:
            self.loop.leave("step")
            self.loop.step()

    @guard.contained(FEATURE)
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close a step that was broken off."""
        if self._attachment is not None:
            self.loop.leave("step")

    @guard.contained(FEATURE)
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write what was recorded and leave nothing behind."""
        self._end()

    def _gives_way(self, trainer: Any) -> bool:
        return self.loop.running  # another Trainer, inside of which this one trains, drives it

    @guard.contained(FEATURE)
    def _end(self) -> None:
        attachment, self._attachment = self._attachment, None
        if self in self._following:
            self._following.remove(self)
        if attachment is not None:
            attachment.remove()

    def _end_unless_in(self, callers: list[Any]) -> None:
        """End what no event ended: another callback failed, and the Trainer no longer trains on this thread."""
        trainer = self._trainer() if self._trainer is not None else None
        if self._thread == get_ident() and all(this is not trainer for this in callers):
            self._end()

    def _follow(self, trainer: Any) -> None:
        """Name the methods of this one object: whatever a subclass made of them, and of no other Trainer."""
        attachment = self._attachment
        assert attachment is not None
        for owner, method in (*((trainer, name) for name in LOOPS), (trainer.callback_handler, "call_event")):
            attachment.wrap(owner, method, self._ends)
        for method, name in REGIONS.items():
            attachment.wrap(trainer, method, attachment.region(name))
        if trainer.args.gradient_accumulation_steps > 1:
            attachment.wrap(trainer, "training_step", attachment.region("micro-step"))
        if hasattr(trainer.model, "generate"):
            attachment.undo.append(annotate_generation(trainer.model).remove)

    def _ends(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            self._end()
            raise


class InstrumentCallback(_Follower):
    """Windows, regions and waits of what a Trainer trains: ``Trainer(..., callbacks=[InstrumentCallback()])``.

    A step is an optimizer update, by the number of ``state.global_step``. Regions are "step", "micro-step" (where
    gradients are accumulated), "forward", "backward", "evaluation", "checkpoint", those of the optimizer, the
    DataLoader and the modules, and in evaluation those of `annotate_generation`. Training stays as it is, and
    nothing is left behind when it ends or fails.

    Args:
        out: the folder that windows land in.
        tell: called with the text of the summary; the Trainer's logger by default, at a level that shows.
        arguments: ``wait``, ``warmup``, ``active``, ``modules``, ``syncs``, ``budget``, ``record_shapes``, ... as
            `Loop` takes them.

    Raises:
        TypeError, ValueError: arguments that are none of these.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[InstrumentCallback("runs/gpt2", wait=1, active=3)])
    """

    @guard.prepared(FEATURE, otherwise=lambda self, *_, **__: _Follower.__init__(self, Loop.__new__(Loop)))
    def __init__(
        self,
        out: str | os.PathLike[str] = "runs/instrument",
        *,
        tell: Callable[[str], None] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(Loop(out, tell=tell or _tell, **arguments))


class _Automatic(_Follower):
    """Drives the loop that the environment asks for, but in a Trainer that has an `InstrumentCallback`."""

    def __init__(self) -> None:
        loop = loop_from_environment()
        assert loop is not None  # or `install` did nothing
        super().__init__(loop)

    def _gives_way(self, trainer: Any) -> bool:
        callbacks = trainer.callback_handler.callbacks if trainer is not None else []
        return super()._gives_way(trainer) or any(isinstance(other, InstrumentCallback) for other in callbacks)


def _callers() -> list[Any]:
    """Return the objects whose methods run on this thread: callbacks are not given the Trainer that calls them."""
    found, frame = [], sys._getframe(1).f_back
    while frame is not None:
        found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


def install() -> None:
    """Have every Trainer made from now on drive the loop that the environment asks for, if it asks for one."""
    if loop_from_environment() is not None:
        compat.when_imported("transformers.trainer", _add)


def _add(trainer: Any) -> None:
    with guard.contained(FEATURE):
        callbacks = getattr(trainer, "DEFAULT_CALLBACKS", None)
        if not isinstance(callbacks, list):
            log.warning("this version of the Trainer is followed by an InstrumentCallback alone")
        elif _Automatic not in callbacks:
            callbacks.append(_Automatic)


def _tell(text: str) -> None:
    logger = get_logger("transformers.trainer")
    logger.log(
        max(logging.WARNING, logger.getEffectiveLevel()), "\n%s", text
    )  # asked for, so never below the level
