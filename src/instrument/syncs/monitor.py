"""`SyncMonitor`: turns what torch and the wrappers report about synchronizations into events for listeners.

torch calls back before a synchronization (`GpuTrace`) and warns once the call has returned (`SyncWarning`); in
between the thread was blocked. `wrappers` cover the calls that neither reports. All detectors share one monitor.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ..base.compat import autograd
from ..base.guard import guard
from ..record.modules.compiling import skip_package
from . import wrappers
from .calls import (
    Caller,
    Copy,
    Scope,
    SyncCall,
    Target,
    begin_call,
    context_of,
    is_profiler_frame,
    returns_to_python,
)
from .listener import SyncListener
from .torch_reports import GpuTrace, SyncWarning

FEATURE = "recording a synchronization"


class SyncMonitor:
    """Watches synchronizations while it has listeners."""

    def __init__(self) -> None:
        self._listeners: tuple[SyncListener, ...] = ()
        self._lock = threading.RLock()
        self._calls: dict[int, SyncCall] = {}  # open ones, by thread; each thread touches its own
        self._scopes: dict[int, list[Scope]] = {}
        self._callers: list[Caller] = []
        self._trace = GpuTrace(self.on_begin)
        self._warning = SyncWarning(self.on_return)
        self._installed = contextlib.ExitStack()
        self._package_skipped = False  # whether torch.compile skips the package

    @property
    def traced(self) -> bool:
        """Whether torch calls back before synchronizations."""
        return self._trace.active

    @property
    def error_mode(self) -> bool:
        """Whether the program has torch raise an error before synchronizations."""
        return self._warning.error_mode

    def add(self, listener: SyncListener) -> None:
        """Notify ``listener`` of synchronizations from now on; the first listener installs everything."""
        with self._lock:
            first, self._listeners = not self._listeners, (*self._listeners, listener)
            try:
                if first:
                    self._install()
            except BaseException:
                self.remove(listener)
                raise
            if not self._listeners:  # removed meanwhile, by a signal handler
                self._uninstall()

    def remove(self, listener: SyncListener) -> None:
        """Stop notifying ``listener``; the last listener uninstalls everything."""
        with self._lock:
            if all(other is not listener for other in self._listeners):
                return
            self.flush()
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners:
                self._uninstall()

    def _install(self) -> None:
        if not self._package_skipped:
            skip_package()
            self._package_skipped = True
        with contextlib.ExitStack() as stack:  # if one part fails, all are removed
            stack.callback(self._trace.remove)
            self._trace.install()
            stack.callback(self._warning.remove)
            self._warning.install()
            for patch in wrappers.patches(self):
                patch.apply_in(stack)
            self._installed = stack.pop_all()

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, contextlib.ExitStack()
        with guard.contained("uninstalling the synchronization monitor"):
            installed.close()
        self._calls.clear()

    # Called by torch. Only `raise_pending` may raise into the program.

    def on_begin(self, target: Target, frame: FrameType | None) -> None:
        """Note that a synchronization begins on this thread."""
        thread = threading.get_ident()
        scope = self._current_scope(thread)
        if not self._listeners or (scope is not None and scope.synchronizes) or is_profiler_frame(frame):
            return
        with guard.contained(FEATURE):
            position = (id(frame), frame.f_lasti if frame is not None else -1)
            call = self._calls.get(thread)
            if call is not None and call.position == position:
                return  # the same call synchronizes again
            self._flush(thread)
            once = scope if scope is not None and scope.counts_once else None
            call = (once.call if once is not None else None) or self._begin(target, frame, scope)
            call.position = position
            if once is not None:
                once.call = call
            if target == "stream" and returns_to_python(frame) and self._warning.expected():
                self._calls[thread] = call
                call.since_ns = time.perf_counter_ns()
            elif once is None:
                self._commit(call)

    def on_return(self, frame: FrameType | None) -> None:
        """Note the return of the call on this thread, or of a backward pass that synchronized on another."""
        thread = threading.get_ident()
        scope = self._current_scope(thread)
        if (scope is not None and scope.synchronizes) or is_profiler_frame(frame):
            return
        with guard.contained(FEATURE):
            call = self._calls.pop(thread, None)
            if call is None and not self._trace.active:
                self._commit(self._begin("stream", frame, scope))
                self._trace.resume()
            elif call is not None:
                call.blocked_ns = (call.blocked_ns or 0) + time.perf_counter_ns() - call.since_ns
                if scope is None or scope.call is not call:
                    self._commit(call)
        try:
            self.raise_pending(thread)
        except Exception:
            self._trace.pause()  # until the next synchronization
            raise

    def flush(self) -> None:
        """Record the open calls of all threads without a time, as torch did not report their end."""
        for thread in list(self._calls):
            self._flush(thread)

    @guard.contained(FEATURE)
    def _flush(self, thread: int) -> None:
        call = self._calls.pop(thread, None)
        scope = self._current_scope(thread)
        if call is not None and (scope is None or scope.call is not call):
            self._commit(call)

    def raise_pending(self, thread: int | None = None) -> None:
        """Have all listeners issue their queued warnings; raise the first error."""
        errors: list[Exception] = []
        for listener in reversed(self._listeners):
            try:
                listener.raise_pending(thread)
            except Exception as error:  # also a warning that the program's filters turn into an error
                errors.append(error)
        if errors:
            raise errors[0]

    # Called by the wrappers.

    @contextlib.contextmanager
    def one_synchronization(
        self, op: str, cause: str, frame: FrameType, copy: Copy | None = None
    ) -> Iterator[None]:
        """Run a call that counts as one synchronization; if it is not allowed, raise before it runs."""
        thread = threading.get_ident()
        scope = self._current_scope(thread)
        if not self._listeners or (scope is not None and scope.synchronizes):
            yield
            return
        if is_profiler_frame(frame):
            with self._enter_scope(Scope(synchronizes=True)):
                yield
            return
        call = None
        with guard.contained(FEATURE):
            self._flush(thread)
            call = self._begin("device", frame, Scope(copy=copy), op, cause)
            self._check(call)
        try:
            self.raise_pending(thread)
            if call is not None:
                call.since_ns = time.perf_counter_ns()
            with self._enter_scope(Scope(synchronizes=True)):
                yield
            if call is not None:
                call.blocked_ns = time.perf_counter_ns() - call.since_ns
        finally:
            if call is not None:
                self._record(call)

    @contextlib.contextmanager
    def counted_once(self) -> Iterator[None]:
        """Run a call whose synchronizations count as one."""
        thread = threading.get_ident()
        outer = self._current_scope(thread)
        if not self._listeners or (outer is not None and (outer.synchronizes or outer.counts_once)):
            yield
            return
        self._flush(thread)
        scope = Scope(counts_once=True)
        try:
            with self._enter_scope(scope):
                yield
        finally:
            self._calls.pop(thread, None)
            if scope.call is not None:
                self._commit(scope.call)
        self.raise_pending(thread)

    @contextlib.contextmanager
    def possible_copy(self, copy: Copy) -> Iterator[None]:
        """Run a call that may synchronize for a copy; ``copy`` is called if it does."""
        outer = self._current_scope(threading.get_ident())
        if not self._listeners or outer is not None:
            yield
            return
        with self._enter_scope(Scope(copy=copy)):
            yield

    @contextlib.contextmanager
    def backward_pass(self, frame: FrameType) -> Iterator[None]:
        """Run a backward pass that ``frame`` calls, whose nodes may synchronize on other threads."""
        caller = None
        with guard.contained(FEATURE):
            caller = self._new_caller(frame)
            self._callers.append(caller)
        try:
            yield
        finally:
            if caller in self._callers:
                self._callers.remove(caller)

    def _new_caller(self, frame: FrameType) -> Caller:
        """Return the caller of the backward pass that ``frame`` calls."""
        thread = threading.get_ident()
        outer = self._backward_caller(thread)
        context = context_of(outer) or contextvars.copy_context()
        regions = {id(listener): listener.recorder.path() for listener in self._listeners}
        if outer is not None:
            regions = {one: path or outer.regions.get(one, ()) for one, path in regions.items()}
        return Caller(thread, frame, context, regions)

    @contextlib.contextmanager
    def _enter_scope(self, scope: Scope) -> Iterator[None]:
        thread = threading.get_ident()
        scopes = self._scopes.setdefault(thread, [])
        scopes.append(scope)
        try:
            yield
        finally:
            scopes.remove(scope)
            if not scopes:
                self._scopes.pop(thread, None)

    def _current_scope(self, thread: int) -> Scope | None:
        scopes = self._scopes.get(thread)
        return scopes[-1] if scopes else None

    # Events.

    def _begin(
        self, target: Target, frame: FrameType | None, scope: Scope | None, op: str | None = None, cause: str = ""
    ) -> SyncCall:
        copy = scope.copy if scope is not None else None
        return begin_call(
            self._listeners, target, frame, self._backward_caller(threading.get_ident()), copy, op, cause
        )

    def _backward_caller(self, thread: int) -> Caller | None:
        """Return the caller of the backward pass that this thread works for; None outside backward passes."""
        if not self._callers or autograd.autograd_node() is None:
            return None
        own = [caller for caller in self._callers if caller.thread == thread]
        return (own or self._callers)[-1]

    @guard.contained(FEATURE)
    def _commit(self, call: SyncCall) -> None:
        self._check(call)
        self._record(call)

    def _check(self, call: SyncCall) -> None:
        for listener, event in call.events:
            listener.check(event, call.thread)

    @guard.contained(FEATURE)
    def _record(self, call: SyncCall) -> None:
        for listener, event in call.events:
            event.blocked_ns = call.blocked_ns
            listener.recorder.add(event)


monitor = SyncMonitor()
