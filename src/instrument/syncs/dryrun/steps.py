"""Counts the synchronizations of a dry run by step, finds from frames where steps end, stops the program."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch

from ...base.early_stop import ProgramStopper
from ...base.guard import guard
from ...base.patch import Patch, leave_no_frame
from ...explain.waits.events import SyncEvent
from ...explain.waits.sites import SKIPPED, code_owner, in_torch
from ...record.modules import parts
from ...record.stepping.optimizer_steps import running
from ..budget import Budget
from ..listener import LiveRecorder

Position = Literal["same iteration", "same call", "next iteration", "after the loop"]
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_NEVER_CONTINUES = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN_", "RAISE_", "RERAISE")
_AWAIT = "JUMP_BACKWARD_NO_INTERRUPT"  # the loop inside an ``await``


class Frame(NamedTuple):
    """What a frame of the program executes: the number of an instruction of its code."""

    code: CodeType
    last: int

    @property
    def at(self) -> int:
        """The offset of the instruction; `last` may be that of a cache entry behind it."""
        offsets = _flow(self.code)[0]
        return offsets[bisect(offsets, self.last) - 1]


Place = tuple[Frame, ...]


def place_of(frame: FrameType | None, outermost: CodeType) -> Place:
    """Return the frames of the program inside ``outermost``, outermost first, without those of torch."""
    frames = []
    while frame is not None and frame.f_code is not outermost:
        file = frame.f_code.co_filename
        if code_owner(file) != SKIPPED and not in_torch(file):
            frames.append(Frame(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(frames))


class StepPlace:
    """The place of an update, and the loop whose iterations are the steps.

    That loop is the innermost one with both the update and the backward pass before it: several optimizers may
    step in a loop inside it, and several passes may run in one. If it is in a generator, what the caller does with
    an item belongs to the iteration that yields it.

    Args:
        update: where the update was made.
        begin: where a backward pass of the same step began; empty if there was none.
    """

    def __init__(self, update: Place, begin: Place) -> None:
        self._update = update
        self._loop: frozenset[int] = frozenset()  # its instructions
        self._depth = 0  # of the frame with the loop
        self._yields = False
        begin = begin if _depth_shared(update, begin) >= 0 else update
        for depth in range(_depth_shared(update, begin), -1, -1):
            for loop in _flow(update[depth].code)[1]:
                if update[depth].at in loop and begin[depth].at in loop:
                    self._loop, self._depth = loop, depth
                    self._yields = not _yields(update[depth].code).isdisjoint(loop)
                    return

    @property
    def has_loop_around(self) -> bool:
        """Whether the loop whose iterations are the steps runs inside another one."""
        if not self._loop:
            return False
        *outer, own = self._update[: self._depth + 1]
        callers = [] if self._yields else outer  # the loop of a generator's caller runs along with it
        return any(own.at in loop and self._loop < loop for loop in _flow(own.code)[1]) or any(
            frame.at in loop for frame in callers for loop in _flow(frame.code)[1]
        )

    def position(self, now: Place) -> Position:
        """Return where the program is, relative to the update; without a loop, nothing is in its iteration."""
        here: Position = "same iteration" if self._loop else "same call"
        for depth, (before, after) in enumerate(zip(self._update, now, strict=False)):
            first, second, same = before.at, after.at, before.code is after.code
            if self._loop and depth < self._depth:
                if same and first == second:
                    continue
                if not (same and self._yields and _in_one_loop(before, after)):
                    return "after the loop"
                return here if second > first else "next iteration"
            if not same:
                return "same call"
            if self._loop and depth == self._depth and second not in self._loop:
                return "after the loop"
            inner = [loop for loop in _flow(before.code)[1] if first in loop and second in loop]
            if inner and not (depth == self._depth and inner[0] == self._loop):
                return here
            if first != second:
                return here if second > first else "next iteration"
        return "after the loop" if self._loop and len(now) <= self._depth else "same call"


def _depth_shared(one: Place, other: Place) -> int:
    """Return the depth of the innermost frame that is in the same call in both places; -1 if there is none."""
    for depth, (first, second) in enumerate(zip(one, other, strict=False)):
        if first.code is not second.code:
            return depth - 1
        if first.at != second.at:
            return depth
    return min(len(one), len(other)) - 1


def _in_one_loop(one: Frame, other: Frame) -> bool:
    return any(one.at in loop and other.at in loop for loop in _flow(one.code)[1])


@lru_cache(maxsize=1024)
def _yields(code: CodeType) -> frozenset[int]:
    """Return the offsets at which a generator yields."""
    yields = (each.offset for each in dis.get_instructions(code) if each.opname == "YIELD_VALUE")
    return frozenset(yields) if code.co_flags & inspect.CO_GENERATOR else frozenset()


@lru_cache(maxsize=1024)
def _flow(code: CodeType) -> tuple[list[int], list[frozenset[int]]]:
    """Return the offsets of the instructions, and those in each loop, the smallest loop first.

    A loop is all that leads to its jump back without passing where that jumps to. A range of offsets is not
    enough: Python moves exception handlers to the end of the code, from where they jump back.
    """
    instructions = list(dis.get_instructions(code))
    before: dict[int, list[int]] = {each.offset: [] for each in instructions}
    ends: dict[int, list[int]] = {}
    for each, following in pairwise(instructions):
        if not each.opname.startswith(_NEVER_CONTINUES):
            before[following.offset].append(each.offset)
    for each in instructions:
        if each.opcode in _JUMPS and each.opname != _AWAIT:
            before[each.argval].append(each.offset)
            if each.argval <= each.offset:
                ends.setdefault(each.argval, []).append(each.offset)
    loops: dict[int, frozenset[int]] = {}
    for start, pending in ends.items():
        body = {start, *pending}
        while pending:
            for offset in before[pending.pop()]:
                if offset not in body:
                    body.add(offset)
                    pending.append(offset)
        loops[start] = frozenset(body)
    whiles = {each.offset for each in instructions if each.offset in loops and each.opname != "FOR_ITER"}
    parts = {start for start in whiles if _is_part_of_while(start, loops, code, before)}
    kept = [loop for start, loop in loops.items() if start not in parts]
    return sorted(before), sorted(kept, key=len)


def _is_part_of_while(
    start: int,
    loops: Mapping[int, frozenset[int]],
    code: CodeType,
    before: Mapping[int, Sequence[int]],
) -> bool:
    """Return whether a loop is a ``while`` without the branches that end in ``continue``.

    Python has the test of a ``while`` twice: ``continue`` jumps to the first one, and the end of the body runs the
    second one, which jumps back behind the first.
    """
    loop = loops[start]
    lines = {offset: line for first, end, line in code.co_lines() for offset in range(first, end, 2)}
    in_loop = {lines.get(offset) for offset in loop}
    for other, whole in loops.items():
        test = {offset for offset in whole if other <= offset < start}
        if other < start and loop < whole and {lines.get(offset) for offset in test} <= in_loop:
            rest = whole - loop - test
            if not any(set(before[offset]) & test for offset in rest):  # its end leads out of the whole loop
                return True
    return False


FEATURE = "finding the ends of steps"


class StepRecorder(LiveRecorder):
    """Counts each synchronization in its step, and ends the program after `max_steps`.

    Code after an update, such as logging or the update of another model, belongs to the step of that update until
    the iteration of the loop ends. Without a loop around the update, or if the program calls what makes the update
    again, the step ends with the next call of a module with trainable parameters, or the next backward pass.

    Args:
        path: as in `LiveRecorder`.
        budget: is told where each step ends.
        outermost: the code of the function that calls the program.

    Attributes:
        updates: the number of steps so far; the last of them may not have ended.
        max_steps: the number of steps after which the program ends; None means no limit.
        stopper: ends the program.
        in_unwanted_step: whether the program is in a step beyond `max_steps`.
        in_step: whether the step of the last update has not ended.
        step: the number of the step, from 1 on; 0 before the first update, None before an optimizer is made.
    """

    def __init__(self, path: Callable[[], tuple[str, ...]], budget: Budget, outermost: CodeType) -> None:
        super().__init__(path)
        self.updates = 0
        self.max_steps: int | None = None
        self.stopper = ProgramStopper()
        self.in_step = False
        self._budget = budget
        self._outermost = outermost
        self._thread = 0  # of the last update
        self._begin: Place = ()  # of the last backward pass
        self._marked = False  # whether the program says where steps end
        self._update = StepPlace((), ())
        self.in_unwanted_step = False

    def patches(self) -> Iterator[Patch]:
        """Return what must be patched."""
        yield parts.wrap_backward(self._begin_pass)
        yield Patch(torch.nn.Module, "__call__", self._make_call)

    def on_update(self, marked: bool) -> None:
        """Note the update of a step; with ``marked`` the program itself says that the step ends here."""
        if self._limit_reached:
            self._stop()
        self._end_step()
        self.updates += 1
        self.step = self.updates
        self._thread, self._marked, self.in_step = get_ident(), marked, True
        self._update = StepPlace(place_of(sys._getframe(1), self._outermost), self._begin)

    def restart(self, step: int | None) -> None:
        """Begin at step 0 again, or before the first one."""
        self.updates, self.step, self.in_step = 0, step, False

    def make_event(self, op: str, cause: str, frame: FrameType | None, **more: Any) -> SyncEvent:
        """As in `LiveRecorder`."""
        self.look(frame)
        return super().make_event(op, cause, frame, **more)

    def add(self, event: SyncEvent) -> None:
        """Count ``event``, unless it belongs to a step beyond the limit."""
        if not self.in_unwanted_step:
            super().add(event)

    @property
    def _limit_reached(self) -> bool:
        return self.max_steps is not None and self.updates >= self.max_steps

    @guard.contained(FEATURE)
    def look(self, frame: FrameType | None, *, begins: bool = False) -> None:
        """End the step of the last update if the program has left it.

        With ``begins``, a forward or backward pass begins now.
        """
        if not self.in_step or (get_ident() != self._thread and running(self._thread)):
            return
        position = self._update.position(place_of(frame, self._outermost))
        if not self._marked and (position == "same iteration" or (position == "same call" and not begins)):
            return
        self._end_step()
        self.in_unwanted_step = self._limit_reached and position != "after the loop"

    def _end_step(self) -> None:
        if self.in_step:
            self.in_step, self.step = False, self.updates + 1
            self._budget.next_step()

    def _stop(self) -> None:
        steps = f"{self.max_steps} step{'s' * ((self.max_steps or 0) > 1)}"
        around = "; the rest of the loop around theirs was not checked" * self._update.has_loop_around
        self.stopper.stop(f"stopped after {steps}, the limit of --steps{around}")

    def _begin_pass(self) -> None:
        frame = sys._getframe(1)
        self._begins(frame)
        self._begin = place_of(frame, self._outermost)

    def _begins(self, frame: FrameType) -> None:
        """Note that a forward or backward pass begins, which ends the program if the step is beyond the limit."""
        self.look(frame, begins=True)
        if self._limit_reached and not self.in_step:
            self._stop()

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                if (self.in_step or self._limit_reached) and any(
                    parameter.requires_grad for parameter in module.parameters()
                ):
                    self._begins(sys._getframe(1))
                return original(module, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call
