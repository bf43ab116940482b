"""A call of a layer, and the backward passes in which the nodes run that it made."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from types import FrameType
from typing import Any

from .. import compat
from ..guard import guard
from ..regions import dispatch
from .layer import Layer
from .stack import here


def _nothing(*_: object) -> int:
    return 0


# Without these functions of torch no call ever seems to make a node, and there are no backward regions.
next_number, _current_pass, _at_the_end = compat.autograd_functions() or (_nothing, _nothing, _nothing)


class Call:
    """One forward of a layer, and what is called before the nodes of its outputs run in a backward.

    The autograd graph keeps it, so it holds no tensor.

    Attributes:
        layer: where it was called.
        around: the call around it.
        frame: of torch's own ``_call_impl``, until it returned.
        first: the number of the first autograd node that it may have made.
        token: what closes its region.
        back: what closes the region of its backward.
        heads: the numbers of nodes at which the backward of calls inside begins.
        head: the last of them, or -1.
        inner: the first number of the first such call, or -1.
        exits: nodes made before that one, but in this call, that it leads to.
        joined: whether the node before its first is one at which the backward of another call begins.
        running: the backward pass in which its region is open.
    """

    __slots__ = (
        "around", "back", "exits", "first", "frame", "head", "heads", "inner", "joined", "layer", "running",
        "token",
    )  # fmt: skip

    def __init__(
        self, layer: Layer, around: Call | None, frame: FrameType | None, first: int, token: dispatch.Token
    ) -> None:
        self.layer = layer
        self.around = around
        self.frame = frame
        self.first = first
        self.token = token
        self.back = token
        self.heads: set[int] | None = None
        self.head = -1
        self.inner = -1
        self.exits: Sequence[Any] = ()
        self.running: Pass | None = None
        if around is None:
            self.joined = False
        elif around.first == first:
            self.joined = around.joined
        else:
            self.joined = around.head == first - 1

    def __call__(self, gradients: object) -> None:
        """The backward of this call begins, if it did not with that of a call inside: open its region."""
        try:
            if dispatch.tracing() or not dispatch.recording:
                return
            around = self.around
            running = around.running if around is not None else None
            if running is None or running.thread != get_ident():
                running = current() or join()
            opened, first = running.opened, self.first
            while opened and opened[-1].first > first:
                running.close()  # all its nodes were made after those that run now
            if self.running is None:
                running.open(self)
        except Exception as error:
            try:
                guard.failed("opening a backward region", error)
            except Exception as raised:
                if raised is error:
                    raise


class Pass:
    """A thread's part in a backward pass: the regions that are open, innermost last."""

    __slots__ = ("hooks", "opened", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.opened: list[Call] = []
        self.hooks: list[Any] = []  # to be removed at the end

    def open(self, call: Call) -> None:
        """Open the region of ``call``, after those around it that are not open yet."""
        around, region = call.around, call.layer.backward
        # A call whose forward still runs, and holds this backward, is around it as it is.
        if around is not None and around.running is None and around.frame is None:
            self.open(around)
        if region is None:
            return
        emitter = dispatch.current
        try:
            call.back = emitter.end, emitter.start(region)
        except Exception as error:
            call.back = dispatch.failed(emitter, error)
        call.running = self
        self.opened.append(call)

    def close(self) -> Call:
        """Close the innermost region."""
        call = self.opened.pop()
        call.running = None
        dispatch.leave(call.back)
        return call

    def end(self, call: Call) -> None:
        """Close the region of ``call``, which is open, what is open inside, and what ends with it."""
        while self.close() is not call:
            pass
        around = call.around
        if around is not None and around.running is self and around.inner == around.first == call.first:
            self.end(around)

    def over(self) -> None:
        """Close what is open, whether the pass ran to its end or failed."""
        if here.stack:
            here.stack.shed()  # what an interrupt left of a recomputation is inside
        while self.opened:
            self.close()
        while self.hooks:
            self.hooks.pop().remove()


class Finish:
    """Called by the engine at the end of a pass, and dropped by it also when the pass fails."""

    __slots__ = ("_key",)

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key

    @guard.contained("ending a backward pass")
    def __call__(self) -> None:
        """End the pass."""
        running = _passes.pop(self._key, None)
        if running is not None:
            running.over()

    __del__ = __call__


_passes: dict[tuple[int, int], Pass] = {}  # by the number of the pass and the thread


def current() -> Pass | None:
    """Return this thread's part in the backward pass that runs now, if it has one."""
    return _passes.get((_current_pass(), get_ident()))


def join() -> Pass:
    """Begin this thread's part in the backward pass that runs now."""
    key, running = (_current_pass(), get_ident()), Pass()
    _at_the_end(Finish(key))  # first: a pass that nobody ends would keep its regions open
    _passes[key] = running
    return running
