"""A call that waits, from the moment it begins: who, where, what for."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from .. import compat, gpu
from ..findings import Direction
from . import instruction, operations, policy, sites
from .events import SyncEvent
from .recorder import SyncListener

CAUSES = {"stream": operations.STREAM, "event": operations.EVENT, "device": operations.DEVICE}
# The modules in which a profiler synchronizes for itself, where a recording begins or ends
_PROFILERS = ("torch.autograd.profiler", "torch.profiler.", gpu.__name__)
Copy = Callable[[], tuple[Direction | None, int | None]]


class Caller(NamedTuple):
    """The thread that waits in a backward pass, whose nodes run on threads of their own."""

    thread: int
    frame: FrameType
    context: contextvars.Context
    regions: dict[int, tuple[str, ...]]  # by the id of the listener


@dataclass(eq=False)
class SyncCall:
    """One call that waits, once or more."""

    events: list[tuple[SyncListener, SyncEvent]]
    thread: int  # to which a complaint is due
    where: tuple[int, int]  # frame and instruction
    since_ns: int
    blocked_ns: int | None = None


@dataclass(eq=False)
class Scope:
    """A wrapped call that runs on a thread.

    Attributes:
        whole: it is a wait in itself, whatever waits inside.
        gather: all waits inside are one.
        copy: tells where a copy goes, and how large it is.
        wait: the one that was gathered.
    """

    whole: bool = False
    gather: bool = False
    copy: Copy | None = None
    wait: SyncCall | None = None


def begun(
    listeners: tuple[SyncListener, ...],
    what: str,
    frame: FrameType | None,
    caller: Caller | None,
    copy: Copy | None = None,
    op: str | None = None,
    cause: str = "",
) -> SyncCall:
    """Return a wait that this thread begins now, with an event for each listener.

    Args:
        listeners: those to tell.
        what: is waited for: "stream", "event" or "device".
        frame: the innermost one; None where there is no Python.
        caller: who called the backward pass that this is in.
        copy: tells where a copy goes.
        op: what is called, where that is known already; so is the ``cause``.
        cause: why it waits.
    """
    here = sites.locate(frame)
    if here.site is None and caller is not None:
        frame = caller.frame
    stands = here.frame or sites.locate(frame).frame
    op = op or (instruction.describe(stands).op if stands is not None else None) or "synchronize"
    direction, size = copy() if copy is not None else (None, None)
    if direction is None:
        direction = operations.direction_of(op)
    events = []
    for listener in listeners:
        note = listener.recorder.note
        more: dict[str, Any] = {"direction": direction, "bytes": size}
        arguments = (op, cause or CAUSES[what], frame)
        context = context_of(caller)
        event = note(*arguments, **more) if context is None else context.run(note, *arguments, **more)
        if caller is not None:
            event.region = event.region or caller.regions.get(id(listener), ())
            event.via = here.via if here.site is None and here.via is not None else event.via
        events.append((listener, event))
    due = threading.get_ident() if caller is None else caller.thread
    return SyncCall(events, due, (0, 0), time.perf_counter_ns())


def context_of(caller: Caller | None) -> contextvars.Context | None:
    """Return a copy of the caller's, where nothing is allowed or forbidden on this thread itself."""
    if caller is None or policy.allow_reason() is not None or policy.syncs_forbidden():
        return None
    return caller.context.copy()


def is_profiler_frame(frame: FrameType | None) -> bool:
    """Tell whether ``frame`` is of torch's profiler or of this library, whose synchronizations are no findings."""
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_PROFILERS)


def returns_to_python(frame: FrameType | None) -> bool:
    """Tell whether the call that waits hands warnings to Python when it returns.

    Nodes of autograd that are not Python hand them to the end of the backward pass, operators called through
    `torch.ops` to nobody.
    """
    if frame is None:
        return False
    inner = frame.f_code.co_filename.replace("\\", "/")
    if inner.endswith("torch/_ops.py"):
        return False
    return not (inner.endswith("torch/autograd/graph.py") and compat.autograd_node() is not None)
