"""What of ours stands for the call of one module: torch calls it where it would call what `module.compile()` made.

Nobody sees it who asks whether there are hooks: some refuse a module with hooks, others run it in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

CALL = "_compiled_call_impl"  # what torch calls in place of a module's own call


class StandIn:
    """Stands for the call of a module, or for ``compiled``; it is no part of a copy or a pickle of the module."""

    __slots__ = ("compiled",)

    def __init__(self, compiled: Callable[..., Any] | None) -> None:
        self.compiled = compiled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def called_module(frame: FrameType | None) -> Any:
    """Return the module that is called, from the frame that calls what stands for it.

    It need not be the one that this was put on: a replica of that shares it, and calls itself.
    """
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back  # of another one that stands for the call
    return frame.f_locals["self"] if frame is not None else None


def compiled_call(module: Any) -> Any:
    """Return what `module.compile()` made; None where that was not called, whatever of ours stands there."""
    call = vars(module).get(CALL)
    while isinstance(call, StandIn):
        call = call.compiled
    return call
