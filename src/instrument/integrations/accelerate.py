"""Hugging Face Accelerate: `instrumented`, around the `Accelerator` of a loop that people write themselves."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity

from ..config import settings
from ..guard import guard
from ..windows.steps import PLAN
from .adapter import Adapter
from .loop import Loop

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import ProfileKwargs
except ImportError as error:
    raise ImportError("accelerate, or a part of it, is missing: pip install accelerate") from error

__all__ = ["instrumented", "plain"]

FEATURE = "following the accelerator"
PREPARE = ("prepare", "prepare_model", "prepare_optimizer")
CHECKPOINT = ("save_state", "save_model")
OPTIONS = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class AccelerateAdapter(Adapter):
    """What is on one `Accelerator`: ``loop`` is told what its methods do.

    The classes have the patches: what is in an object would be part of its copies.
    """

    def __init__(self, accelerator: Accelerator, loop: Loop, first_step: int) -> None:
        super().__init__(loop)
        self._accelerator: Callable[[], Any] = weakref.ref(accelerator)
        self._first_step = first_step
        self._optimizer: weakref.ref[Any] | None = None  # the first one that is prepared: it tells the steps
        self._accumulating = False
        self._due = False  # a step ended inside of `accumulate`, whose region is to close first

    def attach(self) -> None:
        """Take the place of the methods, and begin where something is prepared already."""
        if not self.on:
            return
        accelerator = self._accelerator()
        _attached[accelerator] = self
        calls = dict.fromkeys(PREPARE, self._prepare) | dict.fromkeys(CHECKPOINT, self.region("checkpoint"))
        calls |= {"accumulate": self._accumulate, "end_training": self._end_training}
        for method, around in calls.items():
            self.wrap(type(accelerator), method, self._own(around))
        self.wrap(AcceleratedOptimizer, "step", self._step)
        for prepared in ("_models", "_optimizers"):
            self._take(getattr(accelerator, prepared, ()))

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """Write what was recorded and leave nothing behind; once more does nothing."""
        accelerator = self._accelerator()
        if accelerator is not None and _attached.get(accelerator) is self:
            del _attached[accelerator]
        super().remove()

    def _own(self, around: Callable[..., Any]) -> Callable[..., Any]:
        """Return what leaves other accelerators of the class alone."""

        def call(original: Callable[..., Any], this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not self._accelerator():
                return original(this, *args, **kwargs)
            return around(functools.partial(original, this), *args, **kwargs)

        return call

    @guard.contained(FEATURE)
    def _take(self, prepared: Iterable[Any]) -> None:
        """Name the models, and let the first optimizer tell the steps, until `Accelerator.clear` drops it."""
        known = getattr(self._accelerator(), "_optimizers", ())
        for one in prepared:
            if isinstance(one, nn.Module):
                self.loop.name(one)
            elif isinstance(one, AcceleratedOptimizer):
                told = None if self._optimizer is None else self._optimizer()
                if all(told is not other for other in known):
                    self._optimizer = weakref.ref(one)
                self.loop.start(first_step=self._first_step)

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        self._take(prepared if isinstance(prepared, (tuple, list)) else (prepared,))
        return prepared

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(optimizer, *args, **kwargs)
        accelerator = self._accelerator()
        if self._optimizer is not None and self._optimizer() is optimizer and accelerator.sync_gradients:
            if self._accumulating:
                self._due = True
            else:
                self.loop.step()
        return done

    @contextlib.contextmanager
    def _accumulate(self, original: Callable[..., Any], *models: Any) -> Iterator[None]:
        several = False
        try:
            several = self._accelerator().gradient_accumulation_steps > 1
            self._accumulating, self._due = True, False
            if several:
                self.loop.enter("micro-step")
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        try:
            with original(*models):
                yield
        finally:
            if several:
                self.loop.leave("micro-step")
            self._accumulating, due = False, self._due
        if due:
            self.loop.step()

    def _end_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.remove()  # before the process group is gone
        return original(*args, **kwargs)


_attached: weakref.WeakKeyDictionary[Accelerator, AccelerateAdapter] = weakref.WeakKeyDictionary()


@guard.prepared(FEATURE, otherwise=lambda accelerator, *_, **__: accelerator)
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
    loop.modes = True
    plain(accelerator)
    if settings.enabled:
        attached = AccelerateAdapter(accelerator, loop, first_step)
        try:
            attached.attach()
        except Exception:  # not half of it
            attached.remove()
            raise
    return accelerator


@guard.prepared(FEATURE, otherwise=lambda accelerator: accelerator)
def plain(accelerator: Accelerator) -> Accelerator:
    """Return ``accelerator`` itself as it was before `instrumented`; what was recorded so far is written."""
    attached = _attached.get(accelerator)
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
