"""`detect_syncs` and `no_syncs`: synchronizations of a program while it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import ParamSpec, TypeVar

from ..arguments import integer
from ..guard import guard
from ..patch import transparent
from ..regions import dispatch as regions
from . import coverage, policy
from .budget import Budget
from .detector import SyncDetector
from .events import SyncEvent
from .listener import SyncListener, describe
from .monitor import monitor

P = ParamSpec("P")
R = TypeVar("R")
LEVELS = ("log", "warn", "error")
EVERY = 10


def detect_syncs(
    level: str = "log", *, budget: int | Mapping[str, int] | None = None, every: int | None = None
) -> SyncDetector:
    """Find the lines that make the CPU wait for the GPU.

    A step ends where ``.step()`` of the returned detector is called; without such calls, after each step of the
    first optimizer. Of nested detectors each records what happens inside it, so the outer one has everything.
    torch's own synchronization warnings are not shown meanwhile.

    Args:
        level: what to do about a synchronization that is not allowed: "log" logs all of them at the end, "warn"
            warns once for each line and operation, "error" raises `SyncError` when the call returns.
        budget: number of synchronizations that a step may make, in total or by region: ``{"train/step": 1}``.
            Warnings and errors then concern only what exceeds it, or is in none of the regions.
        every: check the first 3 steps, then one in ``every``, by default 10: a checked step costs 1.5 us for each
            allocation of GPU memory. On other steps nothing is installed. With a budget, or at level "error",
            every step is checked.

    Raises:
        TypeError, ValueError: an argument is not accepted.

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
    if every is not None:
        every = integer("every", every, least=1)
    if level == "error" or limits is not None:
        if every not in (None, 1):
            raise ValueError(f'"every" must be 1 with a budget or level "error", which check each step: {every!r}')
        every = 1
    return SyncDetector(level, limits, every or EVERY)


class _NoSyncsListener(SyncListener):
    """Raises an error for synchronizations inside `no_syncs`."""

    def check(self, event: SyncEvent, thread: int) -> None:
        """Queue an error if ``event`` is forbidden."""
        if event.forbidden:
            self.queue(f"{describe(event)}, which no_syncs forbids", event, thread, error=True)


class NoSyncs:
    """The context manager and decorator that `no_syncs` returns."""

    def __init__(self) -> None:
        self._blocks: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        if not regions.tracing():
            block = _forbidden_block()
            block.__enter__()
            self._blocks.append(block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not regions.tracing():
            self._blocks.pop().__exit__(kind, error, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with this block around each of its calls."""
        policy.check_decorable(function, "no_syncs")

        @transparent
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if regions.tracing():
                return function(*args, **kwargs)
            with _forbidden_block():
                return function(*args, **kwargs)

        return wrapper


@contextlib.contextmanager
def _forbidden_block() -> Iterator[None]:
    with policy.forbid_syncs():
        if coverage.reason_unavailable() is not None:
            yield
            return
        listener = _NoSyncsListener()
        with guard.contained("detecting synchronizations"):
            monitor.add(listener)
        try:
            yield
        finally:
            monitor.remove(listener)
        listener.raise_pending()


def no_syncs() -> NoSyncs:
    """Raise an error if the CPU waits for the GPU in this block or function, except inside `allow_sync`.

    An explicit synchronization raises the error before it begins, any other one when its call returns. Without a
    GPU nothing is checked. Threads that start in the block are not checked.

    Raises:
        SyncError: names the line.

    Example:
        >>> with no_syncs():
        ...     train_step(batch)
    """
    return NoSyncs()
