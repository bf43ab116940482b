"""`SyncCall`: a call that synchronizes, named after the instruction it runs, with an event for each listener."""

from __future__ import annotations

import contextvars
import dis
import linecache
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from ..base.compat import autograd
from ..base.findings import Direction
from ..explain.waits import operations, sites
from ..explain.waits.events import SyncEvent
from ..record import gpu_wait
from . import policy
from .listener import SyncListener

# Operations of instructions that are not calls, by the beginnings of their names across Python versions
_INSTRUCTIONS = (
    (("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL", "JUMP_BACKWARD_IF"), "bool"),
    (("BINARY_SUBSCR", "BINARY_SLICE"), "getitem"),
    (("STORE_SUBSCR", "STORE_SLICE"), "setitem"),
    (("DELETE_SUBSCR",), "delitem"),
    (("FORMAT_", "CONVERT_VALUE", "BUILD_STRING"), "format"),
    (("CONTAINS_OP",), "contains"),
    (("GET_ITER", "FOR_ITER", "UNPACK_", "LIST_EXTEND", "SET_UPDATE"), "iter"),
    (("UNARY_NEGATIVE",), "neg"),
    (("UNARY_INVERT",), "invert"),
)
_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift", "[]": "getitem",
    "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
}  # fmt: skip
_SPELLING = {
    "subtract": "sub", "multiply": "mul", "true_divide": "truediv", "floor_divide": "floordiv", "modulo": "mod",
    "power": "pow", "matrix_multiply": "matmul",
}  # fmt: skip
_POSITIONS = sys.version_info >= (3, 11)


def operation_at(frame: FrameType) -> str | None:
    """Return the operation that ``frame`` carries out now ("item", "bool", "getitem"); None if it is not known."""
    return _operation_at(frame.f_code, frame.f_lasti, frame.f_lineno or 0)


@lru_cache(maxsize=4096)
def _operation_at(code: CodeType, last: int, line: int) -> str | None:
    """Return the operation of an instruction, cached: disassembling a long function takes 1 ms."""
    instructions = list(dis.get_instructions(code))
    # Cache entries that follow an instruction belong to it.
    now = max((each for each in instructions if each.offset <= last), key=lambda each: each.offset, default=None)
    if now is None:
        return None
    source = linecache.getline(code.co_filename, line).strip()
    text = _segment(code.co_filename, now) or source
    name = now.opname
    if name.startswith(("CALL", "PRECALL")) and not name.startswith("CALL_INTRINSIC"):
        certain, called = _callee(instructions, now) if _POSITIONS else (False, None)
        return _name_of(called if certain else callee_in(text))
    if name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        return _name_of(now.argval)
    if name.startswith(("BINARY_OP", "COMPARE_OP")):
        return _operator(now.argrepr, text)
    for beginnings, op in _INSTRUCTIONS:
        if name.startswith(beginnings):
            return op
    if name.startswith(("BINARY_", "INPLACE_")):  # Python 3.10 has one instruction for each operator
        operator = name.split("_", 1)[1].lower()
        return _SPELLING.get(operator, operator)
    return None


def _operator(shown: str, text: str) -> str | None:
    sign = shown.removeprefix("bool(").removesuffix(")")
    if sign == "%" and text.startswith(('"', "'", 'f"', "f'")):
        return "format"
    return _OPERATORS.get(sign) or _OPERATORS.get(sign.removesuffix("="))


def _name_of(name: object) -> str | None:
    if isinstance(name, tuple):
        name = name[0]
    if not isinstance(name, str):
        return None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return operations.name_of_call(name)


def _callee(instructions: list[dis.Instruction], call: dis.Instruction) -> tuple[bool, object]:
    """Return whether the callee of a call was found, and its name, None if it has none.

    The callee begins where the call does, and ends before its brackets. Code that torch.compile made has no
    positions, so nothing is found there.
    """
    span = getattr(call, "positions", None)
    if span is None or span.col_offset is None:
        return False, None
    start, end = (span.lineno, span.col_offset), (span.end_lineno, span.end_col_offset)
    best, name = (0, 0), None
    for each in instructions:
        at = getattr(each, "positions", None)
        if at is None or at.col_offset is None or (at.lineno, at.col_offset) != start:
            continue
        if each.opname == "LOAD_CONST":  # names of arguments, from Python 3.13 on
            continue
        until = (at.end_lineno or 0, at.end_col_offset or 0)
        if best < until < end or (until == best and each.opname.startswith("LOAD_")):
            best = until
            name = each.argval if each.opname.startswith("LOAD_") else None
    return best > (0, 0), name


def callee_in(line: str) -> str | None:
    """Return the name of the call on ``line`` that most likely synchronizes; None if the text does not show it."""
    names = re.findall(r"(\w+)\s*\(", line)
    typical = [name for name in names if name in operations.TYPICAL_CALLS]
    return typical[-1] if typical else names[0] if len(set(names)) == 1 else None


def _segment(filename: str, instruction: dis.Instruction) -> str:
    """Return the source of ``instruction`` on one line; columns count bytes."""
    at = getattr(instruction, "positions", None)
    if at is None or None in (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset):
        return ""
    lines = [linecache.getline(filename, number).encode() for number in range(at.lineno, at.end_lineno + 1)]
    lines[-1] = lines[-1][: at.end_col_offset]
    lines[0] = lines[0][at.col_offset :]
    return " ".join(b"".join(lines).decode(errors="replace").split())


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
    op = op or (operation_at(innermost) if innermost is not None else None) or "synchronize"
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
