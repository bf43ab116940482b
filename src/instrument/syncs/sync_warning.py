"""`SyncWarning`: torch's warning that a call synchronized, given once the call has returned.

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
from typing import Any, SupportsIndex

from .. import gpu
from ..compat import cuda
from ..guard import guard
from ..patch import Patch

SYNCHRONIZED = re.compile(r"\s*called a synchronizing \w+ operation")  # CUDA, HIP, NPU
OFF, WARN, ERROR = range(3)
_ALWAYS = ("always", SYNCHRONIZED, Warning, None, 0)
# torch's warning about the mode itself when it is first set
_PROTOTYPE = ("ignore", re.compile("Synchronization debug mode is a prototype"), Warning, None, 0)
_FIRST = (_ALWAYS, _PROTOTYPE)


class _Filters(list[Any]):
    """Warning filters that keep `_FIRST` in front, and hidden from indexes, until `release`."""

    def __init__(self, filters: Iterable[Any], copies: weakref.WeakValueDictionary[int, _Filters]) -> None:
        super().__init__(filters)
        self._first: tuple[Any, ...] = _FIRST
        self._copies = copies
        copies[id(self)] = self
        self._order()

    def _order(self) -> None:
        others = [entry for entry in self if not any(entry is first for first in _FIRST)]
        list.__setitem__(self, slice(None), [*self._first, *others])

    def release(self) -> list[Any]:
        """Become an ordinary list; return its entries."""
        self._first = ()
        self._order()
        return list(self)

    def _shifted(self, index: SupportsIndex | slice) -> SupportsIndex | slice:
        """Return the real index for one that does not count `_FIRST`."""
        if isinstance(index, slice):
            return index
        number = operator.index(index)
        return number + len(self._first) if number >= 0 else number

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(self._shifted(index))
        return _Filters(found, self._copies) if isinstance(index, slice) and self._first else found

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._shifted(index), value)
        self._order()

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        super().__delitem__(self._shifted(index))
        self._order()

    def pop(self, index: SupportsIndex = -1) -> Any:
        found = super().pop(self._shifted(index))  # type: ignore[arg-type]
        self._order()
        return found

    def reverse(self) -> None:
        super().reverse()
        self._order()

    def sort(self, **how: Any) -> None:
        super().sort(**how)
        self._order()

    def insert(self, index: SupportsIndex, value: Any) -> None:
        super().insert(self._shifted(index), value)  # type: ignore[arg-type]
        self._order()

    def clear(self) -> None:
        super().clear()
        self._order()

    def copy(self) -> Any:
        return self[:]


class SyncWarning:
    """Calls ``ended(frame)`` when a call that synchronized has returned, from `install` to `remove`.

    ``frame`` is the frame of the call. What ``ended`` raises propagates out of the call.
    """

    def __init__(self, ended: Callable[[FrameType | None], None]) -> None:
        self._ended = ended
        self._copies: weakref.WeakValueDictionary[int, _Filters] = weakref.WeakValueDictionary()
        self._replaced: list[tuple[list[Any], _Filters]] = []  # the program's list, and the list in its place
        self._shown: Patch | None = None
        self._before: int | None = None  # the program's mode; unknown before CUDA is initialized
        self._cancel: Callable[[], None] | None = None  # cancels the call at the initialization of CUDA

    @property
    def error_mode(self) -> bool:
        """Whether torch raises an error before synchronizations, as the program requested."""
        return self._before == ERROR

    def install(self) -> None:
        """Intercept torch's warnings, and turn them on once the program has initialized CUDA."""
        name = "_showwarnmsg" if hasattr(warnings, "_showwarnmsg") else "showwarning"
        shown = self._shown = Patch(warnings, name, self._hook)
        shown.apply()
        self._let_through()
        self._cancel = cuda.when_initialized(self._turn_on)

    @guard.contained("turning on torch's synchronization warnings")
    def _turn_on(self) -> None:
        """Set torch's mode to warnings."""
        import torch

        if self._shown is None or self._before is not None:
            return
        self._let_through()
        self._before = torch.cuda.get_sync_debug_mode()
        if self._before == OFF:
            torch.cuda.set_sync_debug_mode(WARN)
        elif self._before == WARN:
            _forget_shown_warnings()  # Python shows a warning once only

    def remove(self) -> None:
        """Restore everything except what others have changed since."""
        import torch

        shown, self._shown = self._shown, None
        try:
            if self._cancel is not None:
                self._cancel()
            usable = gpu.initialized("cuda") is not None  # not in a child process forked since
            if usable and self._before == OFF and torch.cuda.get_sync_debug_mode() == WARN:
                torch.cuda.set_sync_debug_mode(OFF)
        finally:
            self._before = self._cancel = None
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

        if self._before is None and gpu.initialized("cuda") is not None:
            self._turn_on()  # from the next one on
            return False
        if self._before is None or torch.cuda.get_sync_debug_mode() != WARN:
            return False
        self._let_through()
        return True

    def _let_through(self) -> None:
        filters: Any = warnings.filters
        if not isinstance(filters, _Filters) or not filters._first:
            replacement = _Filters(filters, self._copies)
            self._replaced.append((filters, replacement))
            warnings.filters = replacement

    def _hook(self, original: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, *rest: Any, **named: Any) -> None:
            text = str(getattr(message, "message", message))
            if self._before is not None and SYNCHRONIZED.match(text):
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_globals.get("__name__") == "warnings":
                    frame = frame.f_back
                self._ended(frame)
            else:
                original(message, *rest, **named)

        return show


def _forget_shown_warnings() -> None:
    """Make Python show a warning again that it has shown; without this private name it shows it only once."""
    forget = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
    if forget is not None:
        forget()
