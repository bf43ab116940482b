"""`GpuTrace`: torch's callbacks before the CPU waits for a stream, an event or a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from ..compat import cuda
from .calls import Target

Callback = Callable[[Target, FrameType | None], None]


class GpuTrace:
    """Calls ``on_begin(target, frame)`` before each synchronization, on its thread, from `install` to `remove`.

    ``target`` is what the CPU waits for, ``frame`` the innermost Python frame or None. Other callbacks, such as
    those of torch's CUDA sanitizer, stay installed.

    If torch's switch cannot be found, its callbacks stay on after `remove`: each allocation of GPU memory and each
    synchronization then costs a call of a function that does nothing, 1 us.
    """

    def __init__(self, on_begin: Callback) -> None:
        self._on_begin = on_begin
        self._added: list[tuple[list[Any], Callable[..., None]]] = []
        self._switch: Any = None  # torch's, unless the program itself had turned it on

    @property
    def active(self) -> bool:
        """Whether torch calls back."""
        return bool(self._added) and (self._switch is None or self._switch.value)

    def install(self) -> None:
        """Install the callbacks, if this version of torch has them."""
        found = cuda.sync_callbacks()
        if found is None:
            return
        lists, activate = found
        switch = cuda.trace_switch()
        self._switch = None if switch is None or switch.value else switch
        activate()
        self.resume()
        for target, callbacks in lists.items():
            callback = self._callback(cast(Target, target))
            callbacks.append(callback)
            self._added.append((callbacks, callback))

    def pause(self) -> None:
        """Turn the callbacks off, as an error is about to be raised."""
        if self._switch is not None:
            self._switch.value = False

    def resume(self) -> None:
        """Turn the callbacks on again."""
        if self._switch is not None:
            self._switch.value = True

    def remove(self) -> None:
        """Remove the callbacks."""
        others = False
        while self._added:
            callbacks, callback = self._added.pop()
            if callback in callbacks:
                callbacks.remove(callback)
            others = others or bool(callbacks)
        if not others:
            self.pause()
        self._switch = None

    def _callback(self, target: Target) -> Callable[..., None]:
        def callback(*_: object) -> None:
            self._on_begin(target, sys._getframe(1).f_back)  # past torch's function that calls the callbacks

        return callback
