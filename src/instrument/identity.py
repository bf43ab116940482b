"""A weak set of objects by identity, as objects of users may define any equality."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any


class IdentitySet:
    """Remembers objects that can be weakly referenced, until they are gone."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        for item in items:
            self.add(item)

    def add(self, item: Any) -> None:
        """Remember ``item``."""
        # The callback is `dict.pop`, as errors of Python callbacks cannot be contained; it gets the reference as
        # its default value.
        self._known[id(item)] = weakref.ref(item, functools.partial(self._known.pop, id(item)))

    def clear(self) -> None:
        """Forget all objects."""
        self._known.clear()

    def __iter__(self) -> Iterator[Any]:
        found = [reference() for reference in list(self._known.values())]
        return (item for item in found if item is not None)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._known

    def __len__(self) -> int:
        return len(self._known)
