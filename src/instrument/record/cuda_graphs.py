"""Follows captures of CUDA graphs, in which nothing runs or may synchronize, replays, `make_graphed_callables`."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, get_ident
from typing import Any

from ..base.compat import compiler, gpu
from ..base.guard import guard
from ..base.interrupts import Suppressed
from ..base.patch import Patch, apply, leave_no_frame, then, undo

FEATURE = "following CUDA graphs"
_CAPTURE_WAIT_S = 10  # for the capture of another thread
_KINDS = (("cuda", "CUDAGraph"), ("xpu", "XPUGraph"), ("accelerator", "Graph"))  # in torch
_METHODS = ("capture_begin", "capture_end", "replay")


class _Capture:
    """A capture in progress.

    Attributes:
        stream: the capturing stream; None until torch has begun.
        ended: set when the capture has ended.
        deferred: the calls to make when the capture has ended.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = weakref.ref(graph)
        self.thread = get_ident()
        self.stream: Any = None
        self.ended = Event()
        self.deferred: list[Callable[[], None]] = []

    @property
    def graph(self) -> Any:
        """The graph of the capture; None once the graph is gone, which ends the capture."""
        return self._graph()

    @property
    def stale(self) -> bool:
        """Whether the capture ended without a patched call of `capture_end`.

        Only its own thread queries its stream, which need not be the current one.
        """
        if self.graph is None:
            return True
        if self.thread != get_ident() or self.stream is None:
            return False
        with Suppressed(Exception):
            return not gpu.stream_capturing(self.stream)
        return False  # the query failed: assume that it runs, as stopping a profiler would break a capture


class CudaGraphs:
    """Tracks captures of CUDA graphs, except those that began before the first `GraphFollower`.

    Attributes:
        captures: the captures in progress.
    """

    def __init__(self) -> None:
        self._followers: list[GraphFollower] = []
        self.captures: list[_Capture] = []
        self._patches: list[Patch] = []

    def add(self, follower: GraphFollower) -> None:
        """Notify ``follower`` of captures and replays from now on."""
        self._followers = [*self._followers, follower]
        try:
            if not self._patches:
                for kind in _kinds():
                    patches = (
                        Patch(kind, "capture_begin", self._make_capture_begin),
                        Patch(kind, "capture_end", self._make_capture_end),
                        Patch(kind, "replay", lambda original: then(original, self._on_replay)),
                    )
                    apply(patches, self._patches)
        except BaseException:
            self.remove(follower)
            raise

    def remove(self, follower: GraphFollower) -> None:
        """Stop notifying ``follower``; the last one restores the patched methods once no capture runs."""
        self._followers = [other for other in self._followers if other is not follower]
        self._stop()

    def _stop(self) -> None:
        if not self._followers and all(capture.stale for capture in tuple(self.captures)):
            self.captures.clear()
            undo(self._patches)

    @property
    def capturing(self) -> bool:
        """Whether any thread captures: starting or stopping a profiler, or synchronizing, would end that."""
        if gpu.in_use() is None:  # as in a forked child
            return False
        return any(not capture.stale for capture in tuple(self.captures)) or gpu.current_stream_capturing()

    @property
    def graph(self) -> Any:
        """The graph that this thread captures into, or None."""
        if not self.captures or not gpu.current_stream_capturing():
            return None
        captures = tuple(self.captures)
        mine = [capture for capture in captures if capture.thread == get_ident()]
        chosen = mine or captures
        return chosen[-1].graph if chosen else None  # autograd threads capture for the thread that called backward

    def end_stale_captures(self) -> None:
        """Run the calls deferred by `stale` captures of this thread."""
        if not self.captures:
            return
        for capture in tuple(self.captures):
            if capture.thread == get_ident() and capture.stale:
                self._end(capture)
        self._stop()

    def postpone(self, call: Callable[[], None]) -> bool:
        """Run ``call`` when the capture of this thread ends, if there is one.

        Returns:
            False if this thread does not capture. Captures of other threads have ended, or the wait timed out.
        """
        # After the timeout the profiler stops during the capture: more waiting could record until the program
        # ends. That is harmless, as Kineto does not synchronize when it stops, and torch's own synchronization,
        # which would end the capture, is skipped while `capturing`.
        self.end_stale_captures()
        for capture in tuple(self.captures):
            if capture.graph is None:
                continue
            if capture.thread == get_ident():
                capture.deferred.append(call)
                return True
            capture.ended.wait(_CAPTURE_WAIT_S)
        return False

    def _make_capture_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            capture = self._add_capture(graph)
            try:
                result = original(graph, *args, **kwargs)
            except BaseException as error:
                self._drop(capture)
                leave_no_frame(error)
                raise
            self._notify_followers(graph, capture)
            return result

        return capture_begin

    def _make_capture_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._end_captures(graph)

        return capture_end

    @guard.contained(FEATURE)
    def _on_replay(self, graph: Any, *_: Any, **__: Any) -> None:
        for follower in self._followers:
            follower.on_replay(graph)

    @guard.contained(FEATURE)
    def _add_capture(self, graph: Any) -> _Capture | None:
        for capture in tuple(self.captures):
            if capture.graph is None:
                self._drop(capture)
        if not self._followers:
            return None
        begun = _Capture(graph)
        self.captures.append(begun)
        return begun

    @guard.contained(FEATURE)
    def _notify_followers(self, graph: Any, capture: _Capture | None) -> None:
        for follower in self._followers:
            follower.on_capture_begin(graph)
        if capture is not None:
            capture.stream = gpu.current_stream()

    @guard.contained(FEATURE)
    def _end_captures(self, graph: Any) -> None:
        for capture in tuple(self.captures):
            if capture.graph is graph:
                self._end(capture)
        self._stop()

    def _end(self, capture: _Capture) -> None:
        self._drop(capture)
        for call in capture.deferred:
            call()

    def _drop(self, capture: _Capture | None) -> None:
        if capture is not None:
            with suppress(ValueError):  # another thread dropped it
                self.captures.remove(capture)
            capture.ended.set()


class GraphFollower:
    """Defers calls made during the capture of a CUDA graph until after each replay, from `follow` to `remove`.

    Args:
        on_unknown: called with each replayed graph whose capture began before `follow`.
    """

    def __init__(self, on_unknown: Callable[[Any], None] | None = None) -> None:
        self._on_unknown = on_unknown
        # By identity of the graph: the deferred calls, and the weak reference that removes the entry.
        self._calls: dict[int, tuple[list[Callable[[], None]], weakref.ref[Any]]] = {}

    def follow(self) -> None:
        """Begin to follow; `remove` undoes it wherever an interrupt comes."""
        cuda_graphs.add(self)

    def remove(self) -> None:
        """Stop following, and drop the deferred calls of all graphs."""
        self._calls.clear()
        cuda_graphs.remove(self)

    def defer(self, call: Callable[..., None], *args: Any) -> bool:
        """Defer the call to the replays of the graph that this thread captures; return False if there is none."""
        graph = cuda_graphs.graph
        if graph is None:
            return False
        if id(graph) not in self._calls:
            self.on_capture_begin(graph)
        self._calls[id(graph)][0].append(functools.partial(call, *args))
        return True

    def on_capture_begin(self, graph: Any) -> None:
        """Start an empty list of deferred calls, as a capture into ``graph`` begins."""
        # As in `IdentitySet`: a method of dict, for which the reference is the default.
        self._calls[id(graph)] = [], weakref.ref(graph, functools.partial(self._calls.pop, id(graph)))

    def on_replay(self, graph: Any) -> None:
        """Make the deferred calls of ``graph``, which was replayed."""
        deferred = self._calls.get(id(graph))
        if deferred is not None:
            for call in deferred[0]:
                call()
        elif self._on_unknown is not None:
            self._on_unknown(graph)


def _kinds() -> Iterator[Any]:
    """Yield torch's graph classes."""
    torch = sys.modules.get("torch")
    for place, name in _KINDS:
        kind = getattr(getattr(torch, place, None), name, None)
        if all(hasattr(kind, method) for method in _METHODS):
            yield kind


cuda_graphs = CudaGraphs()


class _ThreadState(threading.local):
    """Whether the thread is inside `make_graphed_callables`."""

    making = False


class GraphedCallables:
    """Tracks from `follow` to `remove` whether a thread is inside `make_graphed_callables`.

    Its warm-up calls are not steps. Code that got the function before `follow` is not tracked.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()
        self._patches: list[Patch] = []

    def follow(self) -> None:
        """Start tracking."""
        apply((Patch(owner, name, self._make_wrapper) for owner, name in compiler.graph_makers()), self._patches)

    @property
    def active(self) -> bool:
        """Whether this thread is inside `make_graphed_callables`."""
        return self._thread.making

    def remove(self) -> None:
        """Stop tracking, and restore the functions."""
        undo(self._patches)

    def _make_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            before = self._thread.making
            try:
                self._thread.making = True
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._thread.making = before

        return make_graphed_callables
