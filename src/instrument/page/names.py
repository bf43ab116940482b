"""Prepares names of a trace for a page."""

from __future__ import annotations

from ..printable import printable

_MAX_CHARACTERS = 300
_MAX_OF_LINES = 4000


def shown_name(name: str) -> str:
    """Return a name with control and bidirectional characters visible, cut to 300 characters."""
    shown = printable(name[: _MAX_CHARACTERS + 1])
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[: _MAX_CHARACTERS - 3]}..."


def shown_lines(text: str) -> str:
    """Return text of several lines with its other control characters visible, cut to 4,000 characters."""
    return "\n".join(map(printable, text[:_MAX_OF_LINES].splitlines()))
