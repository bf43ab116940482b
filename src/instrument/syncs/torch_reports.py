"""How torch reports a synchronization: `GpuTrace`, a callback before it, and `SyncWarning`, a warning after it.

Programs change, copy and inspect ``warnings.filters`` at any time, also between the start of a call and its
warning. An entry in the program's own list would be visible and could be displaced. A list that hides its first
entries and keeps them in front, in itself and in copies, therefore replaces it meanwhile.
"""

from __future__ import annotations

import operator
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal, SupportsIndex, cast

from ..base.compat import gpu
from ..base.guard import guard
from ..base.patch import Patch

Target = Literal["stream", "event", "device"]
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
        available = gpu.sync_callbacks()
        if available is None:
            return
        lists, activate = available
        switch = gpu.trace_switch()
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


SYNCHRONIZED = re.compile(r"\s*called a synchronizing \w+ operation")  # CUDA, HIP, NPU
OFF, WARN, ERROR = range(3)
_ALWAYS = ("always", SYNCHRONIZED, Warning, None, 0)
# torch's warning about the mode itself when it is first set
_PROTOTYPE = ("ignore", re.compile("Synchronization debug mode is a prototype"), Warning, None, 0)
_OWN_FILTERS = (_ALWAYS, _PROTOTYPE)


def _in_order(name: str, *, takes_index: bool = False) -> Any:
    """Return the method ``name`` of a list for `_Filters`, whose order it restores."""
    method = getattr(list, name)

    def call(filters: _Filters, *args: Any, **named: Any) -> Any:
        if takes_index and args:
            args = (filters._real_index(args[0]), *args[1:])
        result = method(filters, *args, **named)
        filters._restore_order()
        return result

    return call


class _Filters(list[Any]):
    """Warning filters that keep `_OWN_FILTERS` in front, and hidden from indexes, until `release`."""

    def __init__(self, filters: Iterable[Any], copies: weakref.WeakValueDictionary[int, _Filters]) -> None:
        super().__init__(filters)
        self._hidden_filters: tuple[Any, ...] = _OWN_FILTERS
        self._copies = copies
        copies[id(self)] = self
        self._restore_order()

    def _restore_order(self) -> None:
        others = [entry for entry in self if not any(entry is first for first in _OWN_FILTERS)]
        list.__setitem__(self, slice(None), [*self._hidden_filters, *others])

    def release(self) -> list[Any]:
        """Become an ordinary list; return its entries."""
        self._hidden_filters = ()
        self._restore_order()
        return list(self)

    def _real_index(self, index: SupportsIndex | slice) -> SupportsIndex | slice:
        """Return the real index for one that does not count `_OWN_FILTERS`."""
        if isinstance(index, slice):
            return index
        number = operator.index(index)
        return number + len(self._hidden_filters) if number >= 0 else number

    def __getitem__(self, index: Any) -> Any:
        held = super().__getitem__(self._real_index(index))
        return _Filters(held, self._copies) if isinstance(index, slice) and self._hidden_filters else held

    __setitem__ = _in_order("__setitem__", takes_index=True)
    __delitem__ = _in_order("__delitem__", takes_index=True)
    insert = _in_order("insert", takes_index=True)
    pop = _in_order("pop", takes_index=True)
    reverse, sort, clear = _in_order("reverse"), _in_order("sort"), _in_order("clear")

    def copy(self) -> Any:
        return self[:]


class SyncWarning:
    """Calls ``on_return(frame)`` when a call that synchronized has returned, from `install` to `remove`.

    ``frame`` is the frame of the call. What ``on_return`` raises propagates out of the call.
    """

    def __init__(self, on_return: Callable[[FrameType | None], None]) -> None:
        self._on_return = on_return
        self._copies: weakref.WeakValueDictionary[int, _Filters] = weakref.WeakValueDictionary()
        self._replaced: list[tuple[list[Any], _Filters]] = []  # the program's list, and the list in its place
        self._show_patch: Patch | None = None
        self._mode_before: int | None = None  # the program's mode; unknown before CUDA is initialized
        self._cancel: Callable[[], None] | None = None  # cancels the call at the initialization of CUDA

    @property
    def error_mode(self) -> bool:
        """Whether torch raises an error before synchronizations, as the program requested."""
        return self._mode_before == ERROR

    def install(self) -> None:
        """Intercept torch's warnings, and turn them on once the program has initialized CUDA."""
        name = "_showwarnmsg" if hasattr(warnings, "_showwarnmsg") else "showwarning"
        shown = self._show_patch = Patch(warnings, name, self._make_show)
        shown.apply()
        self._let_through()
        self._cancel = gpu.when_initialized(self._turn_on)

    @guard.contained("turning on torch's synchronization warnings")
    def _turn_on(self) -> None:
        """Set torch's mode to warnings."""
        import torch

        if self._show_patch is None or self._mode_before is not None:
            return
        self._let_through()
        self._mode_before = torch.cuda.get_sync_debug_mode()
        if self._mode_before == OFF:
            torch.cuda.set_sync_debug_mode(WARN)
        elif self._mode_before == WARN:
            _forget_shown_warnings()  # Python shows a warning once only

    def remove(self) -> None:
        """Restore everything except what others have changed since."""
        import torch

        shown, self._show_patch = self._show_patch, None
        try:
            if self._cancel is not None:
                self._cancel()
            usable = gpu.initialized("cuda") is not None  # not in a child process forked since
            if usable and self._mode_before == OFF and torch.cuda.get_sync_debug_mode() == WARN:
                torch.cuda.set_sync_debug_mode(OFF)
        finally:
            self._mode_before = self._cancel = None
            if shown is not None:
                shown.undo()
            for original, replacement in self._replaced:
                left = replacement.release()
                if warnings.filters is replacement:
                    if left != original:
                        original[:] = left
                    warnings.filters = original
            for copy in list(self._copies.values()):
                copy.release()
            self._replaced = []

    def expected(self) -> bool:
        """Return whether torch will warn at the end of a synchronization that begins now, and let it through."""
        import torch

        if self._mode_before is None and gpu.initialized("cuda") is not None:
            self._turn_on()  # from the next one on
            return False
        if self._mode_before is None or torch.cuda.get_sync_debug_mode() != WARN:
            return False
        self._let_through()
        return True

    def _let_through(self) -> None:
        filters: Any = warnings.filters
        if not isinstance(filters, _Filters) or not filters._hidden_filters:
            replacement = _Filters(filters, self._copies)
            self._replaced.append((filters, replacement))
            warnings.filters = replacement

    def _make_show(self, original: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, *rest: Any, **named: Any) -> None:
            text = str(getattr(message, "message", message))
            if self._mode_before is not None and SYNCHRONIZED.match(text):
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_globals.get("__name__") == "warnings":
                    frame = frame.f_back
                self._on_return(frame)
            else:
                original(message, *rest, **named)

        return show


def _forget_shown_warnings() -> None:
    """Make Python show a warning again that it has shown; without this private name it shows it only once."""
    forget = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
    if forget is not None:
        forget()
