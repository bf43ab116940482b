"""Allows and forbids synchronizations: `allow_sync`, and the state behind `no_syncs`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


_allow_reason: ContextVar[str | None] = ContextVar("allowed", default=None)
_syncs_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


def allow_sync(reason: str) -> AllowSync:
    """Allow the CPU to wait for the GPU in this block; reports list these synchronizations, but do not count them.

    Also decorates functions.

    Args:
        reason: why they are allowed, for readers of the report.

    Raises:
        TypeError, ValueError: no reason is given.

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
    """The context manager and decorator that `allow_sync` returns."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_allow_reason.set(self._reason))

    def __exit__(self, *_: object) -> None:
        _allow_reason.reset(self._tokens.pop())

    def _recreate_cm(self) -> AllowSync:  # called by ContextDecorator, for each call of a function
        return AllowSync(self._reason)

    def __call__(self, function: F) -> F:
        """Return ``function`` with this block around each of its calls."""
        check_decorable(function, "allow_sync")
        return super().__call__(function)


def check_decorable(function: object, name: str) -> None:
    """Raise ``TypeError`` for a coroutine or generator function, whose code runs after the call."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(function) or any(is_kind(function) for is_kind in kinds):
        raise TypeError(f"{name} decorates plain functions; inside other functions use a with block: {function!r}")


@contextlib.contextmanager
def forbid_syncs() -> Iterator[None]:
    """Forbid synchronizations in this block, except inside `allow_sync`."""
    allowed, forbidden = _allow_reason.set(None), _syncs_forbidden.set(True)
    try:
        yield
    finally:
        _syncs_forbidden.reset(forbidden)
        _allow_reason.reset(allowed)


def allow_reason() -> str | None:
    """Return the reason of the innermost `allow_sync` around the caller, or None."""
    return _allow_reason.get()


def syncs_forbidden() -> bool:
    """Return whether the caller is inside `forbid_syncs`, and not in an `allow_sync` within it."""
    return _syncs_forbidden.get() and _allow_reason.get() is None
