"""What is allowed to wait, and where nothing may: `allow_sync`, `no_syncs`, and comments at lines."""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Iterator
from contextvars import ContextVar

from .finding import Site

_COMMENT = re.compile(r"#\s*instrument:\s*allow-sync\b[\s:,-]*(.*)")
_allowed: ContextVar[str | None] = ContextVar("allowed", default=None)
_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


def allow_sync(reason: str) -> contextlib.AbstractContextManager[None]:
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
    return _allowing(reason)


@contextlib.contextmanager
def _allowing(reason: str) -> Iterator[None]:
    token = _allowed.set(reason)
    try:
        yield
    finally:
        _allowed.reset(token)


@contextlib.contextmanager
def forbidding() -> Iterator[None]:
    """Mark what waits in this block as forbidden, but for an `allow_sync` further in."""
    allowed, forbidden = _allowed.set(None), _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(forbidden)
        _allowed.reset(allowed)


def allowed_here() -> str | None:
    """Return the reason of the innermost `allow_sync` around the caller; None where there is none."""
    return _allowed.get()


def forbidden_here() -> bool:
    """Tell whether the caller is inside `forbidding` and not allowed again."""
    return _forbidden.get() and _allowed.get() is None


def allowed_at(site: Site | None) -> str | None:
    """Return the reason of ``# instrument: allow-sync REASON`` at the line of ``site``, or None.

    The comment may stand at the end of the line, or alone on the line above.
    """
    if site is None or not site.line:
        return None
    found = _COMMENT.search(linecache.getline(site.file, site.line))
    above = linecache.getline(site.file, site.line - 1).strip() if site.line > 1 else ""
    if found is None and above.startswith("#"):
        found = _COMMENT.match(above)
    return None if found is None else found.group(1).strip() or "a comment at the line"
