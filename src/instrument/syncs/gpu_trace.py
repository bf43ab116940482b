"""torch's own hook that is called before the CPU waits for a stream, an event or a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import compat

Opened = Callable[[str, FrameType | None], None]


class GpuTrace:
    """Calls ``opened(what, frame)`` before each wait, on the thread that waits, from `install` to `remove`.

    ``what`` is "stream", "event" or "device"; ``frame`` the innermost one of Python, None where there is none.
    Other callbacks, as those of torch's CUDA sanitizer, stay where they are.

    What is activated in torch cannot be taken back. Without any callback, that costs each allocation of GPU
    memory and each wait a call of a function that does nothing, 1 us.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._added: list[tuple[list[Any], Callable[..., None]]] = []

    @property
    def active(self) -> bool:
        """Whether waits are heard of."""
        return bool(self._added)

    def install(self) -> None:
        """Begin; where torch has no such hook nothing is heard."""
        found = compat.sync_callbacks()
        if found is None:
            return
        lists, activate = found
        activate()
        for what, callbacks in lists.items():
            callback = self._callback(what)
            callbacks.append(callback)
            self._added.append((callbacks, callback))

    def remove(self) -> None:
        """End."""
        while self._added:
            callbacks, callback = self._added.pop()
            if callback in callbacks:
                callbacks.remove(callback)

    def _callback(self, what: str) -> Callable[..., None]:
        def callback(*_: object) -> None:
            self._opened(what, sys._getframe(1).f_back)  # past torch's function that calls all callbacks

        return callback
