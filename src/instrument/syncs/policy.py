"""What is allowed to wait, and where nothing may: `allow_sync` and `no_syncs`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


_allowed: ContextVar[str | None] = ContextVar("allowed", default=None)
_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


def allow_sync(reason: str) -> AllowSync:
    """Allow the CPU to wait for the GPU in this block; what waits there is listed, and counts for nothing.

    It decorates functions, too.

    Args:
        reason: why, for those who read the report.

    Raises:
        TypeError, ValueError: no reason given.

    Example:
        >>> with allow_sync("the loss is logged once in 100 steps"):
        ...     print(loss.item())
    """
    if not isinstance(reason, str):
        raise TypeError(f'"reason" must be a string: {reason!r}')
    if not reason.strip():
        raise ValueError(f'"reason" must say why: {reason!r}')
    return AllowSync(reason)


class AllowSync(contextlib.ContextDecorator):
    """Made by `allow_sync`; for `with` and as a decorator."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_allowed.set(self._reason))

    def __exit__(self, *_: object) -> None:
        _allowed.reset(self._tokens.pop())

    def _recreate_cm(self) -> AllowSync:  # of ContextDecorator: each call of a function has its own
        return AllowSync(self._reason)

    def __call__(self, function: F) -> F:
        """Return ``function`` with each call of it in a block of its own."""
        check_decorable(function, "allow_sync")
        return super().__call__(function)


def check_decorable(function: object, name: str) -> None:
    """Raise ``TypeError`` for what a decorator cannot surround: the code of it runs after the call."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(function) or any(is_kind(function) for is_kind in kinds):
        raise TypeError(f"{name} decorates plain functions; inside others, use it in a with: {function!r}")


@contextlib.contextmanager
def forbid_syncs() -> Iterator[None]:
    """Mark what waits in this block as forbidden, but for an `allow_sync` further in."""
    allowed, forbidden = _allowed.set(None), _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(forbidden)
        _allowed.reset(allowed)


def allow_reason() -> str | None:
    """Return the reason of the innermost `allow_sync` around the caller; None where there is none."""
    return _allowed.get()


def syncs_forbidden() -> bool:
    """Tell whether the caller is inside `forbid_syncs` and not allowed again."""
    return _forbidden.get() and _allowed.get() is None
