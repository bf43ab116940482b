"""torchtitan, and trainers of its style: a class whose ``train_step`` makes one optimizer update.

    attach("runs/x", wait=10, active=3)                     # before torchtitan's Trainer is made
    attach("runs/x", wait=10, active=3, trainer=MyTrainer)  # a class of one's own, or an instance

A step is a call of ``train_step``, and has the number that the trainer itself has for it: 1 for the first in
torchtitan, and the one after the checkpoint in a run that is resumed.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import log
from ..guard import guard
from .adapter import Adapter, require
from .environment import loop_from_environment
from .loop import Loop

FEATURE = "following the trainer"
HOMES = ("torchtitan.trainer", "torchtitan.train")  # of the Trainer; the second one before 0.3


def attach(
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    trainer: Any = None,
    method: str = "train_step",
    **options: Any,
) -> Adapter:
    """Record windows of a trainer's steps, name their parts, and find waits.

    Regions: "step"; "micro-step" where a step has several; "data", "checkpoint" and "evaluation" where the trainer
    has torchtitan's ``batch_generator``, ``checkpointer`` and ``validator``; the modules of ``model_parts`` or
    ``model``; backward, clipping and optimizer. The end of the trainer's ``train()`` ends the recording. While the
    trainer's own profiler is on (``config.profiler.enable_profiling``), it records, with these regions.

    Args:
        out: the folder that windows land in.
        trainer: a class, whose instances made from now on are followed, or an instance; by default
            torchtitan's.
        method: the name of the method that makes a step.
        options: as `instrument.integrations.loop.Loop` takes them: the plan (``wait``, ``active``, ...),
            ``syncs``, ``budget``, ``modules``, ``names``, ``tell``.

    Returns:
        What was attached, with ``remove()``; it is a context manager as well.

    Raises:
        TypeError, ValueError: arguments that are not accepted.
        ImportError: ``trainer`` was not given, and torchtitan is not installed.
    """
    attachment = Adapter(Loop(out, **options))
    if trainer is None:
        require("torchtitan")
    elif not callable(getattr(trainer, method, None)):
        raise TypeError(f'"trainer" must be a class or an object with a method "{method}": {trainer!r}')
    if attachment.on:
        Followers(attachment, method).follow(trainer)
    return attachment


@functools.cache
def install() -> None:
    """Have torchtitan's trainers drive the loop that the environment asks for, if it does."""
    loop = loop_from_environment()
    if loop is not None:
        attachment = Adapter(loop)
        if attachment.on:
            Followers(attachment, "train_step").follow(None)


class Followers:
    """Follows the trainers that come up; the first that makes a step drives the loop while it is there."""

    def __init__(self, attachment: Adapter, method: str) -> None:
        self.attachment = attachment
        self.method = method
        self._all: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._driver: weakref.ref[Follower] | None = None
        self._classes: list[type] = []
        attachment.undo.append(self._undo)

    def _undo(self) -> None:
        for follower in self._all:
            while follower.undo:
                follower.undo.pop()()

    def follow(self, trainer: Any) -> None:
        """Follow an instance, those of a class, or, where None is given, torchtitan's."""
        if trainer is None:
            for home in HOMES:
                self.attachment.when_imported(home, FEATURE, self._imported)
        elif isinstance(trainer, type):
            self._follow_class(trainer)
        else:
            self._all.add(Follower(self, trainer))

    def _imported(self, module: Any) -> None:
        trainer = getattr(module, "Trainer", None)
        if isinstance(trainer, type) and hasattr(trainer, self.method):
            self._follow_class(trainer)

    def _follow_class(self, trainer: type) -> None:
        """Follow each instance by itself: it has the ``train_step`` of the subclass that it is of."""
        if trainer in self._classes:
            return
        self._classes.append(trainer)

        def made(original: Callable[..., None], this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            with guard.contained(FEATURE):
                self._all.add(Follower(self, this))

        self.attachment.wrap(trainer, "__init__", made)

    def drives(self, follower: Follower) -> bool:
        """Tell whether ``follower`` drives the loop, as it does from now on if no other is there."""
        driver = None if self._driver is None else self._driver()
        if driver is None:
            self.attachment.end()
            self._driver = weakref.ref(follower)
        return driver is None or driver is follower

    def end(self, follower: Follower) -> None:
        """End the loop, until the next step, if ``follower`` drives it."""
        if self._driver is not None and self._driver() is follower:
            self.attachment.end()
            self._driver = None


class Follower:
    """Follows one trainer, which alone keeps it: one that nobody needs any more can go."""

    def __init__(self, followers: Followers, trainer: Any) -> None:
        self.undo: list[Callable[[], None]] = []
        self._followers = followers
        self._attachment = followers.attachment
        self._loop = followers.attachment.loop
        self._trainer = trainer
        self._seen = False
        self._made = 0  # steps
        self._wrap(trainer, followers.method, self._step)
        if hasattr(trainer, "train") and not hasattr(trainer, "named_modules"):  # else it sets a mode
            self._wrap(trainer, "train", self._run)
        if hasattr(trainer, "batch_generator"):
            self._wrap(trainer, "batch_generator", self._batches)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._attachment.wrap(owner, name, around, self.undo)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._followers.drives(self):
            return original(*args, **kwargs)
        self._begin()
        with self._loop.region("step"):
            result = original(*args, **kwargs)
        self._attachment.complete = True
        self._made += 1
        return result

    def _begin(self) -> None:
        """End the step before, to which the checkpoint and the validation after it belong, and begin one.

        One that raised was none, if the trainer goes on.
        """
        if self._loop.running:
            if self._attachment.complete:
                self._loop.step()
        else:
            with guard.contained(FEATURE):
                self._start()
        self._attachment.complete = False

    def _start(self) -> None:
        trainer, own = self._trainer, getattr(getattr(self._trainer, "config", None), "profiler", None)
        if not self._seen:
            self._seen = True
            self._find()
        if getattr(own, "enable_profiling", False) and self._loop.record:
            self._loop.record = False
            log.warning(
                "the trainer's own profiler is on and records, with these regions: no windows are opened",
                instead="config.profiler.enable_profiling=False",
            )
        models = getattr(trainer, "model_parts", None) or getattr(trainer, "model", None)
        models = models if isinstance(models, (list, tuple)) else [models]
        models = [model for model in models if hasattr(model, "named_modules")]
        self._loop.start(*models, first_step=_number(trainer, self._made))

    def _find(self) -> None:
        """Name what there is beside the step, which subclasses may have made after the trainer itself."""
        trainer, region = self._trainer, self._attachment.region
        if getattr(trainer, "gradient_accumulation_steps", 1) != 1 and hasattr(trainer, "forward_backward_step"):
            self._wrap(trainer, "forward_backward_step", region("micro-step"))
        checkpointer = getattr(trainer, "checkpointer", None)
        if hasattr(checkpointer, "save"):
            self._wrap(checkpointer, "save", self._save)
        validator = getattr(trainer, "validator", None)
        if hasattr(validator, "validate"):
            self._wrap(validator, "validate", region("evaluation"))

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that saves a region: it is called after every step."""
        checkpointer = self._trainer.checkpointer
        saves = getattr(checkpointer, "enable", True)
        with guard.contained(FEATURE):
            saves = saves and getattr(checkpointer, "_should_save", lambda *_, **__: True)(*args, **kwargs)
        if not saves:
            return original(*args, **kwargs)
        return self._attachment.region("checkpoint")(original, *args, **kwargs)

    def _batches(self, original: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
        batches = iter(original(*args, **kwargs))
        while True:
            self._loop.enter("data")
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._loop.leave("data")
            yield batch

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            self._followers.end(self)


def _number(trainer: Any, made: int) -> int:
    """Return the number that ``trainer`` has for the step that begins, after those ``made``."""
    numbers = (getattr(trainer, name, None) for name in ("step", "global_step"))
    return next((number for number in numbers if type(number) is int and number >= 0), made)
