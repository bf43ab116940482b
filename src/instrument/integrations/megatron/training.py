"""megatron.training: iterations are steps, and what its ``--profile`` asks for is recorded by us, once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ... import log
from ...guard import guard
from ...patch import Change, Patch
from ...regions import region
from ...windows.schedule import schedule
from .driver import Driver
from .references import FEATURE, Arguments, named

REGIONS = {"evaluate": "evaluation", "save_checkpoint_and_time": "checkpoint"}


def patches(driver: Driver, module: ModuleType) -> Iterator[Change]:
    """Follow ``megatron.training.training``."""

    def train_step(original: Callable[..., Any]) -> Callable[..., Any]:
        given = Arguments(original)

        def following(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not driver.switch.on:
                return original(*args, **kwargs)
            number = None
            with guard.contained("reading the iteration"):
                number = _iteration(module, given.get("iteration", args, kwargs))
            models = given.get("model", args, kwargs)
            with driver.iteration(number, models if isinstance(models, (list, tuple)) else [models]):
                return original(*args, **kwargs)

        return functools.wraps(original)(guard.around(FEATURE, original, following))

    def train(original: Callable[..., Any]) -> Callable[..., Any]:
        def following(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not driver.switch.on:
                return original(*args, **kwargs)
            driver.training = True
            try:
                with _instead(driver, module):
                    return original(*args, **kwargs)
            finally:
                driver.training = False
                driver.end()

        return functools.wraps(original)(guard.around(FEATURE, original, following))

    yield Patch(module, "train_step", train_step)
    yield Patch(module, "train", train)
    for name, title in REGIONS.items():
        if hasattr(module, name):
            shown = region.make(title, None, None, None, None)
            make = functools.partial(
                named,
                shown=lambda *_, shown=shown, **__: shown,
                switch=driver.switch,
                ranges=driver.ranges,
            )
            yield Patch(module, name, make)


def _iteration(module: ModuleType, given: Any) -> int:
    """Return the number of this iteration, which older releases keep in the arguments alone."""
    return int(module.get_args().curr_iteration if given is None else given)


@contextmanager
def _instead(driver: Driver, module: ModuleType) -> Iterator[None]:
    """Record what ``--profile`` asks for in Megatron's stead, whose own profilers stay off meanwhile."""
    args = None
    with guard.contained("following --profile"):
        args = module.get_args()
        if not (getattr(args, "profile", False) and _follow(driver, args)):
            args = None
    if args is None:
        yield
        return
    args.profile = False
    try:
        yield
    finally:
        args.profile = True


def _follow(driver: Driver, args: Any) -> bool:
    """Plan what ``args`` ask for: the iterations from the first to the last before the one to stop at.

    Returns:
        False where Megatron is to do as it likes: the arguments make no plan.
    """
    first, stop = args.profile_step_start, args.profile_step_end
    if not 0 <= first < stop:
        log.warning("--profile is left to Megatron: no iteration from start to end", start=first, end=stop)
        return False
    options: dict[str, Any] = {"ranks": list(getattr(args, "profile_ranks", ())) or None}
    if getattr(args, "use_pytorch_profiler", False):
        options["record_shapes"] = bool(getattr(args, "pytorch_profiler_collect_shapes", False))
        options["with_stack"] = bool(getattr(args, "pytorch_profiler_collect_callstack", False))
    if not driver.loop.suggest(schedule(f"{first}-{stop - 1}", warmup=1), **options):
        log.warning("--profile is not followed: there is a plan already, and one profiler at a time")
    return True
