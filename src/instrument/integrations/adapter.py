"""`Adapter`: what is replaced in a framework so that it tells a loop, and how that is undone."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from .. import compat, log
from ..config import settings
from ..guard import guard
from ..patch import Patch, transparent
from ..regions import dispatch
from .loop import Loop

FEATURE = "following the framework"
Around = Callable[..., Any]  # (original, *arguments) -> what the original returns


def _without(attachment: Adapter, loop: Loop) -> None:
    """Leave ``attachment`` as one that is not attached."""
    attachment.loop, attachment.on, attachment.complete, attachment.undo = loop, False, False, []


class Adapter:
    """What was attached to a framework: `remove` takes it out, as does the end of a with statement.

    Attributes:
        loop: what the framework drives through this.
        on: whether it is attached; never under ``INSTRUMENT=0``.
    """

    @guard.prepared(FEATURE, otherwise=_without)
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.on = settings.enabled
        self.complete = False  # the current step ran to its end, though the loop was not told
        self.undo: list[Callable[[], None]] = []  # from the last one to the first
        if self.on:
            atexit.register(self.remove)  # what an error left open

    def __enter__(self) -> Adapter:
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.remove()

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """End the loop and put everything back; once more does nothing."""
        self.on = False
        try:
            self.end()
        finally:
            self._put_back()
        if not self.undo:  # else it is tried again at exit
            atexit.unregister(self.remove)

    def _put_back(self) -> None:
        failed: list[Callable[[], None]] = []
        try:
            while self.undo:
                undo = self.undo.pop()
                try:
                    undo()
                except Exception as error:
                    failed.insert(0, undo)
                    guard.failed(FEATURE, error)
        finally:
            self.undo += failed

    @guard.contained(FEATURE)
    def end(self) -> None:
        """End the loop, which may start again."""
        self.loop.stop(complete=self.complete)

    def wrap(self, owner: Any, name: str, around: Around, undo: list[Callable[[], None]] | None = None) -> None:
        """Have ``around(original, *arguments)`` stand for ``owner.name``; where there is none, log it.

        How to undo it goes to ``undo``, by default with the rest.
        """
        if not callable(getattr(owner, name, None)):
            kind = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
            log.info(f"{kind.__module__}.{getattr(kind, '__qualname__', '')} has no {name}, which is not followed")
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def when() -> bool:
                return self.on and not dispatch.tracing()

            return as_replacement(original, guard.around(FEATURE, original, around, when))

        self.apply(Patch(owner, name, make), undo)

    def apply(self, patch: Patch, undo: list[Callable[[], None]] | None = None) -> None:
        """Apply ``patch``; how to undo it goes to ``undo``, by default with the rest."""
        (self.undo if undo is None else undo).append(patch.undo)
        patch.apply()

    def region(self, name: str) -> Around:
        """Return what makes a call the region ``name``, for `wrap`."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.loop.region(name):
                return original(*args, **kwargs)

        return around

    def when_imported(self, module: str, feature: str, call: Callable[[Any], None]) -> None:
        """Call ``call(module)`` once ``module`` is imported, unless this was removed by then."""

        def imported(found: Any) -> None:
            with guard.contained(feature):
                if self.on:
                    call(found)

        compat.when_imported(module, imported)


def as_replacement(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for ``original`` and calls ``call``; of a bound method, not in copies of its object."""
    if not isinstance(original, MethodType):
        return functools.wraps(original)(call)
    owner, function = original.__self__, original.__func__

    @transparent
    @functools.wraps(function)
    def method(this: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if this is owner else function(this, *args, **kwargs)

    return MethodType(method, owner)


def require(package: str) -> None:
    """Raise an error that says how to install ``package`` where it is missing.

    Raises:
        ImportError: it is.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed: pip install {package}")
