"""`SyncMonitor`: turns what torch and wrapped calls report about synchronizations into events for listeners.

torch calls back before a synchronization (`GpuTrace`) and warns once the call has returned (`SyncWarning`); in
between the thread was blocked. All detectors share one monitor.

Calls that torch gives no hook for are wrapped: explicit synchronization and copies of pageable memory; so are
calls that synchronize several times for one purpose, which then count once; and copies, to learn their size and
direction. Under torch.compile the wrappers do nothing. While they are installed, a `__torch_function__` receives
the wrappers in place of `torch.Tensor.to` and the like.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from ..base.compat import autograd, gpu, operators
from ..base.findings import Direction
from ..base.guard import guard
from ..base.patch import Patch
from ..explain.waits import operations, sites
from ..explain.waits.events import SyncEvent
from ..record import gpu_wait
from ..record.modules.uncompiled import skip_package
from ..record.regions import dispatch
from . import policy
from .calls import operation_at
from .listener import SyncListener
from .torch_reports import GpuTrace, SyncWarning, Target
from .transfer import COPIED_AT_ONCE_BYTES, is_gathered, parse_copy, parse_cuda, parse_to

FEATURE = "recording a synchronization"
_CAUSES: dict[Target, str] = {"stream": operations.STREAM, "event": operations.EVENT, "device": operations.DEVICE}
# Modules in which a profiler itself synchronizes, at the beginning and the end of a recording
_PROFILERS = ("torch.autograd.profiler", "torch.profiler.", gpu_wait.__name__)
Copy = Callable[[], tuple[Direction | None, int | None]]  # returns direction and bytes


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
            for patch in patches(self):
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
        """Return a synchronization that begins on this thread now, with an event for each listener.

        Args:
            target: what the CPU waits for.
            frame: the innermost Python frame; None if there is none.
            scope: the wrapped call that runs on this thread.
            op: the operation, if it is known; else the instruction of the user's line names it.
            cause: why it synchronizes; by default it follows from ``target``.
        """
        caller = self._backward_caller(threading.get_ident())
        place = sites.locate(frame)
        if place.site is None and caller is not None:
            frame = caller.frame
        innermost = place.frame or sites.locate(frame).frame
        op = op or (operation_at(innermost) if innermost is not None else None) or "synchronize"
        direction, size = scope.copy() if scope is not None and scope.copy is not None else (None, None)
        direction = direction or operations.direction_of(op)
        events = []
        for listener in self._listeners:
            make_event = functools.partial(
                listener.recorder.make_event, op, cause or _CAUSES[target], frame, direction=direction, bytes=size
            )
            context = context_of(caller)
            event = make_event() if context is None else context.run(make_event)
            if caller is not None:
                event.region = event.region or caller.regions.get(id(listener), ())
                event.via = place.via if place.site is None and place.via is not None else event.via
            events.append((listener, event))
        thread = threading.get_ident() if caller is None else caller.thread
        return SyncCall(events, thread, (0, 0), time.perf_counter_ns())

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


PAGEABLE = "a non_blocking copy of pageable memory blocks"


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


def patches(monitor: SyncMonitor) -> Iterator[Patch]:
    """Yield a patch for each call to wrap."""
    import torch

    synchronizing = [
        (torch.cuda, "synchronize", operations.DEVICE),
        (torch.cuda.Event, "synchronize", operations.EVENT),
        (torch.cuda.Stream, "synchronize", operations.STREAM),
        (torch.cuda, "empty_cache", operations.FREES),
        (getattr(torch, "accelerator", None), "synchronize", operations.DEVICE),
        (getattr(torch, "accelerator", None), "empty_cache", operations.FREES),
    ]
    for owner, name, cause in synchronizing:
        if hasattr(owner, name):
            yield _within(owner, name, _synchronizing(monitor, name, cause))
    for name in ("to", "cuda", "cpu", "copy_"):
        yield _within(torch.Tensor, name, functools.partial(_copying, monitor, name))
    if (text := operators.tensor_text()) is not None:
        yield _within(*text, lambda *_, **__: monitor.counted_once())
    if (backward := autograd.backward_runner()) is not None:
        yield _within(*backward, lambda frame, *_, **__: monitor.backward_pass(frame))


def _within(owner: Any, name: str, context_of: Callable[..., AbstractContextManager[None]]) -> Patch:
    """Return a patch of ``owner.name``, each call of which is then inside ``context_of(frame, *arguments)``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if dispatch.tracing():
                return original(*args, **kwargs)
            with context_of(sys._getframe(1), *args, **kwargs):
                return original(*args, **kwargs)

        return wrapper

    return Patch(owner, name, make)


def _synchronizing(monitor: SyncMonitor, op: str, cause: str) -> Callable[..., AbstractContextManager[None]]:
    return lambda frame, *_, **__: monitor.one_synchronization(op, cause, frame)


def _copying(
    monitor: SyncMonitor, op: str, frame: FrameType, tensor: Any, *args: Any, **kwargs: Any
) -> AbstractContextManager[None]:
    """Return the context of a call of a method of ``tensor`` that copies."""
    blocking = _blocking_copy(op, tensor, args, kwargs)
    if blocking is not None:
        cause, copy = blocking
        return monitor.one_synchronization(op, cause, frame, copy)
    return monitor.possible_copy(lambda: _direction_and_bytes(args[0] if op == "copy_" and args else tensor))


def _direction_and_bytes(source: Any) -> tuple[Direction | None, int | None]:
    """Return the direction and the bytes of a copy between CPU and GPU from ``source``."""
    device = getattr(getattr(source, "device", None), "type", None)
    if device is None:
        return None, None
    return ("H2D" if device == "cpu" else "D2H"), source.numel() * source.element_size()


def _blocking_copy(op: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Copy] | None:
    """Return why a non_blocking copy blocks, and describe it; None for other calls."""
    if kwargs.get("non_blocking") is not True and not any(value is True for value in args):
        return None
    with guard.contained("checking a copy"):
        route = _route(op, tensor, args, kwargs)
        if route is None or route[2] is None or operators.is_fake(tensor):
            return None
        source, target, host, gathered = route
        size, devices = tensor.numel() * source.element_size(), (source.device.type, target)
        waits = size > COPIED_AT_ONCE_BYTES if devices == ("cpu", "cuda") else size and devices == ("cuda", "cpu")
        # is_pinned() creates a context on the current device if the program has none yet
        if not waits or gpu.in_use() is None:
            return None
        cause = PAGEABLE if not host.is_pinned() else operations.GATHERED if gathered() else None
        if cause is not None:
            return cause, lambda: ("H2D" if target == "cuda" else "D2H", size)
    return None


def _route(
    op: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None, Any, Callable[[], bool]] | None:
    """Return what a call copies; None if torch refuses the arguments: the call itself raises the error.

    Returns:
        The tensor that is copied; the type of the target device; the tensor on the CPU that must be pinned, None
        if the copy is blocking, or if torch pins memory itself, as for a copy to the CPU; and `is_gathered`, bound
        to these.
    """
    if op == "copy_":
        source, non_blocking = parse_copy(args, kwargs)
        source = tensor if source is None else source
        host, other = (source, tensor) if source.device.type == "cpu" else (tensor, source)
        gathered = functools.partial(is_gathered, host, other.dtype, other)
        return source, tensor.device.type, host if non_blocking else None, gathered
    try:
        transfer = parse_to(args, kwargs) if op == "to" else parse_cuda(args, kwargs)
    except (TypeError, RuntimeError):
        return None
    target = "cuda" if op == "cuda" else getattr(transfer.device, "type", None)
    host = tensor if transfer.non_blocking and target == "cuda" else None
    gathered = functools.partial(is_gathered, tensor, transfer.dtype, memory_format=transfer.memory_format)
    return tensor, target, host, gathered


monitor = SyncMonitor()
