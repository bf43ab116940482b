"""Names of the regions that are open on a thread, to record where something happened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .region import Region

Token = tuple[list[Region], Region]


class RegionPath:
    """An emitter that only keeps names of open regions; `instrument.regions.dispatch.active.add` activates it."""

    name = "path"

    def __init__(self, on_push: Callable[[tuple[str, ...]], None] | None = None) -> None:
        self._on_push = on_push  # called with the open regions when one opens
        self._thread_state = threading.local()

    def names(self) -> tuple[str, ...]:
        """Return the regions open on this thread, outermost first."""
        return tuple(region.name for region in getattr(self._thread_state, "open", ()))

    def push(self, region: Region) -> Token:
        """Note that ``region`` opened on this thread."""
        try:
            opened = self._thread_state.open
        except AttributeError:
            opened = self._thread_state.open = []
        opened.append(region)
        if self._on_push is not None:
            self._on_push(self.names())
        return opened, region

    def pop(self, token: Token) -> None:
        """Note that the region closed, on whichever thread it was opened."""
        opened, region = token
        for index in range(len(opened) - 1, -1, -1):  # suspended code may close out of order
            if opened[index] is region:
                del opened[index]
                return

    start = push
    end = pop

    def mark(self, region: Region) -> Any:
        """Do nothing: an instant is never open."""
