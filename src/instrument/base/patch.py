"""Replaces attributes of other packages and restores them; keeps wrappers out of warnings and tracebacks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol, TypeVar

from .interrupts import is_interrupt

_MISSING = object()
_PACKAGE = __file__.rpartition("base")[0]
TRANSPARENT = "<instrument: importlib._bootstrap>"
"""The file name of wrappers, whose frames the ``stacklevel`` of a warning then does not count.

CPython skips the frames of files with "importlib" and "_bootstrap" in their names, and so does `logging`.
"""

F = TypeVar("F")
C = TypeVar("C", bound="Change")


class Change(Protocol):
    """The interface of a change that can be undone; undoing it before it was applied does nothing."""

    def apply(self) -> None:
        """Make the change."""

    def undo(self) -> None:
        """Restore what was there before."""


class Patch:
    """``owner.name`` is ``make(original)`` from `apply` to `undo`; ``make(None)`` if there is no original.

    Store the patch before `apply`, so that it can be undone wherever an interrupt comes.

    Patches of one attribute may be undone in any order. If other code replaces the attribute in the meantime,
    `undo` leaves that replacement in place. Calls through it still reach what ``make`` returned, which must
    therefore work after `undo` as the original does.

    Args:
        owner: a module, a class or an object; the patch does not keep it alive.
        name: the name of the attribute.
        make: called by `apply` with the original; returns the replacement.
    """

    _ours: Any  # the replacement
    _under: Patch | None  # the patch of this library that this one replaced

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner = _reference(owner)
        self._name = name
        self._make = make
        self._undone = False

    def apply(self) -> None:
        """Replace the attribute; call this only once. It has no effect if the owner is gone, or after `undo`."""
        owner, name = self._owner(), self._name
        if owner is None:
            return
        top = _tops.get((id(owner), name))  # before the attribute: a signal handler may undo it from here on
        self._before = vars(owner).get(name, _MISSING)  # an inherited attribute is removed, not restored
        self._under = top if top is not None and top._ours is self._before else None
        original = getattr(owner, name, None) if self._before is _MISSING else self._before
        self._ours = transparent(self._make(original))
        _tops[id(owner), name] = self
        self._set(owner, self._ours)
        if self._undone:  # by a signal handler or another thread, which found it not applied
            _tops[id(owner), name] = self
            self.undo()

    def apply_in(self, stack: ExitStack) -> None:
        """Apply the patch until ``stack`` is closed."""
        stack.callback(self.undo)
        self.apply()

    def undo(self) -> None:
        """Restore the original; below another patch of this library, only once that one is undone."""
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
            elif now is not top._before:  # equal if an interrupt came before `apply` replaced it
                break
            top = top._under
        if top is None or top._undone:
            _tops.pop(key, None)
        else:
            _tops[key] = top

    def suspend(self) -> bool:
        """Restore the original until `resume`; return whether the replacement was in place."""
        owner = self._owner()
        if owner is None or self._undone or vars(owner).get(self._name, _MISSING) is not self._ours:
            return False
        self._set(owner, self._before)
        return True

    def resume(self) -> None:
        """Put the replacement back after `suspend`, unless other code replaced the original meanwhile."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name, _MISSING) is self._before:
            self._set(owner, self._ours)

    def _set(self, owner: Any, value: Any) -> None:
        held = vars(owner)
        if not isinstance(held, dict):  # the attributes of a class can be set by setattr only
            delattr(owner, self._name) if value is _MISSING else setattr(owner, self._name, value)
        elif value is _MISSING:  # not `__delattr__` or `__setattr__`, which some modules override
            del held[self._name]
        else:
            held[self._name] = value


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # the object cannot be weakly referenced
        return lambda: owner


@contextmanager
def suspended(patches: Sequence[Patch]) -> Iterator[None]:
    """Run the block with what ``patches`` replaced, which were applied in this order."""
    with ExitStack() as stack:
        for patch in reversed(patches):
            if patch.suspend():
                stack.callback(patch.resume)
        yield


def apply(changes: Iterable[C], held: list[C]) -> None:
    """Append each of ``changes`` to ``held``, then apply it; pass ``held`` to `undo`."""
    for change in changes:
        held.append(change)
        change.apply()


def undo(changes: list[C]) -> None:
    """Undo ``changes``, the last one first, and remove them from the list.

    A change that fails, for example for lack of memory, is tried once more after the others.

    Raises:
        BaseException: an interrupt (see `is_interrupt`); else the error of the first change that failed twice.
            Changes that failed twice stay in the list.
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
        with suppress(ValueError):  # a signal handler undid it as well
            changes.remove(change)  # last, as an interrupt before `undo` would lose the change
    changes += failed
    return first


# The last patch of each patched attribute, for as long as its holder keeps it
_tops: weakref.WeakValueDictionary[tuple[int, str], Patch] = weakref.WeakValueDictionary()


def transparent(wrapper: F) -> F:
    """Keep ``wrapper``, if it is a function of this package, out of every ``stacklevel``; return it."""
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
    """Return ``code`` with the file name `TRANSPARENT`; always the same object for the same code."""
    return code.replace(co_filename=TRANSPARENT)


def leave_no_frame(error: BaseException) -> None:
    """Remove the frame that handles ``error`` from its traceback; the caller re-raises by a bare ``raise``.

    The traceback of an error in a patched function then reads as without the patch.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def then(original: Callable[..., Any], after: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that calls ``original`` and, unless that fails, ``after`` with the same arguments."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            leave_no_frame(error)
            raise
        after(*args, **kwargs)
        return result

    return call
