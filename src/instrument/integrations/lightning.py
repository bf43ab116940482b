"""Lightning: a callback and a profiler for a Trainer of `lightning.pytorch` or of `pytorch_lightning`.

    trainer = pl.Trainer(callbacks=[InstrumentCallback("runs/x", wait=10, active=3)])

A step is a training batch in which an optimizer is updated. With gradient accumulation that is the last of the
accumulated batches; several optimizers that take turns make one step; an update that a GradScaler skips counts, as
in ``trainer.global_step``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import operator
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ..base import log, stderr
from ..base.config import RUN, settings
from ..base.errors import SyncError
from ..base.guard import contained_events, guard
from ..base.patch import Patch

if TYPE_CHECKING:  # Lightning loads this module for its entry point, in every training
    from .adapter import Adapter
    from .loop import Loop

__all__ = ["InstrumentCallback", "InstrumentProfiler", "callbacks", "install"]

FEATURE = "following Lightning"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def loaded() -> list[ModuleType]:
    """Return the packages that this process has imported; they share no classes."""
    modules = [sys.modules.get(name) for name in PACKAGES]
    return [module for module in modules if module is not None and hasattr(module, "Trainer")]


def packages() -> list[ModuleType]:
    """Return `loaded`, or the package that is installed.

    Raises:
        ImportError: neither is installed.
    """
    if not loaded():
        installed = (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None)
        name = next(installed, None)
        if name is None:
            raise ImportError("Lightning is not installed: pip install lightning")
        importlib.import_module(name)
    return loaded()


@functools.cache
def _with_bases(kind: Any, bases: tuple[type, ...]) -> Any:
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, *bases), body | {"_kind": kind})


class LightningMixin:
    """Makes instances of a subclass derive from Lightning's class ``base`` of each package imported by then."""

    base: ClassVar[str]
    inert: ClassVar[str]  # Lightning's class that does nothing, used if no instance can be made
    _kind: ClassVar[type]  # without Lightning's base classes
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance that the Trainers of both packages accept."""
        try:
            module, name = cls.base.split(".")
            bases = [getattr(getattr(package, module), name) for package in packages()]
            kind = vars(cls).get("_kind", cls)
            made = object.__new__(_with_bases(kind, tuple(base for base in bases if not issubclass(kind, base))))
            made._arguments = args, kwargs
            return made
        except ImportError:
            raise
        except Exception as error:
            guard.failed(FEATURE, error)
        package = next(sys.modules[name] for name in PACKAGES if name in sys.modules)
        return operator.attrgetter(cls.inert)(package)()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._kind, *self._arguments)  # a copy, as in a spawned process, starts from its arguments


def _make(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kind(*args, **kwargs)


def _inert_loop() -> Loop:
    """Return a loop that never starts."""
    from .loop import Loop

    return Loop.__new__(Loop)


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

    @guard.prepared(FEATURE, otherwise=lambda callback, *_, **__: callback._follow(_inert_loop()))
    def __init__(self, out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> None:
        from .loop import Loop

        arguments.setdefault("on_summary", _log_summary)
        self._follow(Loop(out, **arguments))

    def _follow(self, loop: Loop) -> None:
        self.loop = loop
        self.by_profiler = False  # an `InstrumentProfiler` opens the regions inside a step
        self._adapter: Adapter | None = None  # while this drives the loop
        self._updates = 0  # of all optimizers, so far
        self._in_step = False
        self._evaluation = ""  # the open region of an evaluation
        self._evaluating = False  # without training: the batches are the steps

    def _inactive(self, trainer: Any) -> bool:
        """Return whether another callback does the work; automatic callbacks yield to others."""
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, InstrumentCallback)]
        callbacks.sort(key=lambda callback: callback.loop.automatic)
        return not settings.enabled or callbacks[:1] != [self]

    def _start(self, module: Any, **arguments: Any) -> None:
        from .adapter import Adapter

        self.loop.start(module, **arguments)
        if self.loop.running:
            self._adapter = Adapter(self.loop)
            self._adapter.feature = FEATURE
            self._adapter.attach()

    def _name_parts(self, trainer: Any, module: Any) -> None:
        """Name the parts of a step that no event marks, by hooks of this Trainer and its strategy."""
        if self._adapter is not None:
            if module.automatic_optimization:  # else training_step() contains the whole step
                self._adapter.wrap(trainer.strategy, "training_step", self._adapter.in_region("forward"))
            self._adapter.wrap(trainer, "save_checkpoint", self._adapter.in_region("checkpoint"))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the loop, in a resumed run at its next step."""
        self._end()  # an earlier run that no event ended
        if self._inactive(trainer):
            return
        self._updates = trainer.global_step
        self._start(module, first_step=_steps(trainer))
        if not self.by_profiler:
            self._name_parts(trainer, module)

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

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Note that the next step is the first of an epoch."""
        self.loop.begin_epoch()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Close a step that the module left by returning -1 from ``on_train_batch_start``."""
        self._leave_step()
        if self._adapter is not None:
            self.loop.end_epoch()  # here the module may log, at the end of the training it may not

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
                self._start(module, steps=self._evaluating)
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
        from .loop import loop_from_environment

        loop = loop_from_environment()
        if loop is None:
            raise ValueError(f"{RUN} does not request a loop")
        self._follow(loop)


@guard.prepared(FEATURE, otherwise=list)
def callbacks() -> list[Any]:
    """Return the callbacks of the entry point, for each new Trainer: one if the environment requests a loop."""
    if settings.enabled and os.environ.get(RUN):
        from .loop import loop_from_environment

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
    def init(trainer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        with guard.contained(FEATURE):
            if not any(isinstance(callback, InstrumentCallback) for callback in trainer.callbacks):
                trainer.callbacks[:0] = callbacks()

    return init


def _inert_profiler(profiler: InstrumentProfiler, *_: Any, **__: Any) -> None:
    """Make ``profiler`` inert: it profiles nothing."""
    super(InstrumentProfiler, profiler).__init__()
    profiler._report, profiler.loop = [], _inert_loop()


class InstrumentProfiler(LightningMixin):
    """Records windows of optimizer steps with Lightning's actions as regions, in ``Trainer(profiler=...)``.

    The actions have Lightning's names (``[Strategy]SingleDeviceStrategy.training_step``, ``run_training_batch``).
    Otherwise it works as `InstrumentCallback` does; if the Trainer has one of these too, its arguments apply.

    Args:
        out: the folder for the recorded windows.
        arguments: as for `InstrumentCallback`; by default the summary is the report that Lightning logs.

    Raises:
        TypeError, ValueError: wrong arguments.
        ImportError: Lightning is not installed.
    """

    base = "profilers.Profiler"
    inert = "profilers.PassThroughProfiler"
    _callback: InstrumentCallback | None = None  # of the Trainer that uses this profiler

    @guard.prepared(FEATURE, otherwise=_inert_profiler)
    def __init__(self, out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> None:
        from .loop import Loop

        super().__init__()
        self._report: list[str] = []
        arguments.setdefault("on_summary", self._report.append)
        self.loop = Loop(out, **arguments)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run: add a callback to the Trainer, for the events that a profiler does not get."""
        try:
            self._report.clear()
            self._join(self._lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
        except Exception as error:
            guard.failed(FEATURE, error)
        super().setup(stage, local_rank, log_dir)  # type: ignore[misc]

    def _join(self, callbacks: list[Any]) -> None:
        others = [callback for callback in callbacks if isinstance(callback, InstrumentCallback)]
        others = [callback for callback in others if not callback.loop.automatic]
        if not others:
            others.append(ProfilerCallback(self))
            callbacks.insert(0, others[0])
        if others[0].loop is not self.loop and self._callback is not others[0]:
            log.warning("InstrumentProfiler uses the arguments of the Trainer's InstrumentCallback, not its own")
        self._callback = others[0]
        self._callback.by_profiler = True
        # Actions in which steps begin and end
        self._not_regions = (f"[Callback]{self._callback.state_key}.", "run_training_epoch")  # type: ignore[attr-defined]

    @guard.contained(FEATURE)
    def start(self, action_name: str) -> None:
        """Open the region of an action."""
        if self._callback is not None and not action_name.startswith(self._not_regions):
            self._callback.loop.enter(action_name)

    @guard.contained(FEATURE)
    def stop(self, action_name: str) -> None:
        """Close the region of an action, and regions that an exception left open in it."""
        if self._callback is not None and not action_name.startswith(self._not_regions):
            self._callback.loop.leave(action_name)

    def summary(self) -> str:
        """Return the summary of the windows of this run."""
        try:
            return "\n".join(self._report)
        except Exception as error:
            guard.failed(FEATURE, error)
        return ""


@contained_events(FEATURE)
class ProfilerCallback(InstrumentCallback):
    """Follows, for ``profiler``, the events that are not actions: steps, evaluations, and the end of a run."""

    def __init__(self, profiler: InstrumentProfiler) -> None:
        self._profiler = profiler
        self._follow(profiler.loop)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Stop the loop, and log the report, which Lightning omits after an exception."""
        super().on_exception(trainer, module, exception)
        with guard.contained(FEATURE):
            self._profiler.describe()  # type: ignore[attr-defined]
