"""All that is heard of waits on a real GPU, as one: what opens a wait, what closes it, what is called around it.

torch tells before a wait (`GpuTrace`) and after the call that made it (`SyncWarning`); in between the thread was
blocked. What neither sees is wrapped (`explicit`). One set of sources serves all detectors.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator
from types import FrameType

from .. import compat
from ..guard import guard
from ..stepping import compiled_code
from . import wrappers
from .calls import Caller, Copy, Scope, SyncCall, begun, context_of, is_profiler_frame, returns_to_python
from .gpu_trace import GpuTrace
from .recorder import SyncListener
from .sync_warning import SyncWarning

FEATURE = "noting a wait"


class SyncMonitor:
    """Installed while there is any listener."""

    def __init__(self) -> None:
        self._listeners: tuple[SyncListener, ...] = ()
        self._lock = threading.RLock()
        self._waits: dict[int, SyncCall] = {}  # open ones, by thread; each thread touches its own
        self._scopes: dict[int, list[Scope]] = {}
        self._callers: list[Caller] = []
        self._trace = GpuTrace(self.opened)
        self._warning = SyncWarning(self.closed)
        self._installed = contextlib.ExitStack()
        self._kept = False  # away from the compiler

    @property
    def traced(self) -> bool:
        """Whether torch tells before waits."""
        return self._trace.active

    @property
    def error_mode(self) -> bool:
        """Whether the program has torch raise before waits."""
        return self._warning.error_mode

    def add(self, listener: SyncListener) -> None:
        """Tell ``listener`` of waits from now on."""
        with self._lock:
            first, self._listeners = not self._listeners, (*self._listeners, listener)
            try:
                if first:
                    self._install()
            except BaseException:
                self.remove(listener)
                raise
            if not self._listeners:  # removed meanwhile, by a signal handler
                self._remove()

    def remove(self, listener: SyncListener) -> None:
        """Tell it no more; the last one takes everything out."""
        with self._lock:
            if all(other is not listener for other in self._listeners):
                return
            self.flush()
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners:
                self._remove()

    def _install(self) -> None:
        if not self._kept:
            compiled_code.skip_package()
            self._kept = True
        with contextlib.ExitStack() as stack:  # a part that fails leaves none
            stack.callback(self._trace.remove)
            self._trace.install()
            stack.callback(self._warning.remove)
            self._warning.install()
            for patch in wrappers.patches(self):
                patch.apply_in(stack)
            self._installed = stack.pop_all()

    def _remove(self) -> None:
        installed, self._installed = self._installed, contextlib.ExitStack()
        with guard.contained("leaving the sources of waits"):
            installed.close()
        self._waits.clear()

    # Called by torch. Only `raise_pending` may raise into the call that waits.

    def opened(self, what: str, frame: FrameType | None) -> None:
        """A wait begins on this thread."""
        thread = threading.get_ident()
        scope = self._scope(thread)
        if not self._listeners or (scope is not None and scope.whole) or is_profiler_frame(frame):
            return
        with guard.contained(FEATURE):
            where = (id(frame), frame.f_lasti if frame is not None else -1)
            wait = self._waits.get(thread)
            if wait is not None and wait.where == where:
                return  # the same call waits again
            self._flush(thread)
            gather = scope if scope is not None and scope.gather else None
            wait = (gather.wait if gather is not None else None) or self._begin(what, frame, scope)
            wait.where = where
            if gather is not None:
                gather.wait = wait
            if what == "stream" and returns_to_python(frame) and self._warning.expected():
                self._waits[thread] = wait
                wait.since_ns = time.perf_counter_ns()
            elif gather is None:
                self._commit(wait)

    def closed(self, frame: FrameType | None) -> None:
        """The call that waited on this thread is over, or a backward pass that waited on another one."""
        thread = threading.get_ident()
        scope = self._scope(thread)
        if (scope is not None and scope.whole) or is_profiler_frame(frame):
            return
        with guard.contained(FEATURE):
            wait = self._waits.pop(thread, None)
            if wait is None and not self._trace.active:
                self._commit(self._begin("stream", frame, scope))
            elif wait is not None:
                wait.blocked_ns = (wait.blocked_ns or 0) + time.perf_counter_ns() - wait.since_ns
                if scope is None or scope.wait is not wait:
                    self._commit(wait)
        self.raise_pending(thread)

    def flush(self) -> None:
        """Count what is open on any thread, without a time: nobody told of its end."""
        for thread in list(self._waits):
            self._flush(thread)

    @guard.contained(FEATURE)
    def _flush(self, thread: int) -> None:
        wait = self._waits.pop(thread, None)
        scope = self._scope(thread)
        if wait is not None and (scope is None or scope.wait is not wait):
            self._commit(wait)

    def raise_pending(self, thread: int | None = None) -> None:
        """Have all listeners warn or raise; the first error is the one that is raised."""
        errors: list[Exception] = []
        for listener in reversed(self._listeners):
            try:
                listener.raise_pending(thread)
            except Exception as error:  # also a warning that the program's filters make one
                errors.append(error)
        if errors:
            raise errors[0]

    # What the wrappers call.

    @contextlib.contextmanager
    def synchronizing(self, op: str, cause: str, frame: FrameType, copy: Copy | None = None) -> Iterator[None]:
        """Run a call that waits as a whole; where it is not allowed, raise before."""
        thread = threading.get_ident()
        scope = self._scope(thread)
        if not self._listeners or (scope is not None and scope.whole):
            yield
            return
        if is_profiler_frame(frame):
            with self._within(Scope(whole=True)):
                yield
            return
        wait = None
        with guard.contained(FEATURE):
            self._flush(thread)
            wait = self._begin("device", frame, Scope(copy=copy), op, cause)
            self._check(wait)
        try:
            self.raise_pending(thread)
            if wait is not None:
                wait.since_ns = time.perf_counter_ns()
            with self._within(Scope(whole=True)):
                yield
            if wait is not None:
                wait.blocked_ns = time.perf_counter_ns() - wait.since_ns
        finally:
            if wait is not None:
                self._count(wait)

    @contextlib.contextmanager
    def counted_once(self) -> Iterator[None]:
        """Run a call all of whose waits are one."""
        thread = threading.get_ident()
        outer = self._scope(thread)
        if not self._listeners or (outer is not None and (outer.whole or outer.gather)):
            yield
            return
        self._flush(thread)
        scope = Scope(gather=True)
        try:
            with self._within(scope):
                yield
        finally:
            self._waits.pop(thread, None)
            if scope.wait is not None:
                self._commit(scope.wait)
        self.raise_pending(thread)

    @contextlib.contextmanager
    def copying(self, copy: Copy) -> Iterator[None]:
        """Run a call that may wait for a copy; ``copy`` is asked when it does."""
        outer = self._scope(threading.get_ident())
        if not self._listeners or outer is not None:
            yield
            return
        with self._within(Scope(copy=copy)):
            yield

    @contextlib.contextmanager
    def calling_backward(self, frame: FrameType) -> Iterator[None]:
        """Run a backward pass for ``frame``, whose nodes may wait on other threads."""
        caller = None
        with guard.contained(FEATURE):
            caller = self._calling(frame)
            self._callers.append(caller)
        try:
            yield
        finally:
            if caller in self._callers:
                self._callers.remove(caller)

    def _calling(self, frame: FrameType) -> Caller:
        """Return the caller of a backward pass that ``frame`` calls."""
        thread = threading.get_ident()
        outer = self._caller(thread)
        context = context_of(outer) or contextvars.copy_context()
        regions = {id(listener): listener.recorder.path() for listener in self._listeners}
        if outer is not None:
            regions = {one: path or outer.regions.get(one, ()) for one, path in regions.items()}
        return Caller(thread, frame, context, regions)

    @contextlib.contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        thread = threading.get_ident()
        scopes = self._scopes.setdefault(thread, [])
        scopes.append(scope)
        try:
            yield
        finally:
            scopes.remove(scope)
            if not scopes:
                self._scopes.pop(thread, None)

    def _scope(self, thread: int) -> Scope | None:
        scopes = self._scopes.get(thread)
        return scopes[-1] if scopes else None

    # Events.

    def _begin(
        self, what: str, frame: FrameType | None, scope: Scope | None, op: str | None = None, cause: str = ""
    ) -> SyncCall:
        copy = scope.copy if scope is not None else None
        return begun(self._listeners, what, frame, self._caller(threading.get_ident()), copy, op, cause)

    def _caller(self, thread: int) -> Caller | None:
        """Return who called the backward pass that this thread works for; None outside of any."""
        if not self._callers or compat.autograd_node() is None:
            return None
        own = [caller for caller in self._callers if caller.thread == thread]
        return (own or self._callers)[-1]

    @guard.contained(FEATURE)
    def _commit(self, wait: SyncCall) -> None:
        self._check(wait)
        self._count(wait)

    def _check(self, wait: SyncCall) -> None:
        for listener, event in wait.events:
            listener.check(event, wait.thread)

    @guard.contained(FEATURE)
    def _count(self, wait: SyncCall) -> None:
        for listener, event in wait.events:
            event.blocked_ns = wait.blocked_ns
            listener.recorder.add(event)


monitor = SyncMonitor()
