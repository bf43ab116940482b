"""torchtitan, and trainers of its style: a class whose ``train_step`` makes one optimizer update.

    attach("runs/x", wait=10, active=3)                     # before torchtitan's Trainer is made
    attach("runs/x", wait=10, active=3, trainer=MyTrainer)  # a class of your own, or an instance

A step is one call of ``train_step``. Steps have the trainer's own numbers: torchtitan's first step is 1, and a
resumed run continues after its checkpoint.

`process_trace` takes the traces of torchtitan's own profiler, as the function of its ``trace_post_processor``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..base import log
from ..base.guard import guard
from ..base.patch import Change, undo
from ..record.handover.finishing_process import process_trace
from .adapter import Adapter, CallWrapper, Removal, require, when_requested
from .loop import Loop

__all__ = ["attach", "install", "process_trace"]

FEATURE = "following the trainer"
TRAINER_MODULES = ("torchtitan.trainer", "torchtitan.train")  # the second before torchtitan 0.3
METHOD = "train_step"


class TorchtitanAdapter(Adapter):
    """Follows one trainer at a time: the first that makes a step drives the loop until its ``train()`` ends.

    Args:
        loop: the loop that the trainer drives.
        trainer: an instance, a class whose instances made from now on are followed, or None for torchtitan's.
        method: the method that makes a step.
    """

    feature = FEATURE

    def __init__(self, loop: Loop, trainer: Any = None, method: str = METHOD) -> None:
        super().__init__(loop)
        self.method = method
        self._trainer = trainer
        self._hooks: weakref.WeakSet[TrainerHooks] = weakref.WeakSet()
        self._classes: list[type] = []

    def install_hooks(self) -> None:
        """Hook the trainer, or the constructor of its class."""
        self.apply(Removal(self._unhook_trainers))
        if self._trainer is None:
            for module in TRAINER_MODULES:
                self.when_imported(module, self._imported)
        elif isinstance(self._trainer, type):
            self._hook_class(self._trainer)
        else:
            self._hooks.add(TrainerHooks(self, self._trainer))

    def _unhook_trainers(self) -> None:
        for hooks in self._hooks:
            undo(hooks.changes)

    def _imported(self, module: Any) -> None:
        trainer = getattr(module, "Trainer", None)
        if isinstance(trainer, type) and hasattr(trainer, self.method):
            self._hook_class(trainer)

    def _hook_class(self, trainer: type) -> None:
        """Hook each instance, not the class: a subclass may have a ``train_step`` of its own."""
        if trainer in self._classes:
            return
        self._classes.append(trainer)

        def init(original: Callable[..., None], this: Any, /, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            with guard.contained(FEATURE):
                self._hooks.add(TrainerHooks(self, this))

        self.wrap(trainer, "__init__", init)


@guard.prepared(FEATURE, otherwise=TorchtitanAdapter.inert)
def attach(
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    trainer: Any = None,
    method: str = METHOD,
    **options: Any,
) -> TorchtitanAdapter:
    """Record windows of a trainer's steps, name the parts of a step, and find synchronizations.

    Regions: "step"; "micro-step" if a step has several; "data", "checkpoint" and "evaluation" if the trainer
    has torchtitan's ``batch_generator``, ``checkpointer`` and ``validator``; the modules of ``model_parts`` or
    ``model``; backward, clipping and optimizer. Recording ends when the trainer's ``train()`` returns. While the
    trainer's own profiler is on (``config.profiler.enable_profiling``), that one records, with these regions.

    Args:
        out: the folder for the recorded windows.
        trainer: an instance, or a class whose instances made from now on are followed; by default torchtitan's
            Trainer.
        method: the name of the method that makes a step.
        options: the arguments of `instrument.integrations.loop.Loop`: the schedule (``wait``, ``active``, ...),
            ``syncs``, ``budget``, ``modules``, ``names``, ...

    Returns:
        The adapter, which ``detach()`` removes; it is also a context manager.

    Raises:
        TypeError, ValueError: wrong arguments.
        ImportError: torchtitan is not installed, and no ``trainer`` is given.
    """
    loop = Loop(out, **options)
    if trainer is None:
        require("torchtitan")
    elif not callable(getattr(trainer, method, None)):
        raise TypeError(f'"trainer" must be a class or an object with a method "{method}": {trainer!r}')
    return TorchtitanAdapter(loop, trainer, method).attach()


install = when_requested(TorchtitanAdapter)


class TrainerHooks:
    """The hooks of one trainer, which alone keeps them alive: a trainer that is no longer used is freed."""

    def __init__(self, adapter: TorchtitanAdapter, trainer: Any) -> None:
        self.changes: list[Change] = []
        self._adapter = adapter
        self._loop = adapter.loop
        self._trainer = trainer
        self._seen = False
        self._steps_done = 0  # steps
        self._wrap(trainer, adapter.method, self._step)
        if hasattr(trainer, "train") and not hasattr(trainer, "named_modules"):  # a module's train() sets its mode
            self._wrap(trainer, "train", self._train)
        if hasattr(trainer, "batch_generator"):
            self._wrap(trainer, "batch_generator", self._batches)

    def _wrap(self, owner: Any, name: str, around: CallWrapper) -> None:
        self._adapter.wrap(owner, name, around, self.changes)

    def _step(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._adapter.claim(self):
            return original(*args, **kwargs)
        self._begin()
        with self._loop.region("step"):
            result = original(*args, **kwargs)
        self._adapter.step_complete = True
        self._steps_done += 1
        return result

    def _begin(self) -> None:
        """End the previous step, which includes the checkpoint and validation after it, and begin the next.

        A step that raised does not count, if the trainer goes on.
        """
        if self._loop.running:
            if self._adapter.step_complete:
                self._loop.step()
        else:
            with guard.contained(FEATURE):
                self._start()
        self._adapter.step_complete = False

    def _start(self) -> None:
        trainer, profiler = self._trainer, getattr(getattr(self._trainer, "config", None), "profiler", None)
        if not self._seen:
            self._seen = True
            self._hook_parts()
        if getattr(profiler, "enable_profiling", False) and self._loop.record:
            self._loop.record_nothing()
            log.warning(
                "the trainer's own profiler is on and records, with these regions: no windows are opened",
                instead="config.profiler.enable_profiling=False",
            )
        models = getattr(trainer, "model_parts", None) or getattr(trainer, "model", None)
        models = models if isinstance(models, (list, tuple)) else [models]
        models = [model for model in models if hasattr(model, "named_modules")]
        self._loop.start(*models, first_step=_number(trainer, self._steps_done))

    def _hook_parts(self) -> None:
        """Hook the parts outside the step; not earlier, as subclasses may create them after the trainer itself."""
        trainer, in_region = self._trainer, self._adapter.in_region
        if getattr(trainer, "gradient_accumulation_steps", 1) != 1 and hasattr(trainer, "forward_backward_step"):
            self._wrap(trainer, "forward_backward_step", in_region("micro-step"))
        checkpointer = getattr(trainer, "checkpointer", None)
        if hasattr(checkpointer, "save"):
            self._wrap(checkpointer, "save", self._save)
        validator = getattr(trainer, "validator", None)
        if hasattr(validator, "validate"):
            self._wrap(validator, "validate", in_region("evaluation"))

    def _save(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Open the region "checkpoint" if this call saves; it is called after every step."""
        checkpointer = self._trainer.checkpointer
        saves = getattr(checkpointer, "enable", True)
        with guard.contained(FEATURE):
            saves = saves and getattr(checkpointer, "_should_save", lambda *_, **__: True)(*args, **kwargs)
        if not saves:
            return original(*args, **kwargs)
        return self._adapter.in_region("checkpoint")(original, *args, **kwargs)

    def _batches(self, original: Callable[..., Iterable[Any]], /, *args: Any, **kwargs: Any) -> Iterator[Any]:
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

    def _train(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            self._adapter.release(self)


def _number(trainer: Any, made: int) -> int:
    """Return the trainer's own number of the step that begins; else how many steps were ``made`` before it."""
    numbers = (getattr(trainer, name, None) for name in ("step", "global_step"))
    return next((number for number in numbers if type(number) is int and number >= 0), made)
