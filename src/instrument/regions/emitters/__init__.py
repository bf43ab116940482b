"""Emitters: each turns a region into one profiler's call. Which of them listen is decided here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ... import log
from ...compat import nvtx_injected
from ...config import settings
from ...guard import guard
from ..region import Region


class Emitter(Protocol):
    """One profiler's way to show a region.

    `push`/`pop` nest on one thread; `start`/`end` may overlap and may end on another thread.
    """

    name: str

    def push(self, region: Region, /) -> Any:
        """Open a nested range and return what `pop` needs."""

    def pop(self, handle: Any, /) -> None:
        """Close the range."""

    def start(self, region: Region, /) -> Any:
        """Open a range that others may overlap and return what `end` needs."""

    def end(self, handle: Any, /) -> None:
        """Close the range."""

    def mark(self, region: Region, /) -> None:
        """Show an instant."""


def _nvtx() -> Emitter:
    from .nvtx import NvtxEmitter

    return NvtxEmitter()


def _roctx() -> Emitter:
    from .roctx import RoctxEmitter

    return RoctxEmitter()


def _itt() -> Emitter:
    from .itt import IttEmitter

    return IttEmitter()


def _jax() -> Emitter:
    from .jax import JaxEmitter

    return JaxEmitter()


_FACTORIES: Mapping[str, Callable[[], Emitter]] = {"nvtx": _nvtx, "roctx": _roctx, "itt": _itt, "jax": _jax}

# Set by the tool in the environment of the process it starts.
_ATTACHED_BY = {
    "nvtx": ("NV_TPS_LAUNCH_TOKEN", "NV_COMPUTE_PROFILER_PERFWORKS_DIR"),
    "roctx": ("ROCP_TOOL_LIBRARIES", "ROCPROF_OUTPUT_PATH"),
    "itt": ("INTEL_LIBITTNOTIFY64",),
}


def wanted() -> list[str]:
    """Return the names of the emitters to attach: those whose tool is there, or those `configure` named."""
    if settings.emitters != "auto":
        return [name for name in settings.emitters if name in _FACTORIES]
    return [
        name
        for name, variables in _ATTACHED_BY.items()
        if any(os.environ.get(variable) for variable in variables) or (name == "nvtx" and nvtx_injected())
    ]


def attached() -> list[Emitter]:
    """Return an emitter for each profiler that this process runs under."""
    emitters = []
    for name in wanted():
        try:
            emitters.append(_FACTORIES[name]())
        except ImportError as error:
            log.warning(f"regions will not show in the attached profiler: {error}", emitter=name)
        except Exception as error:
            guard.failed(f"emitter {name}", error)
    return emitters


def redundant(names: Sequence[str], target: str) -> set[str]:
    """Return the emitters out of ``names`` that would show each range a second time.

    Args:
        names: the emitters that listen.
        target: what the running torch profiler turns its ranges into (`compat.profiler_target`); under
            ``emit_nvtx`` and ``emit_itt`` that is a tool which may be listening already.
    """
    drop = {"torch"} & set(names) if target.lower() in names else set()
    if "torch" in names and os.environ.get("TORCH_PROFILER_EMIT_ROCTX", "0") not in ("", "0"):
        drop.add("roctx")
    return drop
