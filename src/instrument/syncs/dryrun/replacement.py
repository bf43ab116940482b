"""The shape in which the dry run names what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Replacement = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and the function that makes the replacement


def calling(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the maker of a replacement of ``original`` that calls ``function(original, *arguments)``."""

    def make(original: Any) -> Any:
        @wraps(original)  # pickles name it
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return make
