"""`MegatronAdapter`: drives a loop from Megatron's calls, replaced in every module and shown as regions.

Under megatron.training it follows ``--profile`` without Megatron's own profilers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch

from ...base import log
from ...base.guard import guard
from ...base.imports import loaded_modules
from ...base.patch import Patch
from ...record.planning.schedule import schedule
from ...record.regions import dispatch
from ...record.regions import region as regions
from ...record.regions.region import Region
from ...record.stepping.optimizer_steps import OptimizerSteps
from ..adapter import Adapter, RangeStack, Removal
from ..loop import Loop

FEATURE = "following Megatron"


class ReferencesPatch:
    """Replaces functions of ``module`` by ``makers[name](original)``, also in modules that imported them by name.

    `apply` and `undo` search all names of all modules, which takes 50 ms for three thousand modules.
    """

    def __init__(self, module: ModuleType, makers: Mapping[str, Callable[[Any], Any]]) -> None:
        originals = {name: vars(module)[name] for name in makers if name in vars(module)}
        self._pairs = [(original, makers[name](original)) for name, original in originals.items()]

    def apply(self) -> None:
        """Replace the functions."""
        _swap({id(original): replacement for original, replacement in self._pairs})

    def undo(self) -> None:
        """Restore the functions, also in modules that imported a replacement by name."""
        _swap({id(replacement): original for original, replacement in self._pairs})


def _swap(values: dict[int, Any]) -> None:
    for _, _, held in loaded_modules():
        for name, value in list(held.items()):
            if id(value) in values:
                held[name] = values[id(value)]


class CallArguments:
    """Finds an argument of a call of ``function`` by name, whether it was passed by position or by keyword."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument ``name`` of a call; None if it was not passed."""
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)


Hooks = Callable[["MegatronAdapter", ModuleType], None]


class MegatronAdapter(Adapter):
    """Counts steps by the first available sign of them. Only one adapter is attached at a time.

    The signs, in order: iterations of ``megatron.training``; calls of `step`; the steps of megatron.core's
    optimizers; the steps of torch's first optimizer.

    Args:
        loop: the loop that Megatron drives.
        hooks: makes the changes to each module of Megatron, by its name.
        first_step: the number of the first step, if no iteration has one.
    """

    feature = FEATURE
    _current: ClassVar[MegatronAdapter | None] = None

    def __init__(self, loop: Loop, hooks: Mapping[str, Hooks], first_step: int = 0) -> None:
        super().__init__(loop)
        self.ranges = RangeStack()
        self.updating = False  # a step of megatron.core's optimizer runs
        self.training = False  # ``megatron.training`` runs its loop
        self._hooks = hooks
        self._first_step = first_step
        self._optimizer_steps: OptimizerSteps | None = None
        self._counted_by: str | None = None  # "iteration", "step", "optimizer" or "torch"
        self._number: int | None = None  # of the last iteration
        self._in_iteration = False

    def install_hooks(self) -> None:
        """Detach the adapter attached before, and hook Megatron's modules now or as they are imported."""
        if MegatronAdapter._current is not None:
            MegatronAdapter._current.detach()
        MegatronAdapter._current = self
        if not self.loop.automatic:  # else optimizers are followed already
            self.follow_optimizers()
        for name, hooks in self._hooks.items():
            self.when_imported(name, functools.partial(self._hook, hooks))

    def _hook(self, hooks: Hooks, module: ModuleType) -> None:
        with guard.contained(f"attaching to {module.__name__}"):
            hooks(self, module)

    @guard.contained(FEATURE)
    def detach(self) -> None:
        """Stop the loop, which writes an open window, and undo every change; a second call does nothing."""
        if MegatronAdapter._current is self:
            MegatronAdapter._current = None
        super().detach()

    @guard.contained(FEATURE)
    def stop_loop(self) -> None:
        """Stop the loop; the last iteration is complete unless it runs."""
        if not self._inert:
            self.ranges.close(0)
            self.step_complete = self._number is not None and not self._in_iteration
        super().stop_loop()

    @guard.contained(FEATURE)
    def step(self) -> None:
        """Count a step of the user's own loop, if it has no optimizer of torch or Megatron."""
        if not self.attached or self._counted_by == "iteration":
            return
        counted = self._counted_by is not None and self._counted_by != "step"  # the optimizer counted this step
        self._counted_by = "step"
        if not counted:
            self._advance()

    def begin_forward(self, model: Any) -> None:
        """Start the loop with the first micro-batch of a training, and annotate ``model``."""
        by_iterations = self.training or self._counted_by == "iteration"  # whose number is not known here
        if not by_iterations and torch.is_grad_enabled():
            self._start([model], self._first_step)
        if self.loop.running:
            self.loop.name(_unwrapped(model))

    @guard.contained(FEATURE)
    def count_update(self, by: str = "optimizer") -> None:
        """Count the step of an optimizer that just stepped, unless iterations or `step` count the steps."""
        if not self.attached or self._counted_by in ("iteration", "step"):
            return
        if by == "torch" and (self.updating or self._counted_by == "optimizer"):
            return
        self._counted_by = by
        self._advance()

    @contextmanager
    def iteration(self, number: int | None, models: Sequence[Any]) -> Iterator[None]:
        """Make the body the iteration ``number`` of ``megatron.training``.

        The previous iteration ends here, so that it includes its evaluation, checkpoint and log lines.
        """
        for _ in range(self._steps_to_count(number, models)):
            self.loop.step()
        self._in_iteration = True
        depth = len(self.ranges)
        with self.loop.region("step"):
            try:
                yield
            finally:
                self.ranges.close(depth)
        self._in_iteration = False

    def follow_optimizers(self) -> None:
        """Count the steps of torch's optimizers, until `detach`."""
        if self._optimizer_steps is None:
            self._optimizer_steps = OptimizerSteps(lambda: self.count_update("torch"))
            self.apply(Removal(self._forget_optimizers))
            self._optimizer_steps.follow()

    def _forget_optimizers(self) -> None:
        if self._optimizer_steps is not None:
            self._optimizer_steps.remove()
            self._optimizer_steps = None

    def _steps_to_count(self, number: int | None, models: Sequence[Any]) -> int:
        """Return by how many steps this iteration is ahead of the previous one; start the loop with the first."""
        last, self._counted_by = self._number, "iteration"
        self._number = number if number is not None else 0 if last is None else last + 1
        begun = self.loop.has_begun
        with guard.contained("following an iteration"):
            self._start(models, self._number)
        return max(self._number - last, 1) if begun and last is not None else 0

    def _start(self, models: Sequence[Any], first_step: int) -> None:
        if not self.loop.running:
            self.follow_optimizers()
            self.loop.start(*(_unwrapped(model) for model in models), first_step=first_step)
            self.detach_first_at_exit()

    def _advance(self) -> None:
        if self.loop.running:
            self.loop.step()
        else:
            self._start([], self._first_step + 1)  # the step that shows the first optimizer is over


def _unwrapped(model: Any) -> Any:
    """Return the model inside the wrappers of data parallelism and mixed precision."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def with_region(
    adapter: MegatronAdapter, original: Callable[..., Any], region_of: Callable[..., Region | None]
) -> Callable[..., Any]:
    """Return ``original`` with each call in the region that ``region_of(*arguments)`` returns, if any.

    Ranges that Megatron pushes inside and does not pop are closed with the region.
    """

    def when() -> bool:
        return not dispatch.tracing() and adapter.attached and dispatch.recording

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        region = None
        with guard.contained(FEATURE):
            region = region_of(*args, **kwargs)
        if region is None:
            return original(*args, **kwargs)
        with adapter.ranges.around(region, sys._getframe(1)):
            return original(*args, **kwargs)

    return functools.wraps(original)(guard.around(FEATURE, original, call, when))


def with_region_named(adapter: MegatronAdapter, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with each call in the region ``name``."""
    region = regions.make(name, None, None, None, None)
    return with_region(adapter, original, lambda *_, **__: region)


def name_calls(adapter: MegatronAdapter, owner: Any, titles: Mapping[str, str]) -> None:
    """Make each call of those functions of ``owner`` itself that are in ``titles`` a region of that title."""
    for name, title in titles.items():
        if name in vars(owner):
            adapter.apply(Patch(owner, name, functools.partial(with_region_named, adapter, title)))


REGIONS = {"evaluate": "evaluation", "save_checkpoint_and_time": "checkpoint"}


def training(adapter: MegatronAdapter, module: ModuleType) -> None:
    """Hook ``megatron.training.training``: iterations are steps, and ``--profile`` is followed."""
    arguments = CallArguments(module.train_step)

    def train_step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        number = None
        with guard.contained("reading the iteration"):
            given = arguments.get("iteration", args, kwargs)  # older releases have it only among their arguments
            number = int(module.get_args().curr_iteration if given is None else given)
        models = arguments.get("model", args, kwargs)
        with adapter.iteration(number, models if isinstance(models, (list, tuple)) else [models]):
            return original(*args, **kwargs)

    def train(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        adapter.training = True
        try:
            with _in_place_of_profile(adapter, module):
                return original(*args, **kwargs)
        finally:
            adapter.training = False
            adapter.stop_loop()

    adapter.wrap(module, "train_step", train_step)
    adapter.wrap(module, "train", train)
    name_calls(adapter, module, REGIONS)


@contextmanager
def _in_place_of_profile(adapter: MegatronAdapter, module: ModuleType) -> Iterator[None]:
    """Record the iterations of ``--profile``; Megatron's own profilers are off while the body runs."""
    args = None
    with guard.contained("following --profile"):
        args = module.get_args()
        if not (getattr(args, "profile", False) and _follow_profile(adapter, args)):
            args = None
    if args is None:
        yield
        return
    args.profile = False
    try:
        yield
    finally:
        args.profile = True


def _follow_profile(adapter: MegatronAdapter, args: Any) -> bool:
    """Take the schedule of ``args``: the iterations from ``profile_step_start`` to before ``profile_step_end``.

    Returns:
        False if the arguments contain no iteration, which leaves them to Megatron.
    """
    first, stop = args.profile_step_start, args.profile_step_end
    if not 0 <= first < stop:
        log.warning("--profile is left to Megatron: no iteration lies in its range", start=first, end=stop)
        return False
    options: dict[str, Any] = {"ranks": list(getattr(args, "profile_ranks", ())) or None}
    if getattr(args, "use_pytorch_profiler", False):
        options["record_shapes"] = bool(getattr(args, "pytorch_profiler_collect_shapes", False))
        options["with_stack"] = bool(getattr(args, "pytorch_profiler_collect_callstack", False))
    if not adapter.loop.suggest(schedule(f"{first}-{stop - 1}", warmup=1), **options):
        log.warning("--profile is ignored: attach() has a schedule already, and one profiler records at a time")
    return True
