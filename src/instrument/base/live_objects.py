"""Living objects of the program: all those of a class, and a weak set of some by their identity."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def live_objects(kind: type[T]) -> list[T]:
    """Return the objects of ``kind`` and of its subclasses that the garbage collector tracks.

    Looks at all objects of the process: 0.2 s for a million. Objects whose ``__init__`` still runs are included.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


class IdentitySet:
    """Remembers objects that can be weakly referenced, until they are gone."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        for item in items:
            self.add(item)

    def add(self, item: Any) -> None:
        """Remember ``item``."""
        # The callback is `dict.pop`, as errors of Python callbacks cannot be contained; it gets the reference as
        # its default value.
        self._references[id(item)] = weakref.ref(item, functools.partial(self._references.pop, id(item)))

    def clear(self) -> None:
        """Forget all objects."""
        self._references.clear()

    def __iter__(self) -> Iterator[Any]:
        items = [reference() for reference in list(self._references.values())]
        return (item for item in items if item is not None)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._references

    def __len__(self) -> int:
        return len(self._references)
