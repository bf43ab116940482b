"""Tells from the frames of a program whether it is still in the iteration of its loop that made an update."""

from __future__ import annotations

import dis
import inspect
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Literal, NamedTuple

from ..syncs.sites import SKIPPED, code_owner, in_torch

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
    found = []
    while frame is not None and frame.f_code is not outermost:
        file = frame.f_code.co_filename
        if code_owner(file) != SKIPPED and not in_torch(file):
            found.append(Frame(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found))


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
