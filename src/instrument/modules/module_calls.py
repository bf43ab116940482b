"""The calls of annotated modules: which place of a model each belongs to, which are open, and their backward."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import Any

from .. import compat
from ..guard import guard
from ..regions import dispatch
from ..regions.region import Region

Shapes = tuple[tuple[int, ...], ...]
KEPT = 256  # shapes that a layer keeps a region for


class Layer:
    """What a module is called at one place in a model.

    Attributes:
        region: of its forward; None where only the calls of others need to know of its own.
        evaluation: of its forward while the module is in evaluation mode.
        backward: of its backward, None where there is none.
        alone: what stands for it where no call is around: it has a name that tells it from others of its class.
        parent: the layer it is called from, as far as the model's structure tells.
        owner: the first of the layers of its module, the one that the module's hooks know.
        twins: for an owner, all layers of a module that has several places; empty otherwise.
        seen: whether it was called since it was made.
    """

    __slots__ = (
        "_shaped",
        "alone",
        "backward",
        "evaluation",
        "name",
        "owner",
        "parent",
        "region",
        "seen",
        "twins",
    )

    def __init__(
        self,
        name: str,
        region: Region | None,
        evaluation: Region | None,
        backward: Region | None,
        parent: Layer | None,
    ) -> None:
        self.name = name
        self.region = region
        self.evaluation = evaluation
        self.backward = backward
        self.parent = parent
        self.alone: Layer | None = None
        self.owner = self
        self.twins: list[Layer] = []
        self.seen = False
        self._shaped: dict[tuple[str, Shapes], Region] = {}

    def shaped(self, region: Region, shapes: Shapes) -> Region:
        """Return ``region`` with the shapes of its inputs; NVTX shows those of the first as the payload."""
        known = self._shaped.get((region.name, shapes))
        if known is None:
            if len(self._shaped) >= KEPT:
                self._shaped.clear()
            known = Region(region.name, region.color, region.domain, region.category, shapes[0], shapes)
            self._shaped[region.name, shapes] = known
        return known


class Stack(list[Any]):
    """The calls (`Call`) that are open on one thread, outermost first.

    Attributes:
        then: called once when the outermost one is closed by its hook; dropped where an interrupt prevents that.
    """

    __slots__ = ("__weakref__", "then", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.then: Callable[[], None] | None = None

    def shed(self) -> Any:
        """Close the calls that are over, on their own thread, and return the innermost one that is not.

        Hooks do not hear of a KeyboardInterrupt.
        """
        running = _frames(sys._getframe()) if self else set()
        while self and self[-1].frame not in running:
            self.close()
            if not self:
                self.then = None
        return self[-1] if self else None

    def close(self) -> None:
        """Close the innermost call."""
        call = self.pop()
        call.frame = None  # it refers to the arguments
        dispatch.leave(call.token)


class _Here(threading.local):
    def __init__(self) -> None:
        self.stack = Stack()
        _stacks.append(weakref.ref(self.stack, _stacks.remove))


_stacks: list[weakref.ref[Stack]] = []
here = _Here()


def when_closed(call: Callable[[], None]) -> None:
    """Call ``call()`` once no call is open on this thread: now, or when the outermost one is closed."""
    if here.stack.shed() is None:
        here.stack.then = None  # an interrupt came just before its call
        call()
    else:
        here.stack.then = call


def busy() -> set[Layer]:
    """Return the owners of the calls that run, on whichever thread."""
    here.stack.shed()
    frames = sys._current_frames()
    found = set()
    for ref in _stacks.copy():  # other threads begin and end
        stack = ref()
        if stack:
            running = _frames(frames.get(stack.thread))
            found |= {call.layer.owner for call in list(stack) if call.frame in running}
    return found


def _frames(frame: FrameType | None) -> set[FrameType]:
    """Return ``frame`` and those below it."""
    found = set()
    while frame is not None:
        found.add(frame)
        frame = frame.f_back
    return found


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
