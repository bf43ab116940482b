"""Checks the arguments of public functions."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any, least: int = 0, why: str = "", *, several: bool = False) -> int:
    """Return ``value`` as an int.

    Args:
        name: the argument, for the error.
        value: what was given for it or, with ``several``, one of its items.
        least: the smallest accepted integer, ...
        why: ... and the reason for it, for the error.
        several: whether the argument holds several integers.

    Raises:
        TypeError, ValueError: ``value`` is not an integer, or too small.
    """
    accepted = f"hold integers >= {least}" if several else f"be an integer >= {least}"
    message = f'"{name}" must {accepted}{why}: {value!r}'
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(message) from None
    if number < least:
        raise ValueError(message)
    return number
