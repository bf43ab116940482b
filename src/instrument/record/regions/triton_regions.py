"""Triton: a region around each launch of a kernel, and Proton, its profiler, as one that regions go to."""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...base.config import EMITTERS, settings
from ...base.guard import guard
from ...base.patch import Patch, apply, leave_no_frame, undo
from .emitters import Emitter
from .region import Region, make

LAUNCHES = "the regions of Triton's kernels"
SESSIONS = "following Proton"
CATEGORY = "triton"
CHANGES = ("start", "activate", "activate_all", "deactivate", "deactivate_all", "finalize", "finalize_all")
"""The functions of Proton's library by which sessions begin and end."""
Token = Any


class LaunchRegions:
    """Opens a region around each launch of a Triton kernel while a profiler shows regions on a timeline.

    It covers ``kernel[grid](...)``, of a jitted function and of a compiled kernel. Kernels that Inductor launches
    reach neither method: torch shows these itself. Triton's own launch hooks are left alone. While one is there,
    Inductor makes slower launchers for the kernels that it compiles, which stay; and where a launch fails, the
    hook for its end is not called.

    Args:
        enter: opens a region in some emitters.
        leave: closes it, given what ``enter`` returned.
    """

    def __init__(
        self, enter: Callable[[Sequence[Emitter], Region], Token], leave: Callable[[Token], None]
    ) -> None:
        self._enter, self._leave = enter, leave
        self._compiler: Any = None  # Triton's module, once it is imported
        self._shown: list[Emitter] = []
        self._patches: list[Patch] = []

    @guard.contained(LAUNCHES)
    def follow(self, compiler: Any) -> None:
        """Show the launches of Triton from now on, whose module ``triton.compiler.compiler`` this is."""
        self._compiler = compiler
        self._refresh()

    def show_in(self, emitters: Sequence[Emitter]) -> None:
        """Show launches in those of ``emitters`` that have a timeline; Proton shows kernels itself."""
        self._shown = [emitter for emitter in emitters if emitter.name in EMITTERS and emitter.name != "proton"]
        self._refresh()

    def _refresh(self) -> None:
        if not self._shown:
            undo(self._patches)
        elif self._compiler is not None and not self._patches:
            apply(self._launch_patches(), self._patches)

    def _launch_patches(self) -> Iterator[Patch]:
        jit: Any = sys.modules.get("triton.runtime.jit")
        if hasattr(jit, "JITFunction") and hasattr(self._compiler, "CompiledKernel"):
            yield Patch(jit.JITFunction, "run", self._around_run)
            yield Patch(self._compiler.CompiledKernel, "__getitem__", self._around_binding)

    def _around_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return self._around_launch(run, lambda function, *_: str(function.__name__))

    def _around_binding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def bind(kernel: Any, grid: Any) -> Any:
            return self._around_launch(original(kernel, grid), lambda *_: str(kernel.name))

        return bind

    def _around_launch(self, launch: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(launch)
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("warmup") or not (shown := self._shown):
                return launch(*args, **kwargs)
            token = self._enter(shown, make(name_of(*args), None, None, CATEGORY, None))
            try:
                return launch(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._leave(token)

        return run


class _Scopes(list[list[Any]]):
    """The open scopes of a thread, innermost last: each the number that Proton gave it, and its name."""

    def __init__(self) -> None:
        self.ended: deque[list[Any]] = deque()  # those that another thread ended


class ProtonEmitter:
    """Opens scopes in the active sessions of Proton, until one of them begins or ends.

    Proton closes the scopes of a thread innermost first, and raises for another order. Where a region ends before
    one inside it, the inner scope is closed and opened again.
    """

    name = "proton"

    def __init__(self, library: Any) -> None:
        self._library = library
        self._thread_state = threading.local()
        self._is_over = False

    def _scopes(self) -> _Scopes:
        scopes: _Scopes | None = getattr(self._thread_state, "scopes", None)
        if scopes is None:
            scopes = self._thread_state.scopes = _Scopes()
        while scopes.ended:
            self._close(scopes, scopes.ended.popleft())
        return scopes

    def _open(self, scopes: _Scopes, scope: list[Any]) -> None:
        scope[0] = self._library.record_scope()
        self._library.enter_scope(*scope)
        scopes.append(scope)

    def _close(self, scopes: _Scopes, scope: list[Any]) -> None:
        inner = []
        while scope in scopes:
            inner.append(scopes.pop())
            self._library.exit_scope(*inner[-1])
        for other in reversed(inner[:-1]):
            self._open(scopes, other)

    def push(self, region: Region) -> tuple[_Scopes, list[Any]]:
        """Open a scope."""
        scopes, scope = self._scopes(), [0, region.name]
        self._open(scopes, scope)
        return scopes, scope

    def pop(self, handle: tuple[_Scopes, list[Any]]) -> None:
        """Close the scope; one of another thread once that opens or closes the next one."""
        scopes, scope = handle
        if not self._is_over:
            scopes.ended.append(scope)
            self._scopes()

    start = push
    end = pop

    def mark(self, region: Region) -> None:
        """Do nothing: Proton adds up times, and has no instants."""

    def finish(self) -> None:
        """Close the open scopes of this thread; those of others end with their session."""
        self._is_over = True
        scopes = self._scopes()
        while scopes:
            self._library.exit_scope(*scopes.pop())


class ProtonSessions:
    """Follows which sessions of Proton are active, and has regions go to them.

    A region goes to the sessions that were active when it began. It ends there when one of them begins or ends.

    Args:
        add: adds an emitter to those that regions go to.
        remove: removes it.
    """

    def __init__(self, add: Callable[[Emitter], None], remove: Callable[[Emitter], None]) -> None:
        self._add, self._remove = add, remove
        self._library: Any = None
        self._all: set[int | None] = set()
        self._active: set[int | None] = set()
        self._emitter: ProtonEmitter | None = None
        self._patches: list[Patch] = []  # stay until the process ends: they call the original

    @guard.contained(SESSIONS)
    def follow(self, profile: Any) -> None:
        """Follow the sessions from now on; ``profile`` is Proton's module ``triton.profiler.profile``."""
        self._library = getattr(profile, "libproton", None)
        if all(hasattr(self._library, name) for name in (*CHANGES, "record_scope", "enter_scope", "exit_scope")):
            around = ((name, functools.partial(self._around, name)) for name in CHANGES)
            apply((Patch(self._library, name, make) for name, make in around), self._patches)
            if profile.flags.profiling_on:
                self._note("start", None)  # sessions that began before, which are not told apart
                self._begin()

    def _note(self, change: str, session: int | None) -> None:
        verb, _, every = change.partition("_")
        changed = set(self._all) if every else {session}
        if verb in ("start", "activate"):
            self._all |= changed
            self._active |= changed
        else:
            self._active -= changed
        if verb == "finalize":
            self._all -= changed

    def _around(self, change: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._finish()
            try:
                result = original(*args, **kwargs)
                self._note(change, result if change == "start" else args[0] if args else None)
                return result
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._begin()

        return call

    @guard.contained(SESSIONS)
    def _begin(self) -> None:
        if self._active and (settings.emitters == "auto" or "proton" in settings.emitters):
            self._emitter = ProtonEmitter(self._library)
            self._add(self._emitter)

    @guard.contained(SESSIONS)
    def _finish(self) -> None:
        emitter, self._emitter = self._emitter, None
        if emitter is not None:
            self._remove(emitter)
            emitter.finish()
