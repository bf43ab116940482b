"""`Adapter`: a framework drives a `Loop` by hooks, all of which `detach` removes; `RangeStack`: its own ranges."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, MethodType
from typing import Any, TypeVar

from ..base import log
from ..base.config import settings
from ..base.guard import exiting, guard
from ..base.imports import ImportHook
from ..base.patch import Change, Patch, transparent, undo
from ..record.regions import dispatch
from ..record.regions.region import Region
from .loop import FEATURE, Loop, loop_from_environment

CallWrapper = Callable[..., Any]
"""Takes the original function and the arguments of a call; returns the result of the original."""

A = TypeVar("A", bound="Adapter")


class Removal:
    """A `Change` for a hook that is already installed; ``remove`` removes the hook."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def apply(self) -> None:
        """Do nothing."""

    def undo(self) -> None:
        """Remove the hook."""
        self._remove()


def leave_inert(adapter: Adapter, *_: Any, **__: Any) -> None:
    """Make ``adapter`` inert: it never attaches."""
    adapter.__dict__.update(loop=Loop.__new__(Loop), changes=[], _inert=True)


class Adapter:
    """Base class of adapters, each of which installs the hooks of one framework.

    An adapter is attached from `attach` to `detach`; as a context manager it detaches at the end of its block.
    A subclass overrides `install_hooks`; `wrap`, `apply` and `when_imported` install hooks that can be undone.

    Attributes:
        loop: the `Loop` that the framework drives.
        feature: what is skipped if a hook fails, for the log.
        attached: whether the hooks are in place; never under ``INSTRUMENT=0``.
        changes: the changes that `detach` undoes, the last one first.
        step_complete: whether the current step ran to its end, although ``loop.step()`` was not called for it.
    """

    feature = FEATURE
    attached = False
    step_complete = False
    driver: Callable[[], Any] = staticmethod(lambda: None)  # refers to what drives the loop, as an engine
    _inert = False  # the adapter could not be made

    @guard.prepared(FEATURE, otherwise=leave_inert)
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.changes: list[Change] = []

    @classmethod
    def inert(cls: type[A], *_: Any, **__: Any) -> A:
        """Return an adapter that never attaches, in place of one that cannot be made."""
        adapter = cls.__new__(cls)
        leave_inert(adapter)
        return adapter

    @guard.prepared(FEATURE, otherwise=lambda adapter: adapter)
    def attach(self: A) -> A:
        """Install the hooks, or none if one fails; return the adapter."""
        with guard.contained(self.feature):  # also what `prepared` lets pass, as a hook's TypeError
            if settings.enabled and not (self.attached or self._inert):
                self.detach_first_at_exit()
                self.attached, self.step_complete = True, False
                try:
                    self.install_hooks()
                except BaseException:
                    self.detach()
                    raise
                if not self.attached:  # detached meanwhile, by a signal handler
                    undo(self.changes)
        return self

    def install_hooks(self) -> None:
        """Install what makes the framework drive ``loop``."""

    @guard.contained(FEATURE)
    def detach(self) -> None:
        """Stop the loop, which writes an open window, and undo every change; a second call does nothing."""
        self.attached = False
        try:
            self.stop_loop()
        finally:
            undo(self.changes)  # what cannot be undone now is tried again at exit
        atexit.unregister(self._detach_at_exit)

    def detach_first_at_exit(self) -> None:
        """Detach at exit, before the exit handlers registered so far, such as that of a recording."""
        atexit.unregister(self._detach_at_exit)
        atexit.register(self._detach_at_exit)

    def _detach_at_exit(self) -> None:
        with exiting():
            self.detach()

    def __enter__(self: A) -> A:
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The outcome of each window so far, as in ``manifest.jsonl``."""
        return self.loop.windows

    @guard.contained(FEATURE)
    def stop_loop(self) -> None:
        """Stop the loop, which may start again."""
        self.loop.stop(complete=self.step_complete)

    def claim(self, driver: Any) -> bool:
        """Return whether ``driver`` drives the loop; it does from now on if no other does."""
        current = self.driver()
        if current is None:
            self.stop_loop()
            self.driver = weakref.ref(driver)
        return current is None or current is driver

    def release(self, driver: Any) -> None:
        """Stop the loop, until another object drives it, if ``driver`` drives it."""
        if self.driver() is driver:
            self.stop_loop()
            del self.driver

    def wrap(self, owner: Any, name: str, around: CallWrapper, changes: list[Change] | None = None) -> None:
        """Replace ``owner.name`` by a function that calls ``around(original, *arguments)``.

        If the framework has no ``owner.name``, this is logged, and the hook is left out.

        Args:
            owner: a module, a class or an object.
            name: the function or method.
            around: calls the original once.
            changes: the list that takes the change; by default `changes`.
        """
        if not callable(getattr(owner, name, None)):
            kind = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
            log.info(f"{kind.__module__}.{getattr(kind, '__qualname__', '')} has no {name}, which is not followed")
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def when() -> bool:
                return self.attached and not dispatch.tracing()

            return as_replacement(original, guard.around(self.feature, original, around, when))

        self.apply(Patch(owner, name, make), changes)

    def apply(self, change: Change, changes: list[Change] | None = None) -> None:
        """Apply ``change``, and add it to ``changes``, by default those that `detach` undoes."""
        (self.changes if changes is None else changes).append(change)
        change.apply()

    def in_region(self, name: str) -> CallWrapper:
        """Return a call wrapper, for `wrap`, that opens the region ``name`` around each call."""

        def around(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            with self.loop.region(name):
                return original(*args, **kwargs)

        return around

    def when_imported(self, module: str, callback: Callable[[Any], None]) -> None:
        """Call ``callback(module)`` once ``module`` is imported, unless the adapter is detached by then."""

        def imported(loaded: Any) -> None:
            with guard.contained(self.feature):
                if self.attached:
                    callback(loaded)

        self.apply(ImportHook(module, imported))


def as_replacement(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``original`` that calls ``call``.

    A bound method is replaced only for its own object: copies of the object call the original.
    """
    if not isinstance(original, MethodType):
        return functools.wraps(original)(call)
    owner, function = original.__self__, original.__func__

    @transparent
    @functools.wraps(function)
    def method(this: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if this is owner else function(this, *args, **kwargs)

    return MethodType(method, owner)


def when_requested(make: Callable[[Loop], Adapter]) -> Callable[[], None]:
    """Return a framework's ``install``, which attaches ``make(loop)`` if the environment requests a loop."""

    @functools.cache
    def install() -> None:
        loop = loop_from_environment()
        if loop is not None:
            make(loop).attach()

    return install


def require(package: str, distribution: str = "") -> None:
    """Raise an error that says how to install ``package`` if it is missing.

    Raises:
        ImportError: the package cannot be found.
    """
    parent, _, _ = package.partition(".")
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(package) is None:
        name = distribution or package
        raise ImportError(f"{name} is not installed: pip install {name}")


FrameId = tuple[int, CodeType]
"""Identifies a running call of a function."""


class RangeStack(threading.local):
    """The ranges that a framework pushes on this thread, and pops in code of its own.

    The open ones are held outermost first, each with its name, owning call if any, and token.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, FrameId | None, dispatch.Token]] = []

    def __len__(self) -> int:
        return len(self._open)

    def push(self, region: Region | None, owner: FrameType | None = None) -> None:
        """Open ``region``; None is a range that no profiler records.

        A region with an ``owner`` ends with that call at the latest. It is closed when the next region opens,
        since Python has no event for the end of a call.
        """
        if region is None:
            self._open.append(("", None, dispatch.NO_TOKEN))
            return
        call = None if owner is None else (id(owner), owner.f_code)
        for depth, (name, other, _) in enumerate(self._open):
            if call is not None and (name, other) == (region.name, call):  # a later call, at the same address
                self.close(depth)
                break
        self._open.append((region.name, call, dispatch.enter(region)))

    def pop(self, name: str) -> None:
        """Close the innermost range ``name`` and those inside it; do nothing if no such range is open."""
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth][0] == name:
                self.close(depth)
                return

    def close(self, depth: int) -> None:
        """Close all but the outermost ``depth`` ranges."""
        while len(self._open) > depth:
            dispatch.leave(self._open.pop()[2])

    def close_finished(self, frame: FrameType | None) -> None:
        """Close ranges whose owning calls are not among the callers of ``frame``; takes 100 ns a frame."""
        if not self._open:
            return
        running: set[FrameId | None] = {None}
        while frame is not None:
            running.add((id(frame), frame.f_code))  # the address alone is soon reused
            frame = frame.f_back
        for depth, (_, owner, _) in enumerate(self._open):
            if owner not in running:
                self.close(depth)
                return

    @contextmanager
    def around(self, region: Region, frame: FrameType) -> Iterator[None]:
        """Open ``region`` around the body, in a call of ``frame``; ranges pushed inside end inside."""
        self.close_finished(frame)
        depth, token = len(self._open), dispatch.enter(region)
        try:
            yield
        finally:
            self.close(depth)
            dispatch.leave(token)
