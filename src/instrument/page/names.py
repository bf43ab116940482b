"""Prepares names of a trace for a page."""

from __future__ import annotations

from ..printable import printable

_MAX_CHARACTERS = 300


def shown_name(name: str) -> str:
    """Return a name with control and bidirectional characters visible, cut to 300 characters."""
    shown = printable(name[: _MAX_CHARACTERS + 1])
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[: _MAX_CHARACTERS - 3]}..."
