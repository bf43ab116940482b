"""`Kept`: what was read for an agent, so that its next questions about the same file take no time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from ...base.early_stop import EarlyStop

T = TypeVar("T")
_MOST = 4  # things that are kept: a trace of 60 MB takes some 200 MB

Key = tuple[object, ...]


class Request:
    """A question that is being answered.

    Attributes:
        read_bytes: how much of a file was read.
        of_bytes: the size of that file; 0 if none is being read.
        cancelled: whether nobody waits for the answer any more.
    """

    def __init__(self) -> None:
        self.read_bytes = self.of_bytes = 0
        self.cancelled = False

    def advance(self, more: int, size: int) -> None:
        """Note that so many bytes more were read, of a file of this size.

        Raises:
            EarlyStop: the request was cancelled.
        """
        if self.cancelled:
            raise EarlyStop("nobody waits for the file")
        if size != self.of_bytes:
            self.read_bytes, self.of_bytes = 0, size
        self.read_bytes += more


class _Slot:
    """A thing that is kept, or that a thread is making: others wait for it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.made: Any = None


class Kept:
    """What was made of files, the most recently used ones; a file that has changed is read again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._slots: OrderedDict[Key, tuple[Key, _Slot]] = OrderedDict()

    def get(self, path: Path, options: Key, make: Callable[[], T]) -> T:
        """Return what ``make`` returns for a file or folder with these options.

        If two threads ask for the same, one makes it and the other waits; what raises an error is not kept.
        """
        state, key = _state(path), (path, *options)
        with self._lock:
            known = self._slots.get(key)
            slot = known[1] if known is not None and known[0] == state else _Slot()
            self._slots[key] = state, slot
            self._slots.move_to_end(key)
            while len(self._slots) > _MOST:
                self._slots.popitem(last=False)
        with slot.lock:
            if slot.made is None:
                slot.made = make()
            made: T = slot.made
            return made


def _state(path: Path) -> Key:
    """Return what changes with a file, or with a file in a folder or in one below it."""
    files = [path, *path.glob("*"), *path.glob("*/*")] if path.is_dir() else [path]
    there = (file for file in sorted(files) if file.exists())
    return tuple((str(file), (about := file.stat()).st_mtime_ns, about.st_size) for file in there)
