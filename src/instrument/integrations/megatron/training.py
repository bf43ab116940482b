"""megatron.training: iterations are steps, and ``--profile`` is followed without Megatron's own profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...base import log
from ...base.guard import guard
from ...record.planning.schedule import schedule
from .adapter import CallArguments, MegatronAdapter, name_calls

REGIONS = {"evaluate": "evaluation", "save_checkpoint_and_time": "checkpoint"}


def follow(adapter: MegatronAdapter, module: ModuleType) -> None:
    """Hook ``megatron.training.training``."""
    arguments = CallArguments(module.train_step)

    def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = None
        with guard.contained("reading the iteration"):
            number = _iteration(module, arguments.get("iteration", args, kwargs))
        models = arguments.get("model", args, kwargs)
        with adapter.iteration(number, models if isinstance(models, (list, tuple)) else [models]):
            return original(*args, **kwargs)

    def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


def _iteration(module: ModuleType, given: Any) -> int:
    """Return the number of this iteration, which older releases have only among their global arguments."""
    return int(module.get_args().curr_iteration if given is None else given)


@contextmanager
def _in_place_of_profile(adapter: MegatronAdapter, module: ModuleType) -> Iterator[None]:
    """Record the iterations of ``--profile``; Megatron's own profilers are off while the body runs."""
    args = None
    with guard.contained("following --profile"):
        args = module.get_args()
        if not (getattr(args, "profile", False) and _follow(adapter, args)):
            args = None
    if args is None:
        yield
        return
    args.profile = False
    try:
        yield
    finally:
        args.profile = True


def _follow(adapter: MegatronAdapter, args: Any) -> bool:
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
