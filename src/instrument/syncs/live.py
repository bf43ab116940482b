"""`detect_syncs` and `no_syncs`: the waits of a program for its GPU, while it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import ParamSpec, TypeVar

from ..guard import guard
from ..patch import transparent
from ..regions import dispatch as regions
from . import coverage, policy
from .budget import Budget
from .detector import SyncDetector
from .events import SyncEvent
from .monitor import monitor
from .recorder import SyncListener, describe

P = ParamSpec("P")
R = TypeVar("R")
LEVELS = ("log", "warn", "error")
EVERY = 10


def detect_syncs(
    level: str = "log", *, budget: int | Mapping[str, int] | None = None, every: int | None = None
) -> SyncDetector:
    """Find the lines that make the CPU wait for the GPU.

    Steps are told by ``.step()`` on what this returns; without it, one lasts from a step of the first optimizer
    to the next. Of nested detectors each takes what happens inside it, so that the outer one has it all.
    In its place torch's own warnings of waits are not shown.

    Args:
        level: what is done about a wait that is not allowed: "log" logs them all at the end, "warn" warns once
            for each line and operation, "error" raises `SyncError` when the call that waited returns.
        budget: waits that a step may make, in all or by regions: ``{"train/step": 1}``. Then only what exceeds
            it, or is in no region named, is warned of or raised.
        every: look at the first 3 steps, then at one in so many, by default 10: looking costs each allocation of
            GPU memory 1.5 us. On other steps nothing is installed. With a budget, or at level "error", each step
            is looked at.

    Raises:
        TypeError, ValueError: arguments that are none of these.

    Example:
        >>> with detect_syncs() as syncs:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         syncs.step()
        >>> print(syncs.report)
    """
    if level not in LEVELS:
        raise ValueError(f'"level" must be one of {", ".join(LEVELS)}: {level!r}')
    limits = Budget(budget) if budget is not None else None
    if every is not None and (isinstance(every, bool) or not isinstance(every, int)):
        raise TypeError(f'"every" must be a number of steps: {every!r}')
    if every is not None and every < 1:
        raise ValueError(f'"every" must be >= 1: {every!r}')
    if level == "error" or limits is not None:
        if every not in (None, 1):
            raise ValueError(
                f'"every" must be 1 with a budget or level "error", which look at each step: {every!r}'
            )
        every = 1
    return SyncDetector(level, limits, every or EVERY)


class _Forbidding(SyncListener):
    """Raises for what waits inside `no_syncs`."""

    def check(self, event: SyncEvent, thread: int) -> None:
        """Take note of ``event`` where it is forbidden."""
        if event.forbidden:
            self.queue(f"{describe(event)}, which no_syncs forbids", event, thread, error=True)


class NoSyncs:
    """Made by `no_syncs`; for `with` and as a decorator."""

    def __init__(self) -> None:
        self._blocks: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        if not regions.tracing():
            block = _forbidding()
            block.__enter__()
            self._blocks.append(block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not regions.tracing():
            self._blocks.pop().__exit__(kind, error, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with each call of it in a block of its own."""
        policy.check_decorable(function, "no_syncs")

        @transparent
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if regions.tracing():
                return function(*args, **kwargs)
            with _forbidding():
                return function(*args, **kwargs)

        return wrapper


@contextlib.contextmanager
def _forbidding() -> Iterator[None]:
    with policy.forbid_syncs():
        if coverage.missing() is not None:
            yield
            return
        listener = _Forbidding()
        with guard.contained("looking for waits"):
            monitor.add(listener)
        try:
            yield
        finally:
            monitor.remove(listener)
        listener.raise_pending()


def no_syncs() -> NoSyncs:
    """Raise where the CPU waits for the GPU in this block, or function, but for an `allow_sync` further in.

    A wait that is asked for is not begun; for another one the error comes when the call that waited returns.
    Without a GPU nothing is checked, nor are threads that start in the block.

    Raises:
        SyncError: naming the line.

    Example:
        >>> with no_syncs():
        ...     train_step(batch)
    """
    return NoSyncs()
