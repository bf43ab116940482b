"""Hugging Face Accelerate: `instrumented`, around the `Accelerator` of a loop that people write themselves."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity

from ..config import settings
from ..guard import guard
from ..patch import Patch
from ..windows.steps import PLAN
from .attachment import Attachment
from .loop import Loop

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import ProfileKwargs
except ImportError as error:
    raise ImportError("accelerate, or a part of it, is missing: pip install accelerate") from error

__all__ = ["instrumented", "plain"]

PREPARE = ("prepare", "prepare_model", "prepare_optimizer")
CHECKPOINT = ("save_state", "save_model")
ATTRIBUTE = "_instrument"
OPTIONS = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class Instrumented(Attachment):
    """What is on one `Accelerator`: ``loop`` is told what its methods do."""

    def __init__(self, accelerator: Accelerator, loop: Loop, first_step: int) -> None:
        super().__init__(loop)
        self._accelerator = accelerator
        self._first_step = first_step
        self._optimizer: Any = None  # the first one that was prepared: it tells the steps
        self._accumulating = False
        self._due = False  # a step ended inside of `accumulate`, whose region is to close first

    def attach(self) -> None:
        """Take the place of the methods, and begin where something is prepared already."""
        accelerator = self._accelerator
        vars(accelerator)[ATTRIBUTE] = self
        for method in PREPARE:
            self.wrap(accelerator, method, self._prepare)
        for method in CHECKPOINT:
            self.wrap(accelerator, method, self.region("checkpoint"))
        self.wrap(accelerator, "accumulate", self._accumulate)
        self.wrap(accelerator, "end_training", self._end_training)
        for prepared in ("_models", "_optimizers"):
            self._take(getattr(accelerator, prepared, ()))

    def remove(self) -> None:
        """Write what was recorded and leave nothing behind; once more does nothing."""
        if vars(self._accelerator).get(ATTRIBUTE) is self:
            del vars(self._accelerator)[ATTRIBUTE]
        with guard.contained("leaving the accelerator"):
            super().remove()

    def _take(self, prepared: Iterable[Any]) -> None:
        """Name the models, and let the first optimizer tell the steps."""
        with guard.contained("following the accelerator"):
            for one in prepared:
                if isinstance(one, nn.Module):
                    self.loop.name(one)
                elif isinstance(one, AcceleratedOptimizer) and self._optimizer is None:
                    self._optimizer = one
                    self.undo.append(Patch(one, "step", self._step).undo)
                    self.loop.start(first_step=self._first_step)

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        self._take(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
        return prepared

    def _step(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(*args, **kwargs)
            if self.on and self._accelerator.sync_gradients:
                if self._accumulating:
                    self._due = True
                else:
                    self.loop.step()
            return done

        return MethodType(step, self._optimizer)  # torch's schedulers ask for its function

    @contextlib.contextmanager
    def _accumulate(self, original: Callable[..., Any], *models: Any) -> Iterator[None]:
        several = self._accelerator.gradient_accumulation_steps > 1
        self._accumulating, self._due = True, False
        try:
            with self.loop.region("micro-step") if several else contextlib.nullcontext(), original(*models):
                yield
        finally:
            self._accumulating, due = False, self._due
        if due:
            self.loop.step()

    def _end_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.remove()  # before the process group is gone
        return original(*args, **kwargs)


def instrumented(
    accelerator: Accelerator,
    out: str | os.PathLike[str] | None = None,
    *,
    profile: ProfileKwargs | None = None,
    first_step: int = 0,
    **arguments: Any,
) -> Accelerator:
    """Return ``accelerator`` itself, with windows, regions and waits of the loop that is written with it.

    It begins when the first optimizer is prepared, and each update of that one is a step; one that the
    scaler of mixed precision skips counts, what is only accumulated does not. Models are named as they are
    prepared; further regions are "micro-step" (a body of ``accumulate``, where it accumulates), "backward",
    "checkpoint" and those of the optimizers and DataLoaders. ``accelerator.end_training()``, `plain` or the end
    of the process ends it; the loop stays as it is.

    Args:
        accelerator: any `accelerate.Accelerator`.
        out: the folder that windows land in: "runs/instrument", or what ``profile`` says.
        profile: a plan and options in Accelerate's own terms; the one in the accelerator's ``kwargs_handlers``
            by default. Other arguments go before it. ``with accelerator.profile()`` is not needed.
        first_step: the number of the next step, where a run is resumed.
        arguments: ``wait``, ``warmup``, ``active``, ``modules``, ``syncs``, ``budget``, ``record_shapes``, ... as
            `Loop` takes them.

    Raises:
        TypeError, ValueError: arguments that are none of these.

    Example:
        >>> accelerator = instrumented(Accelerator(), "runs/gpt2", wait=1, warmup=1, active=3)
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f'"accelerator" must be an accelerate.Accelerator: {accelerator!r}')
    if profile is not None and not isinstance(profile, ProfileKwargs):
        raise TypeError(f'"profile" must be an accelerate.utils.ProfileKwargs: {profile!r}')
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise ValueError(f'"first_step" must be an integer >= 0: {first_step!r}')
    profile = profile or getattr(accelerator, "profile_handler", None)
    loop = Loop(**_merged(out, profile, arguments))
    plain(accelerator)
    if settings.enabled:
        with guard.contained("following the accelerator"):
            Instrumented(accelerator, loop, first_step).attach()
    return accelerator


def plain(accelerator: Accelerator) -> Accelerator:
    """Return ``accelerator`` itself as it was before `instrumented`; what was recorded so far is written."""
    attached = vars(accelerator).get(ATTRIBUTE)
    if attached is not None:
        attached.remove()
    return accelerator


def _merged(
    out: str | os.PathLike[str] | None, profile: ProfileKwargs | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments of a `Loop`: those given, and where there are none, what ``profile`` says."""
    merged: dict[str, Any] = {}
    if profile is not None:
        merged = {name: getattr(profile, name) for name in OPTIONS if getattr(profile, name, None)}
        if profile.activities is not None:
            merged["activities"] = [_activity(name) for name in profile.activities]
        if profile.output_trace_dir is not None:
            merged["out"] = profile.output_trace_dir
        if profile.schedule_option is not None and not {*PLAN, "schedule"} & {*arguments}:
            merged |= {"repeat": 0, **profile.schedule_option}  # 0: for ever, as torch has it
    if out is not None:
        merged["out"] = out
    return merged | arguments


def _activity(name: str) -> ProfilerActivity:
    known: dict[str, ProfilerActivity] = dict(ProfilerActivity.__members__)
    if str(name).upper() not in known:
        raise ValueError(f'"activities" must be out of {", ".join(known).lower()}: {name!r}')
    return known[name.upper()]
