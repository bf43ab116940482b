"""What ends a step: a sign that every training shows, or the calls of a function of the program."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import compat
from ..guard import guard
from ..patch import Patch, apply, leave_no_frame, undo

FEATURE = "following the function whose calls are steps"
_inside: ContextVar[tuple[int, ...]] = ContextVar("inside", default=())
"""In this thread or task: the numbers of the `FunctionCallSteps` whose functions run, each once."""
_numbers = itertools.count()  # not a ContextVar for each: those are never freed
SIGNS = ("forward", "backward", "optimizer", "program")
"""What may end a step, from the weakest sign to the strongest."""


def check_step_on(step_on: str | None) -> str | None:
    """Return what is to end the steps, with the whole path of a file.

    Raises:
        ValueError: it is not "optimizer", "backward", "forward" or a function as `FunctionCallSteps` takes it,
            or it names a file that does not exist.
    """
    if step_on is None or step_on in SIGNS[:-1]:
        return step_on
    place, function = parse_function(step_on)
    if not place.endswith(".py"):
        return step_on
    if not Path(place).is_file():
        raise ValueError(f"--step-on names a file that does not exist: {place}")
    return f"{os.path.realpath(place)}:{function}"


def parse_function(name: str) -> tuple[str, str]:
    """Return the module or file, and the function in it, that ``name`` gives.

    Raises:
        ValueError: it is not written as ``module:qualname`` or ``file.py:function``.
    """
    place, _, function = name.rpartition(":")
    parts = function.split(".")
    if not place or not all(part.isidentifier() for part in parts):
        raise ValueError(
            '--step-on must be "optimizer", "backward", "forward", or a function such as '
            f'"package.module:Class.method" or "train.py:train_step": {name!r}'
        )
    return place, function


class FunctionCallSteps:
    """Calls ``called()`` at the end of each call of a function that returns, from `follow` to `remove`.

    A function of an imported module is replaced when the import is over. One of the script itself is not there yet
    when the program begins: `look` finds it, and is called at events that a training step has.

    Attributes:
        found: whether the function was found.
    """

    def __init__(self, name: str, called: Callable[[], None]) -> None:
        self._place, self._function = parse_function(name)
        self._called = called
        self._patches: list[Patch] = []
        self._removed = False
        self.found = False
        self._number = next(_numbers)
        self.running = False  # it was found during a call, whose end is not seen
        self.is_file = self._place.endswith(".py")

    def follow(self) -> None:
        """Begin; whoever holds this can `remove` it, wherever an interrupt comes."""
        if not self.is_file:
            compat.when_imported(self._place, self._imported)

    @property
    def inside(self) -> bool:
        """Whether a call of the function runs here, in this thread or task."""
        return self._number in _inside.get()

    def remove(self) -> None:
        """Put the function back."""
        self._removed = True
        undo(self._patches)

    def _stay_removed(self) -> None:
        """Undo what was done while a signal handler or another thread called `remove`."""
        if self._removed:
            undo(self._patches)

    def look(self) -> None:
        """Look for the function in the script and, where a file is named, in the modules that came from it."""
        if not self.found and not self._removed:
            with guard.contained(FEATURE):
                for module in self._modules():
                    self._imported(module)

    def _modules(self) -> Iterator[ModuleType]:
        main = sys.modules.get("__main__")
        if not self.is_file:
            spec = getattr(main, "__spec__", None)
            if main is not None and spec is not None and spec.name == self._place:
                yield main
            return
        wanted = os.path.realpath(self._place)
        name = Path(wanted).name
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.endswith(name) and os.path.realpath(file) == wanted:
                yield module

    @guard.contained(FEATURE)
    def _imported(self, module: ModuleType) -> None:
        owner: Any = module
        *outer, name = self._function.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        function = inspect.getattr_static(owner, name, None)
        plain = getattr(function, "__func__", function)  # of a static method or a class method
        if self.found or self._removed or not callable(plain):
            return
        kind = type(function) if plain is not function else None

        def make(_: Any) -> Any:
            return kind(self._following(plain)) if kind else self._following(plain)

        self.found = True
        try:
            apply([Patch(owner, name, make)], self._patches)
        except BaseException:
            self.found = False
            undo(self._patches)
            raise
        self._stay_removed()
        code, frame = getattr(inspect.unwrap(plain), "__code__", None), sys._getframe()
        while frame is not None:
            self.running = self.running or frame.f_code is code
            frame = frame.f_back  # type: ignore[assignment]

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._previous()
            before = _inside.get()
            _inside.set(before if self._number in before else (*before, self._number))
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                _inside.set(before)
            self._ended()
            return result

        @functools.wraps(original)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            self._previous()
            before = _inside.get()
            _inside.set(before if self._number in before else (*before, self._number))
            try:
                result = await original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                _inside.set(before)
            self._ended()
            return result

        return call_async if inspect.iscoroutinefunction(original) else call

    @guard.contained(FEATURE)
    def _previous(self) -> None:
        """Count the call during which the function was found: it is over when the next one begins."""
        if self.running:
            self.running = False
            self._ended()

    @guard.contained(FEATURE)
    def _ended(self) -> None:
        if not self._removed:
            self._called()
