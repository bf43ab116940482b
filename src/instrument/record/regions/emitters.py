"""Emitters: the interface, the choice of those that are active, that of JAX, and the path of open regions."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...base import log
from ...base.compat import tools
from ...base.config import NVTX_START_END, settings
from ...base.guard import guard
from ...base.interrupts import is_interrupt
from .region import Region


class Emitter(Protocol):
    """Shows regions in one profiler.

    `push`/`pop` nest on one thread; `start`/`end` may overlap and may end on another thread.
    """

    name: str

    def push(self, region: Region, /) -> Any:
        """Open a nested range and return the argument of `pop`."""

    def pop(self, handle: Any, /) -> None:
        """Close the range."""

    def start(self, region: Region, /) -> Any:
        """Open a range that others may overlap and return the argument of `end`."""

    def end(self, handle: Any, /) -> None:
        """Close the range."""

    def mark(self, region: Region, /) -> None:
        """Show an instant."""


def _of_tool(kind: str) -> Emitter:
    from . import tool_emitters

    made: Emitter = getattr(tool_emitters, kind)()
    return made


_FACTORIES: Mapping[str, Callable[[], Emitter]] = {
    "nvtx": lambda: _of_tool("NvtxStartEndEmitter" if os.environ.get(NVTX_START_END) else "NvtxEmitter"),
    "roctx": lambda: _of_tool("RoctxEmitter"),
    "itt": lambda: _of_tool("IttEmitter"),
    "jax": lambda: JaxEmitter(),
}

_IS_ATTACHED: Mapping[str, Callable[[], bool]] = {
    "nvtx": lambda: tools.nvtx_injected() or tools.nsight_compute(),
    "roctx": tools.rocprof,
    "itt": tools.vtune,
}


def names_from_settings() -> list[str]:
    """Return the names of the emitters to attach: those that `configure` named, or whose tool is present."""
    if settings.emitters != "auto":
        return [name for name in settings.emitters if name in _FACTORIES]
    return [name for name, is_attached in _IS_ATTACHED.items() if is_attached()]


def attached(before: Sequence[Emitter], failed: set[str]) -> list[Emitter]:
    """Return an emitter for each profiler that this process runs under.

    Args:
        before: those attached so far, which are kept.
        failed: the names of those that are not tried again; those that fail here are added.
    """
    by_name = {emitter.name: emitter for emitter in before}
    emitters = []
    for name in names_from_settings():
        if name in failed:
            continue
        try:
            emitters.append(by_name.get(name) or _FACTORIES[name]())
        except Exception as error:
            if is_interrupt(error):
                raise
            failed.add(name)
            if isinstance(error, ImportError):
                log.warning(f"regions will not show in the attached profiler: {error}", emitter=name)
            else:
                guard.failed(f"emitter {name}", error)
    return emitters


def redundant(names: Sequence[str], target: str) -> set[str]:
    """Return the emitters out of ``names`` that would show each range a second time.

    Args:
        names: the emitters that listen.
        target: the kind of range that the running torch profiler emits (`compat.profilers.profiler_patches`);
            under ``emit_nvtx`` and ``emit_itt`` a tool may already receive ranges of that kind.
    """
    twins = {"NVTX": ("nvtx", "roctx"), "ITT": ("itt",)}.get(target, ())  # ROCm's emit_nvtx calls rocTX
    drop = {"torch"} & set(names) if any(twin in names for twin in twins) else set()
    if "torch" in names and os.environ.get("TORCH_PROFILER_EMIT_ROCTX", "0") not in ("", "0"):
        drop.add("roctx")
    return drop


class JaxEmitter:
    """Opens `jax.profiler.TraceAnnotation`; made only if the program itself imported jax."""

    name = "jax"

    def __init__(self) -> None:
        if "jax" not in sys.modules:
            raise ImportError("jax is not imported: import jax before the emitter is used")
        import jax.profiler

        self._annotation = jax.profiler.TraceAnnotation

    def push(self, region: Region) -> Any:
        """Open an annotation."""
        annotation = self._annotation(region.name)
        annotation.__enter__()
        return annotation

    def pop(self, annotation: Any) -> None:
        """Close it."""
        annotation.__exit__(None, None, None)

    start = push
    end = pop

    def mark(self, region: Region) -> None:
        """Show an instant as an annotation of zero length."""
        self.pop(self.push(region))


_Opened = tuple[list[Region], Region]


class RegionPath:
    """An emitter that only keeps names of open regions; `dispatch.active.add` activates it."""

    name = "path"

    def __init__(self, on_push: Callable[[tuple[str, ...]], None] | None = None) -> None:
        self._on_push = on_push  # called with the open regions when one opens
        self._thread_state = threading.local()

    def names(self) -> tuple[str, ...]:
        """Return the regions open on this thread, outermost first."""
        return tuple(region.name for region in getattr(self._thread_state, "open", ()))

    def push(self, region: Region) -> _Opened:
        """Note that ``region`` opened on this thread."""
        try:
            opened = self._thread_state.open
        except AttributeError:
            opened = self._thread_state.open = []
        opened.append(region)
        if self._on_push is not None:
            self._on_push(self.names())
        return opened, region

    def pop(self, token: _Opened) -> None:
        """Note that the region closed, on whichever thread it was opened."""
        opened, region = token
        for index in range(len(opened) - 1, -1, -1):  # suspended code may close out of order
            if opened[index] is region:
                del opened[index]
                return

    start = push
    end = pop

    def mark(self, region: Region) -> Any:
        """Do nothing: an instant is never open."""
