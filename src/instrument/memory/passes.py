"""The passes of a step that the events of a snapshot belong to: forward, backward, optimizer."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..trace_marks import STEP_PREFIX
from ..traces.table import Array, Table
from .stacks import BACKWARD, CLOSURE, MODULE, OPTIMIZER, PYTHON, StackFacts

FORWARD_PASS, BACKWARD_PASS, OPTIMIZER_STEP = range(3)
PASS_NAMES = ("forward", "backward", "optimizer")
_UNKNOWN = -1
_SNAPSHOT = "snapshot"  # the event of an earlier snapshot, which never has a stack
_STEP_OF_PROFILER = re.compile(f"^{STEP_PREFIX}")
_STEP_OF_OPTIMIZER = re.compile(r"^Optimizer\.step#")


class Passes(NamedTuple):
    """The pass of each event; what is neither backward pass nor optimizer counts as forward.

    Attributes:
        kind: which of the three.
        number: counts up from one pass to the next on its GPU.
    """

    kind: Array
    number: Array


def passes_of(events: Table, annotations: Table, facts: StackFacts, stacks: Array) -> Passes:
    """Return the passes of the events of a `MemorySnapshot`, of which ``stacks`` says where each happened.

    An event without frames of Python, where others have some, is on a thread of autograd. An event of the program
    outside of modules begins no new pass.
    """
    kind, number = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    frees = np.array([name.startswith("free") for name in events.strings])[events.action]
    taken = np.array([name == _SNAPSHOT for name in events.strings])[events.action]
    for device in np.unique(events.device).tolist():
        own = np.flatnonzero(events.device == device)
        marks = facts.marks[stacks[own]]
        alike = frees[own], ~frees[own] & ~taken[own]
        kind[own] = found = _kinds(marks, alike, _in_optimizer(events.time_ns[own], annotations, device))
        begins = (found != FORWARD_PASS) | (marks & MODULE > 0)
        strong = _filled(np.where(begins, found, _UNKNOWN))
        number[own] = np.cumsum(np.append(0, np.diff(strong) != 0)) if len(own) else strong
    return Passes(kind, number)


def _kinds(marks: Array, alike: tuple[Array, Array], in_optimizer: Array) -> Array:
    """Return the kinds of the events of a device, of which those ``alike`` have stacks, or none has."""
    python = marks & PYTHON > 0
    if python.any():  # a closure, with its forward and backward pass, is within the step too
        in_optimizer = in_optimizer & python & (marks & (MODULE | BACKWARD | CLOSURE) == 0)
    # Without stacks only torch's marks tell where the step of an optimizer ends.
    by_marks = in_optimizer.any() and not python.any()
    kind = np.full(len(marks), FORWARD_PASS if by_marks else _UNKNOWN)
    for those in alike:  # the stacks of frees are perhaps not recorded
        if python[those].any():
            kind[those] = np.where(python[those], FORWARD_PASS, BACKWARD_PASS)
    kind[marks & BACKWARD > 0] = BACKWARD_PASS
    kind[(marks & OPTIMIZER > 0) | in_optimizer] = OPTIMIZER_STEP
    return _filled(kind)


def _filled(kind: Array) -> Array:
    """Replace each unknown kind by the one before it, and those before the first by the forward pass."""
    last = np.maximum.accumulate(np.where(kind != _UNKNOWN, np.arange(len(kind)), -1))
    return np.where(last >= 0, kind[last], FORWARD_PASS)


def _in_optimizer(time_ns: Array, annotations: Table, device: int) -> Array:
    """Return which times are within a step of an optimizer, as torch marks them."""
    own = annotations.where((annotations.device == device) & annotations.matching("name", _STEP_OF_OPTIMIZER))
    own = own.where(np.argsort(own.time_ns, kind="stable"))
    starts = np.array([name == "START" for name in own.strings])[own.stage]
    depth = np.append(0, np.cumsum(np.where(starts, 1, -1)))
    depth -= np.minimum.accumulate(np.minimum(depth, 0))  # the begin of the first step is perhaps not recorded
    inside: Array = depth[np.searchsorted(own.time_ns, time_ns, "right")] > 0
    return inside


class Steps(NamedTuple):
    """The steps of a GPU.

    Attributes:
        number: the step of each event of the snapshot, from 0; 0 for events of other GPUs.
        complete: how many steps ended in the recorded events.
    """

    number: Array
    complete: int


def steps_of(passes: Passes, events: Table, annotations: Table, device: int) -> Steps:
    """Return the steps of ``device``: those that a profiler marks, else those that end with an optimizer.

    An optimizer that allocates nothing, as SGD without momentum, is known from torch's marks alone, and so is one
    that allocates in its first step only, as fused ones do.
    """
    own = np.flatnonzero(events.device == device)
    by_optimizer = passes.kind[own] == OPTIMIZER_STEP
    ended = _ends(annotations, _STEP_OF_PROFILER)
    ends = np.diff(by_optimizer.astype(np.int64), append=0) < 0
    if not len(ended) and ends.sum() <= 1:
        marked = _ends(annotations.where(annotations.device == device), _STEP_OF_OPTIMIZER)
        ended = marked if len(marked) > ends.sum() else ended
    number = np.zeros(len(events), np.int64)
    if len(ended) and len(own) and (events.time_ns[own] >= 0).all():
        at = np.unique(np.searchsorted(events.time_ns[own], ended, "right"))
        number[own] = np.searchsorted(at, np.arange(len(own)), "right")
        return Steps(number, len(at))
    number[own] = np.cumsum(ends) - ends
    return Steps(number, int(number.max(initial=0)))


def _ends(annotations: Table, pattern: re.Pattern[str]) -> Array:
    """Return the times at which the ranges with these names end, in order."""
    ends = np.array([text == "END" for text in annotations.strings])[annotations.stage]
    times: Array = np.sort(annotations.time_ns[ends & annotations.matching("name", pattern)])
    return times
