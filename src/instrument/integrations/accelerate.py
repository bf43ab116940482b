"""Hugging Face Accelerate: windows, regions and synchronizations of a loop that drives an `Accelerator`.

accelerator = Accelerator()
attach("runs/gpt2", accelerator=accelerator, wait=1, warmup=1, active=3)
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity

from ..base.guard import guard
from ..base.units import integer
from ..record.windows.steps import SCHEDULE_OPTIONS
from .adapter import Adapter, CallWrapper
from .loop import Loop

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import ProfileKwargs
except ImportError as error:
    raise ImportError("accelerate, or a part of it, is missing: pip install accelerate") from error

__all__ = ["attach"]

FEATURE = "following the accelerator"
PREPARE = ("prepare", "prepare_model", "prepare_optimizer")
CHECKPOINT = ("save_state", "save_model")
OPTIONS = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class AccelerateAdapter(Adapter):
    """Follows one `Accelerator`.

    The class is patched, not the object, as copies of the object would include its attributes.
    """

    feature = FEATURE

    def __init__(self, loop: Loop, accelerator: Accelerator, first_step: int) -> None:
        super().__init__(loop)
        self._accelerator: Callable[[], Any] = weakref.ref(accelerator)
        self._first_step = first_step
        self._optimizer: Callable[[], Any] = lambda: None  # the first one prepared, whose updates are the steps
        self._accumulating = False
        self._step_due = False  # a step ended inside `accumulate`, whose region must close first

    def install_hooks(self) -> None:
        """Patch the methods, and start the loop if an optimizer is prepared already."""
        accelerator = self._accelerator()
        _attached[accelerator] = self
        calls = dict.fromkeys(PREPARE, self._prepare) | dict.fromkeys(CHECKPOINT, self.in_region("checkpoint"))
        calls |= {"accumulate": self._accumulate, "end_training": self._end_training}
        for method, around in calls.items():
            self.wrap(type(accelerator), method, self._only_for_this_accelerator(around))
        self.wrap(AcceleratedOptimizer, "step", self._step)
        for prepared in ("_models", "_optimizers"):
            self._follow_prepared(getattr(accelerator, prepared, ()))

    @guard.contained(FEATURE)
    def detach(self) -> None:
        """Stop the loop, which writes an open window, and undo every change; a second call does nothing."""
        accelerator = None if self._inert else self._accelerator()
        if accelerator is not None and _attached.get(accelerator) is self:
            del _attached[accelerator]
        super().detach()

    def _only_for_this_accelerator(self, around: CallWrapper) -> CallWrapper:
        """Return ``around`` for this accelerator; others of its class call the original."""

        def call(original: Callable[..., Any], this: Any, /, *args: Any, **kwargs: Any) -> Any:
            if this is not self._accelerator():
                return original(this, *args, **kwargs)
            return around(functools.partial(original, this), *args, **kwargs)

        return call

    @guard.contained(FEATURE)
    def _follow_prepared(self, prepared: Iterable[Any]) -> None:
        """Annotate the models; the first optimizer counts the steps until `Accelerator.clear` drops it."""
        optimizers = getattr(self._accelerator(), "_optimizers", ())
        for item in prepared:
            if isinstance(item, nn.Module):
                self.loop.name(item)
            elif isinstance(item, AcceleratedOptimizer):
                first = self._optimizer()
                if all(first is not other for other in optimizers):
                    self._optimizer = weakref.ref(item)
                self.loop.start(first_step=self._first_step)

    def _prepare(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        self._follow_prepared(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
        return prepared

    def _step(self, original: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        accelerator = self._accelerator()
        if self._optimizer() is optimizer and accelerator.sync_gradients:
            if self._accumulating:
                self._step_due = True
            else:
                self.loop.step()
        return result

    @contextlib.contextmanager
    def _accumulate(self, original: Callable[..., Any], *models: Any) -> Iterator[None]:
        in_micro_steps = False
        try:
            in_micro_steps = self._accelerator().gradient_accumulation_steps > 1
            self._accumulating, self._step_due = True, False
            if in_micro_steps:
                self.loop.enter("micro-step")
        except Exception as error:
            guard.failed(FEATURE, error)
        try:
            with original(*models):
                yield
        finally:
            if in_micro_steps:
                self.loop.leave("micro-step")
            self._accumulating, due = False, self._step_due
        if due:
            self.loop.step()

    def _end_training(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.detach()  # before the process group is destroyed
        return original(*args, **kwargs)


_attached: weakref.WeakKeyDictionary[Accelerator, AccelerateAdapter] = weakref.WeakKeyDictionary()


@guard.prepared(FEATURE, otherwise=AccelerateAdapter.inert)
def attach(
    out: str | os.PathLike[str] | None = None,
    *,
    accelerator: Accelerator,
    profile: ProfileKwargs | None = None,
    first_step: int = 0,
    **options: Any,
) -> AccelerateAdapter:
    """Record windows of a loop that drives ``accelerator``, name the parts of a step, and find synchronizations.

    Recording begins when the first optimizer is prepared, and each update by that optimizer is a step: an update
    that the gradient scaler skips counts, a batch that only accumulates gradients does not. Regions: the models,
    as they are prepared; "micro-step" (the body of ``accumulate``, if it accumulates), "backward",
    "checkpoint", optimizers and DataLoaders. ``accelerator.end_training()`` and the end of the process detach.

    Args:
        out: the folder for the recorded windows; by default the one of ``profile``, or "runs/instrument".
        accelerator: any `accelerate.Accelerator`. An adapter that is attached to it is detached.
        profile: a schedule and options in Accelerate's own terms, by default those in the accelerator's
            ``kwargs_handlers``. Other arguments take precedence. ``with accelerator.profile()`` is not needed.
        first_step: the number of the next step, in a resumed run.
        options: the arguments of `instrument.integrations.loop.Loop`: the schedule (``wait``, ``active``, ...),
            ``modules``, ``syncs``, ``budget``, ``record_shapes``, ...

    Returns:
        The adapter, which ``detach()`` removes; it is also a context manager.

    Raises:
        TypeError, ValueError: wrong arguments.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f'"accelerator" must be an accelerate.Accelerator: {accelerator!r}')
    if profile is not None and not isinstance(profile, ProfileKwargs):
        raise TypeError(f'"profile" must be an accelerate.utils.ProfileKwargs: {profile!r}')
    first_step = integer("first_step", first_step)
    profile = profile or getattr(accelerator, "profile_handler", None)
    loop = Loop(**_merge_options(out, profile, options))
    loop.labels_evaluation = True
    previous = _attached.get(accelerator)
    if previous is not None:
        previous.detach()
    return AccelerateAdapter(loop, accelerator, first_step).attach()


def _merge_options(
    out: str | os.PathLike[str] | None, profile: ProfileKwargs | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a `Loop`: those given, completed by the values of ``profile``."""
    merged: dict[str, Any] = {}
    if profile is not None:
        merged = {name: getattr(profile, name) for name in OPTIONS if getattr(profile, name, None)}
        if profile.activities is not None:
            merged["activities"] = [_activity(name) for name in profile.activities]
        if profile.output_trace_dir is not None:
            merged["out"] = profile.output_trace_dir
        if profile.schedule_option is not None and not {*SCHEDULE_OPTIONS, "schedule"} & {*options}:
            merged |= {"repeat": 0, **profile.schedule_option}  # 0 is endless, as in torch
    if out is not None:
        merged["out"] = out
    return merged | options


def _activity(name: str) -> ProfilerActivity:
    activities: dict[str, ProfilerActivity] = dict(ProfilerActivity.__members__)
    if str(name).upper() not in activities:
        raise ValueError(f'"activities" must be some of {", ".join(activities).lower()}: {name!r}')
    return activities[name.upper()]
