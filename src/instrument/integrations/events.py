"""Methods that a framework calls at its events."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from ..base.guard import guard

K = TypeVar("K", bound=type)


def contained_events(feature: str) -> Callable[[K], K]:
    """Return a class decorator: every public method that the class itself defines contains its errors."""

    def decorate(kind: K) -> K:
        for name, method in list(vars(kind).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(kind, name, guard.contained(feature)(method))
        return kind

    return decorate
