"""`SyncCall`: a call that synchronizes, from the moment it begins, with an event for each listener."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

from .. import gpu_wait
from ..compat import autograd
from ..findings import Direction
from . import instruction, operations, policy, sites
from .events import SyncEvent
from .listener import SyncListener

CAUSES: dict[Target, str] = {"stream": operations.STREAM, "event": operations.EVENT, "device": operations.DEVICE}
# Modules in which a profiler itself synchronizes, at the beginning and the end of a recording
_PROFILERS = ("torch.autograd.profiler", "torch.profiler.", gpu_wait.__name__)
Copy = Callable[[], tuple[Direction | None, int | None]]  # returns direction and bytes
Target = Literal["stream", "event", "device"]


class Caller(NamedTuple):
    """The thread that called a backward pass, whose nodes run on threads of autograd."""

    thread: int
    frame: FrameType
    context: contextvars.Context
    regions: dict[int, tuple[str, ...]]  # by id of the listener


@dataclass(eq=False)
class SyncCall:
    """One call that synchronizes, once or several times."""

    events: list[tuple[SyncListener, SyncEvent]]
    thread: int  # on which a warning or an error is raised
    position: tuple[int, int]  # id of the frame, and instruction
    since_ns: int
    blocked_ns: int | None = None


@dataclass(eq=False)
class Scope:
    """A wrapped call that runs on a thread.

    Attributes:
        synchronizes: the call counts as one synchronization; those inside it do not count.
        counts_once: all synchronizations inside the call count as one.
        copy: returns direction and bytes of the copy.
        call: the synchronization of a call that counts once.
    """

    synchronizes: bool = False
    counts_once: bool = False
    copy: Copy | None = None
    call: SyncCall | None = None


def begin_call(
    listeners: tuple[SyncListener, ...],
    target: Target,
    frame: FrameType | None,
    caller: Caller | None,
    copy: Copy | None = None,
    op: str | None = None,
    cause: str = "",
) -> SyncCall:
    """Return a synchronization that begins on this thread now, with an event for each listener.

    Args:
        listeners: the listeners to notify.
        target: what the CPU waits for.
        frame: the innermost Python frame; None if there is none.
        caller: the caller of the backward pass that runs here.
        copy: returns direction and bytes of the copy.
        op: the operation, if it is known; else the instruction of the user's line names it.
        cause: why it synchronizes; by default it follows from ``target``.
    """
    place = sites.locate(frame)
    if place.site is None and caller is not None:
        frame = caller.frame
    innermost = place.frame or sites.locate(frame).frame
    op = op or (instruction.describe(innermost).op if innermost is not None else None) or "synchronize"
    direction, size = copy() if copy is not None else (None, None)
    if direction is None:
        direction = operations.direction_of(op)
    events = []
    for listener in listeners:
        make_event = listener.recorder.make_event
        more: dict[str, Any] = {"direction": direction, "bytes": size}
        arguments = (op, cause or CAUSES[target], frame)
        context = context_of(caller)
        event = make_event(*arguments, **more) if context is None else context.run(make_event, *arguments, **more)
        if caller is not None:
            event.region = event.region or caller.regions.get(id(listener), ())
            event.via = place.via if place.site is None and place.via is not None else event.via
        events.append((listener, event))
    thread = threading.get_ident() if caller is None else caller.thread
    return SyncCall(events, thread, (0, 0), time.perf_counter_ns())


def context_of(caller: Caller | None) -> contextvars.Context | None:
    """Return a copy of the caller's context, or None if this thread itself allows or forbids synchronizations."""
    if caller is None or policy.allow_reason() is not None or policy.syncs_forbidden():
        return None
    return caller.context.copy()


def is_profiler_frame(frame: FrameType | None) -> bool:
    """Return whether ``frame`` belongs to a profiler, whose own synchronizations are not reported."""
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_PROFILERS)


def returns_to_python(frame: FrameType | None) -> bool:
    """Return whether torch raises the warnings of the call in ``frame`` when the call returns.

    For autograd nodes written in C++ torch raises them at the end of the backward pass, and for operators called
    through `torch.ops` never.
    """
    if frame is None:
        return False
    inner = frame.f_code.co_filename.replace("\\", "/")
    if inner.endswith("torch/_ops.py"):
        return False
    return not (inner.endswith("torch/autograd/graph.py") and autograd.autograd_node() is not None)
