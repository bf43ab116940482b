"""A set of objects by identity, which it does not keep alive: those of users may compare as they like."""

from __future__ import annotations

import weakref
from typing import Any


class IdentitySet:
    """Remembers objects that can be weakly referenced, until they are gone."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, item: Any) -> None:
        """Remember ``item``."""
        key, known = id(item), self._known
        known[key] = weakref.ref(item, lambda _: known.pop(key, None))

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def __contains__(self, item: object) -> bool:
        return id(item) in self._known

    def __len__(self) -> int:
        return len(self._known)
