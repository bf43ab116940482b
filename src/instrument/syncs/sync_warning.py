"""torch's warning that a call waited for the GPU: it comes when the call is over, and may be turned into an error.

Python drops warnings by filters, which belong to the process and which many libraries replace for a while. The
list of filters is one of ours in the meantime: it and its copies keep the filter that lets this warning through
at their front.
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

from .. import compat, gpu
from ..guard import guard
from ..patch import Patch

WAITED = re.compile(r"\s*called a synchronizing \w+ operation")  # CUDA, HIP, NPU
OFF, WARN, ERROR = range(3)
_ALWAYS = ("always", WAITED, Warning, None, 0)
# What torch says of the mode itself when it is first set
_PROTOTYPE = ("ignore", re.compile("Synchronization debug mode is a prototype"), Warning, None, 0)
_OURS = (_ALWAYS, _PROTOTYPE)


class _Filters(list[Any]):
    """Filters of warnings with ours in front, whatever is put before them, until `release`."""

    def __init__(self, filters: Iterable[Any], copies: weakref.WeakValueDictionary[int, _Filters]) -> None:
        super().__init__(filters)
        self._ours: tuple[Any, ...] = _OURS
        self._copies = copies
        copies[id(self)] = self
        self._order()

    def _order(self) -> None:
        others = [entry for entry in self if not any(entry is ours for ours in _OURS)]
        list.__setitem__(self, slice(None), [*self._ours, *others])

    def release(self) -> list[Any]:
        """Be a list like any other from now on; return what is left."""
        self._ours = ()
        self._order()
        return list(self)

    def _theirs(self, index: SupportsIndex | slice) -> SupportsIndex | slice:
        """Return where what others take for ``index`` is: ours do not count for them."""
        if isinstance(index, slice):
            return index
        number = operator.index(index)
        return number + len(self._ours) if number >= 0 else number

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(self._theirs(index))
        return _Filters(found, self._copies) if isinstance(index, slice) and self._ours else found

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._theirs(index), value)
        self._order()

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        super().__delitem__(self._theirs(index))
        self._order()

    def pop(self, index: SupportsIndex = -1) -> Any:
        found = super().pop(self._theirs(index))  # type: ignore[arg-type]
        self._order()
        return found

    def reverse(self) -> None:
        super().reverse()
        self._order()

    def sort(self, **how: Any) -> None:
        super().sort(**how)
        self._order()

    def insert(self, index: SupportsIndex, value: Any) -> None:
        super().insert(self._theirs(index), value)  # type: ignore[arg-type]
        self._order()

    def clear(self) -> None:
        super().clear()
        self._order()

    def copy(self) -> Any:
        return self[:]


class SyncWarning:
    """Calls ``closed(frame)`` when a call that waited is over, from `install` to `remove`.

    ``frame`` is that of the call. What ``closed`` raises comes out of the call that waited.
    """

    def __init__(self, closed: Callable[[FrameType | None], None]) -> None:
        self._closed = closed
        self._copies: weakref.WeakValueDictionary[int, _Filters] = weakref.WeakValueDictionary()
        self._replaced: list[tuple[list[Any], _Filters]] = []  # by others' filters, ours in their place
        self._shown: Patch | None = None
        self._before: int | None = None  # the mode of the program; not known before CUDA is initialized
        self._forget: Callable[[], None] | None = None  # that CUDA is waited for

    @property
    def error_mode(self) -> bool:
        """Whether torch raises before waits, because the program asked for that."""
        return self._before == ERROR

    def install(self) -> None:
        """Hear of torch's warnings, which it is told to give once the program has initialized CUDA."""
        name = "_showwarnmsg" if hasattr(warnings, "_showwarnmsg") else "showwarning"
        shown = self._shown = Patch(warnings, name, self._hook)
        shown.apply()
        self._let_through()
        self._forget = compat.when_initialized(self._warn)

    @guard.contained("having torch warn of waits")
    def _warn(self) -> None:
        """Let torch warn."""
        import torch

        if self._shown is None or self._before is not None:
            return
        self._let_through()
        self._before = torch.cuda.get_sync_debug_mode()
        if self._before == OFF:
            torch.cuda.set_sync_debug_mode(WARN)
        elif self._before == WARN:
            compat.forget_warnings()  # shown once before, Python would not show them again

    def remove(self) -> None:
        """Put everything back, but for what others changed since."""
        import torch

        shown, self._shown = self._shown, None
        try:
            if self._forget is not None:
                self._forget()
            usable = gpu.initialized("cuda") is not None  # not in a child that was forked since
            if usable and self._before == OFF and torch.cuda.get_sync_debug_mode() == WARN:
                torch.cuda.set_sync_debug_mode(OFF)
        finally:
            self._before = self._forget = None
            if shown is not None:
                shown.undo()
            for original, ours in self._replaced:
                left = ours.release()
                if warnings.filters is ours:
                    if left != original:
                        original[:] = left
                    warnings.filters = original
            for copy in list(self._copies.values()):
                copy.release()
            self._replaced = []

    def expected(self) -> bool:
        """Tell whether a wait that begins now will be told of at its end, and see to it."""
        import torch

        if self._before is None and gpu.initialized("cuda") is not None:
            self._warn()  # of the waits to come
            return False
        if self._before is None or torch.cuda.get_sync_debug_mode() != WARN:
            return False
        self._let_through()
        return True

    def _let_through(self) -> None:
        filters: Any = warnings.filters
        if not isinstance(filters, _Filters) or not filters._ours:
            ours = _Filters(filters, self._copies)
            self._replaced.append((filters, ours))
            warnings.filters = ours

    def _hook(self, original: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, *rest: Any, **named: Any) -> None:
            text = str(getattr(message, "message", message))
            if self._before is not None and WAITED.match(text):
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_globals.get("__name__") == "warnings":
                    frame = frame.f_back
                self._closed(frame)
            else:
                original(message, *rest, **named)

        return show
