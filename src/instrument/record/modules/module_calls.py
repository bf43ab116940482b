"""The calls of annotated modules: the layer of each, the calls open on each thread, and their backward."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import Any

from ...base.compat import autograd
from ...base.guard import guard
from ..regions import dispatch
from ..regions.region import Region

Shapes = tuple[tuple[int, ...], ...]
_MAX_SHAPES = 256  # shapes that a layer keeps a region for


@dataclass(eq=False, repr=False, slots=True)
class Layer:
    """One place of a module in a model, with the regions of its calls.

    Attributes:
        region: the region of its forward; None if it only serves to tell calls inside it apart.
        evaluation: the region of its forward in evaluation mode.
        backward: the region of its backward; None if there is none.
        standalone: the layer for calls outside any other call; its name differs from those of others of its class.
        parent: the layer that calls it, as far as the model's structure shows.
        primary: the first layer of its module, which the module's hooks refer to.
        aliases: for a primary layer, all layers of a module with several places; else empty.
        was_called: whether it was called since it was made.
    """

    name: str
    region: Region | None
    evaluation: Region | None
    backward: Region | None
    parent: Layer | None
    standalone: Layer | None = None
    primary: Layer = field(init=False)
    aliases: list[Layer] = field(default_factory=list)
    was_called: bool = False
    _regions_with_shapes: dict[tuple[str, Shapes], Region] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.primary = self

    def region_with_shapes(self, region: Region, shapes: Shapes) -> Region:
        """Return ``region`` with the shapes of its inputs; NVTX shows the first shape as the payload."""
        shown = self._regions_with_shapes.get((region.name, shapes))
        if shown is None:
            if len(self._regions_with_shapes) >= _MAX_SHAPES:
                self._regions_with_shapes.clear()
            shown = Region(region.name, region.color, region.domain, region.category, shapes[0], shapes)
            self._regions_with_shapes[region.name, shapes] = shown
        return shown


class CallStack(list[Any]):
    """The calls that are open on one thread, outermost first.

    Attributes:
        on_idle: called once when the hook of the outermost call closes it; dropped if an interrupt prevents that.
    """

    __slots__ = ("__weakref__", "on_idle", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.on_idle: Callable[[], None] | None = None

    def drop_ended(self) -> Any:
        """Close the calls that ended without their hook, as after a KeyboardInterrupt, on their own thread.

        Returns:
            The innermost call that still runs, or None.
        """
        running = _frames(sys._getframe(1)) if self else set()  # its own would be a cycle of references
        while self and self[-1].frame not in running:
            self.close()
            if not self:
                self.on_idle = None
        return self[-1] if self else None

    def close(self) -> None:
        """Close the innermost call."""
        call = self.pop()
        call.frame = None  # it refers to the arguments
        dispatch.leave(call.token)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack = CallStack()
        _stacks.append(weakref.ref(self.stack, _stacks.remove))


_stacks: list[weakref.ref[CallStack]] = []
thread_state = _ThreadState()


def call_when_idle(callback: Callable[[], None]) -> None:
    """Call ``callback`` once no module call is open on this thread: now, or when the outermost one is closed."""
    if thread_state.stack.drop_ended() is None:
        thread_state.stack.on_idle = None  # an interrupt came just before the callback was called
        callback()
    else:
        thread_state.stack.on_idle = callback


def running_layers() -> set[Layer]:
    """Return the primary layers of the calls that run on any thread."""
    thread_state.stack.drop_ended()
    frames = sys._current_frames()
    try:
        stacks = [stack for ref in _stacks.copy() if (stack := ref())]  # other threads may start or end
        return set().union(*(_layers_of(stack, frames.get(stack.thread)) for stack in stacks))
    finally:
        frames.clear()  # it has this function's frame: until a garbage collection, that would keep all its callers


def _layers_of(stack: CallStack, frame: FrameType | None) -> set[Layer]:
    running = _frames(frame)
    return {call.layer.primary for call in list(stack) if call.frame in running}


def _frames(frame: FrameType | None) -> set[FrameType]:
    """Return ``frame`` and the frames that called it."""
    frames = set()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    return frames


def _zero(*_: object) -> int:
    return 0


# If torch lacks these functions, no call seems to make a node and there are no backward regions.
next_number, _current_pass_number, _call_at_pass_end = autograd.autograd_functions() or (_zero, _zero, _zero)


class ModuleCall:
    """One forward of a layer; also the hook that runs before the autograd nodes of its outputs in backward.

    The autograd graph keeps it alive, so it holds no tensor.

    Attributes:
        layer: the layer that was called.
        outer_call: the call around it.
        frame: the frame of torch's ``_call_impl``, until it returns.
        first: the number of the first autograd node that it may have made.
        token: closes its region.
        backward_token: closes the region of its backward.
        inner_starts: the numbers of the nodes at which the backward of calls inside begins.
        last_inner_start: the last of these numbers, or -1.
        first_inner_node: the number of the first node of the first call inside, or -1.
        exits: the earlier nodes of this call to which that node leads.
        adjoins_other_call: whether the backward of another call begins at the node before the first one.
        running: the backward pass in which its region is open.
    """

    __slots__ = (
        "adjoins_other_call", "backward_token", "exits", "first", "first_inner_node", "frame", "inner_starts",
        "last_inner_start", "layer", "outer_call", "running",
        "token",
    )  # fmt: skip

    def __init__(
        self,
        layer: Layer,
        outer_call: ModuleCall | None,
        frame: FrameType | None,
        first: int,
        token: dispatch.Token,
    ) -> None:
        self.layer = layer
        self.outer_call = outer_call
        self.frame = frame
        self.first = first
        self.token = token
        self.backward_token = token
        self.inner_starts: set[int] | None = None
        self.last_inner_start = -1
        self.first_inner_node = -1
        self.exits: Sequence[Any] = ()
        self.running: BackwardPass | None = None
        if outer_call is None:
            self.adjoins_other_call = False
        elif outer_call.first == first:
            self.adjoins_other_call = outer_call.adjoins_other_call
        else:
            self.adjoins_other_call = outer_call.last_inner_start == first - 1

    def __call__(self, gradients: object) -> None:
        """Open the region of the backward, unless the backward of a call inside opened it."""
        try:
            if dispatch.tracing() or not dispatch.recording:
                return
            outer_call = self.outer_call
            running = outer_call.running if outer_call is not None else None
            if running is None or running.thread != get_ident():
                running = current_pass() or begin_pass()
            opened, first = running.opened, self.first
            while opened and opened[-1].first > first:
                running.close()  # its nodes were all made after those that run now
            if self.running is None:
                running.open(self)
        except Exception as error:
            guard.failed("opening a backward region", error)


class BackwardPass:
    """One thread's part of a backward pass: the open regions, innermost last."""

    __slots__ = ("hooks", "opened", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.opened: list[ModuleCall] = []
        self.hooks: list[Any] = []  # to be removed at the end

    def open(self, call: ModuleCall) -> None:
        """Open the region of ``call``, after the regions around it that are not open yet."""
        outer_call, region = call.outer_call, call.layer.backward
        # A call whose forward still runs contains this backward: its forward region is open around it.
        if outer_call is not None and outer_call.running is None and outer_call.frame is None:
            self.open(outer_call)
        if region is None:
            return
        emitter = dispatch.current
        try:
            call.backward_token = emitter.end, emitter.start(region)
        except Exception as error:
            call.backward_token = dispatch.drop_failed(emitter, error)
        call.running = self
        self.opened.append(call)

    def close(self) -> ModuleCall:
        """Close the innermost region."""
        call = self.opened.pop()
        call.running = None
        dispatch.leave(call.backward_token)
        return call

    def end(self, call: ModuleCall) -> None:
        """Close the open region of ``call``, the regions inside it, and the regions around it that end with it."""
        while self.close() is not call:
            pass
        outer_call = call.outer_call
        if (
            outer_call is not None
            and outer_call.running is self
            and outer_call.first_inner_node == outer_call.first == call.first
        ):
            self.end(outer_call)

    def end_all(self) -> None:
        """Close all regions, whether the pass ran to its end or failed."""
        if thread_state.stack:
            thread_state.stack.drop_ended()  # calls of a recomputation that an interrupt cut off
        while self.opened:
            self.close()
        while self.hooks:
            self.hooks.pop().remove()


class PassEndCallback:
    """Called by the autograd engine at the end of a pass; if the pass fails, the engine drops it."""

    __slots__ = ("_key",)

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key

    @guard.contained("ending a backward pass")
    def __call__(self) -> None:
        """End the pass."""
        running = _passes.pop(self._key, None)
        if running is not None:
            running.end_all()

    __del__ = __call__


_passes: dict[tuple[int, int], BackwardPass] = {}  # by the number of the pass and the thread


def current_pass() -> BackwardPass | None:
    """Return this thread's part of the current backward pass; None if it has none."""
    return _passes.get((_current_pass_number(), get_ident()))


def begin_pass() -> BackwardPass:
    """Begin this thread's part of the current backward pass."""
    key, running = (_current_pass_number(), get_ident()), BackwardPass()
    _call_at_pass_end(PassEndCallback(key))  # first: without it the regions would stay open
    _passes[key] = running
    return running
