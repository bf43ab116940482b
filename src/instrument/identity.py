"""A set of objects by identity, which it does not keep alive: those of users may compare as they like."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any


class IdentitySet:
    """Remembers objects that can be weakly referenced, until they are gone."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, item: Any) -> None:
        """Remember ``item``."""
        # A method of dict: what a callback raises cannot be contained. The reference is the default of `pop`.
        self._known[id(item)] = weakref.ref(item, functools.partial(self._known.pop, id(item)))

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def __iter__(self) -> Iterator[Any]:
        found = [reference() for reference in list(self._known.values())]
        return (item for item in found if item is not None)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._known

    def __len__(self) -> int:
        return len(self._known)
