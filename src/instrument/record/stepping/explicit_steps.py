"""Steps that somebody names: the program, with ``prof.step()``, or the user, by a function's calls."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from ...base.guard import guard
from ...base.imports import ImportHook, loaded_modules
from ...base.patch import Change, Patch, apply, leave_no_frame, undo


class ProgramSteps:
    """Notifies listeners of the end of each step that the program marks.

    Attributes:
        listeners: called at the end of each step. Without any, a profile calls `end_step` only at steps in its
            schedule, so the other steps cost nothing.
        profile_started: whether the program started a profile of its own.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.profile_started = False
        self._profiles: weakref.WeakSet[Any] = weakref.WeakSet()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at the end of each step, until `remove`."""
        self.listeners.append(listener)
        for profile in list(self._profiles):
            profile.report_steps()

    def remove(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``, which may have been removed already."""
        self.listeners = [other for other in self.listeners if other != listener]

    def follow(self, profile: Any) -> None:
        """Add ``profile`` as a source of steps; `listen` calls its ``report_steps()``."""
        self.profile_started = True
        self._profiles.add(profile)

    def end_step(self) -> None:
        """Notify the listeners that a step of the program ended.

        Raises:
            SyncError: from a detector at level "error".
        """
        for listener in self.listeners:
            with guard.contained("following the steps of the program"):  # a SyncError passes
                listener()


program_steps = ProgramSteps()


FEATURE = "following the function whose calls are steps"
_running_numbers: ContextVar[tuple[int, ...]] = ContextVar("inside", default=())
"""In this thread or task: the numbers of the `FunctionCallSteps` whose functions are running, each once."""
_numbers = itertools.count()  # instead of one ContextVar each: those are never freed
SIGNS = ("forward", "grad", "backward", "optimizer", "program")
"""Events that may end a step, from the weakest sign of one to the strongest."""


def check_step_on(step_on: str | None) -> str | None:
    """Return ``step_on`` with the absolute path of a file in it.

    Raises:
        ValueError: it is not "optimizer", "backward", "grad", "forward" or a function as `FunctionCallSteps` takes
            it, or it names a file that does not exist.
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
    """Return the module or file in ``name``, and the function.

    Raises:
        ValueError: ``name`` is not ``module:qualname`` or ``file.py:function``.
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
    """Calls ``on_called()`` after each call of a function that returns, from `follow` to `remove`.

    A function of a module is replaced once the module is imported. A function of the script itself does not exist
    yet when the program begins: `search` finds it, and is called at events that every training step has.

    Attributes:
        found: whether the function was found.
    """

    def __init__(self, name: str, on_called: Callable[[], None]) -> None:
        self._place, self._function = parse_function(name)
        self._on_called = on_called
        self._patches: list[Change] = []
        self._removed = False
        self.found = False
        self._number = next(_numbers)
        self.found_while_running = False  # found during a call, whose end is not seen
        self.is_file = self._place.endswith(".py")

    def follow(self) -> None:
        """Start counting; after an interrupt at any point, `remove` undoes it."""
        if not self.is_file:
            apply([ImportHook(self._place, self._on_import)], self._patches)

    @property
    def is_running(self) -> bool:
        """Whether a call of the function is running in this thread or task."""
        return self._number in _running_numbers.get()

    def remove(self) -> None:
        """Stop counting, and restore the function."""
        self._removed = True
        undo(self._patches)

    def _stay_removed(self) -> None:
        """Undo the patches if a signal handler or another thread has called `remove` meanwhile."""
        if self._removed:
            undo(self._patches)

    @guard.contained(FEATURE)
    def search(self) -> None:
        """Search for the function in the script and, if a file is named, in the modules loaded from that file."""
        if not self.found and not self._removed:
            for module in self._modules():
                self._on_import(module)

    def _modules(self) -> Iterator[ModuleType]:
        main = sys.modules.get("__main__")
        if not self.is_file:
            spec = getattr(main, "__spec__", None)
            if main is not None and spec is not None and spec.name == self._place:
                yield main
            return
        wanted = os.path.realpath(self._place)
        name = Path(wanted).name
        for _, module, names in loaded_modules():
            file = names.get("__file__")
            if isinstance(file, str) and file.endswith(name) and os.path.realpath(file) == wanted:
                yield module

    @guard.contained(FEATURE)
    def _on_import(self, module: ModuleType) -> None:
        owner: Any = module
        *outer, name = self._function.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        function = inspect.getattr_static(owner, name, None)
        unbound = getattr(function, "__func__", function)  # the function of a static method or class method
        if self.found or self._removed or not callable(unbound):
            return
        kind = type(function) if unbound is not function else None

        def make(_: Any) -> Any:
            return kind(self._make_wrapper(unbound)) if kind else self._make_wrapper(unbound)

        self.found = True
        try:
            apply([Patch(owner, name, make)], self._patches)
        except BaseException:
            self.found = False
            undo(self._patches)
            raise
        self._stay_removed()
        code = getattr(inspect.unwrap(unbound), "__code__", None)
        if any(frame.f_code is code for frame, _ in traceback.walk_stack(sys._getframe())):
            self.found_while_running = True

    def _make_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._call():
                    return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        @functools.wraps(original)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._call():
                    return await original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call_async if inspect.iscoroutinefunction(original) else call

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Note that the function runs in the body, and count the call unless the body fails."""
        if self.found_while_running:  # the call during which it was found: that one has ended
            self.found_while_running = False
            self._end_call()
        before = _running_numbers.get()
        try:
            _running_numbers.set(before if self._number in before else (*before, self._number))
            yield
        finally:
            _running_numbers.set(before)
        self._end_call()

    @guard.contained(FEATURE)
    def _end_call(self) -> None:
        if not self._removed:
            self._on_called()
