"""Replace an attribute of somebody else's, and put back what was there; keep wrappers out of what users read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol, TypeVar

from .interrupts import is_interrupt

_MISSING = object()
_PACKAGE = __file__.rpartition("patch")[0]
TRANSPARENT = "<instrument: importlib._bootstrap>"
"""The file name of wrappers, whose frames the ``stacklevel`` of a warning then does not count.

CPython skips the frames of files with "importlib" and "_bootstrap" in their names, and so does `logging`.
"""

F = TypeVar("F")
C = TypeVar("C", bound="Change")


class Change(Protocol):
    """What can be applied and undone; to undo it does no harm where it was not applied."""

    def apply(self) -> None:
        """Replace something."""

    def undo(self) -> None:
        """Put back what was there."""


class Patch:
    """``owner.name`` is ``make(original)`` from `apply` to `undo`; ``make(None)`` where there is no original.

    Store it before `apply`: wherever an interrupt comes, what was replaced can then be undone.

    Patches of one attribute may be undone in any order. Where somebody else replaced it in the meantime it stays
    theirs, and calls through them still reach what ``make`` returned: that must work after `undo` as well, as the
    original does.

    Args:
        owner: a module, a class or an object, which this does not keep alive.
        name: the attribute.
        make: called by `apply` with what is there, returns what takes its place.
    """

    _ours: Any  # what takes the place of the attribute
    _under: Patch | None  # what of ours was there before

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner = _reference(owner)
        self._name = name
        self._make = make
        self._undone = False

    def apply(self) -> None:
        """Replace the attribute; call it only once. Nothing stays if the owner is gone, or after `undo`."""
        owner, name = self._owner(), self._name
        if owner is None:
            return
        top = _tops.get((id(owner), name))  # before the attribute: a signal handler may undo it from here on
        self._before = vars(owner).get(name, _MISSING)  # what is inherited is not the owner's to restore
        self._under = top if top is not None and top._ours is self._before else None
        original = getattr(owner, name, None) if self._before is _MISSING else self._before
        self._ours = transparent(self._make(original))
        _tops[id(owner), name] = self
        self._set(owner, self._ours)
        if self._undone:  # meanwhile, by a signal handler or another thread, which forgot it as not applied
            _tops[id(owner), name] = self
            self.undo()

    def apply_in(self, stack: ExitStack) -> None:
        """Apply it until ``stack`` is closed."""
        stack.callback(self.undo)
        self.apply()

    def undo(self) -> None:
        """Put back what was there; under another patch of ours, once that is undone."""
        self._undone = True
        owner = self._owner()
        if owner is None:
            return
        key = id(owner), self._name
        top = _tops.get(key)
        while top is not None and top._undone:
            now = vars(owner).get(top._name, _MISSING)
            if now is top._ours:
                top._set(owner, top._before)
            elif now is not top._before:  # else an interrupt kept `apply` from replacing it
                break
            top = top._under
        if top is None or top._undone:
            _tops.pop(key, None)
        else:
            _tops[key] = top

    def _set(self, owner: Any, value: Any) -> None:
        held = vars(owner)
        if not isinstance(held, dict):  # a class shows its attributes, but takes them through setattr only
            delattr(owner, self._name) if value is _MISSING else setattr(owner, self._name, value)
        elif value is _MISSING:  # past `__setattr__` and `__delattr__`, by which some modules pass things on
            del held[self._name]
        else:
            held[self._name] = value


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # an object without a place for references
        return lambda: owner


def apply(changes: Iterable[C], held: list[C]) -> None:
    """Apply ``changes``, each as soon as it is in ``held``, from which `undo` takes them."""
    for change in changes:
        held.append(change)
        change.apply()


def undo(changes: list[C]) -> None:
    """Undo ``changes``, the last one first, and take them out of the list.

    One that fails is tried once more after the others, as where memory was short.

    Raises:
        BaseException: an interrupt (see `is_interrupt`); else what the first one that failed twice raised. Those
            that failed twice stay in the list.
    """
    first, second = _undo(changes), _undo(changes)
    error = first if first is not None and is_interrupt(first) else second
    if error is not None:
        raise error


def _undo(changes: list[C]) -> BaseException | None:
    failed: list[C] = []
    first: BaseException | None = None
    for change in changes[::-1]:
        try:
            change.undo()
        except BaseException as error:
            failed.insert(0, change)
            if first is None or is_interrupt(error):
                first = error
        with suppress(ValueError):  # a signal handler undid it, too
            changes.remove(change)  # not before: an interrupt would lose it
    changes += failed
    return first


# The last patch of each attribute that has any, as long as somebody holds it to undo it
_tops: weakref.WeakValueDictionary[tuple[int, str], Patch] = weakref.WeakValueDictionary()


def transparent(wrapper: F) -> F:
    """Have ``wrapper``, if it is a function of this package, count in no ``stacklevel``; return it."""
    function: Any = wrapper
    while not isinstance(function, FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, (MethodType, staticmethod, classmethod)):
            function = function.__func__
        else:
            return wrapper
    if function.__code__.co_filename.startswith(_PACKAGE):
        function.__code__ = renamed(function.__code__)
    return wrapper


@functools.cache
def renamed(code: CodeType) -> CodeType:
    """Return the code of a wrapper as `transparent` gives it to the wrapper: always the same object."""
    return code.replace(co_filename=TRANSPARENT)


def leave_no_frame(error: BaseException) -> None:
    """Take the frame that handles ``error`` out of its traceback, which it leaves next by a bare ``raise``.

    The traceback of an error in a function that is patched reads as without the patch.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
