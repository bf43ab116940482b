"""The one Kineto session of a process: who uses it, how it ends, and which of its lines Kineto prints."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..interrupts import Suppressed, c_library
from ..live_objects import live_objects
from ..patch import Patch
from . import profilers
from .operators import without_modes

# Kineto writes these only if it was set up for GPUs: the labels of their lanes, which come before all events and
# need no GPU work, and the events that CUPTI and roctracer report.
_GPU_LABEL = b'"labels": "GPU '
_GPU_EVENTS = tuple(b'"cat": "%b"' % kind for kind in (b"cuda_runtime", b"cuda_driver", b"kernel"))


def is_set_up_for_gpu(trace: Path) -> bool:
    """Return whether Kineto was set up for GPUs in the process that wrote ``trace``, even if no GPU work ran.

    It is set up once in a process: from torch 2.13 on for the activities of the first recording. True as well
    if the trace cannot be read.
    """
    return _has_any(trace, (_GPU_LABEL, *_GPU_EVENTS))


def has_gpu_events(trace: Path) -> bool:
    """Return whether ``trace`` has any call or work of a GPU; True as well if it cannot be read."""
    return _has_any(trace, _GPU_EVENTS)


def _has_any(trace: Path, words: Sequence[bytes]) -> bool:
    with (
        Suppressed(OSError, ValueError),
        trace.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        return any(text.find(word) >= 0 for word in words)
    return True


class SessionObserver(Protocol):
    """The methods that `session_patches` calls, on the thread of the profiler."""

    def before_start(self) -> None:
        """Called before any torch profiler begins."""

    def before_prepare(self, profiler: Any) -> bool | None:
        """Called before ``profiler`` takes the process's Kineto session; None for a profiler without an object.

        Returns whether a session that is still on may be ended, as nothing uses it any more.
        """

    def on_ended(self) -> None:
        """Called when the Kineto session has ended."""

    def before_disable(self) -> Any:
        """Called before the running profiler is disabled; returns its result if that has happened already."""


def session_patches(observer: SessionObserver) -> Iterator[Patch]:
    """Yield patches that call ``observer`` before any profiler of torch begins, and after a Kineto session ended.

    There are no patches if this version of torch lacks the functions: overlapping profilers are then not detected.
    """
    import torch
    from torch.autograd import profiler, profiler_legacy

    def preparing(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
        def prepare_trace(profiler: Any) -> None:
            may_end = observer.before_prepare(profiler)
            try:
                prepare(profiler)
            except RuntimeError as error:
                if not (may_end and end_left_session(error)):
                    raise
                prepare(profiler)

        return prepare_trace

    def leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
        def leave_trace(profiler: Any, *exception: Any) -> Any:
            try:
                return leave(profiler, *exception)
            finally:
                if not profilers.running():  # a KeyboardInterrupt may have come before it stopped
                    observer.on_ended()

        return leave_trace

    def disabling(disable: Callable[[], Any]) -> Callable[[], Any]:
        def disable_profiler() -> Any:
            result = observer.before_disable()
            return disable() if result is None else result

        return disable_profiler

    if not hasattr(profiler.profile, "_prepare_trace"):
        return
    yield Patch(profiler.profile, "_prepare_trace", preparing)
    yield Patch(profiler.profile, "__exit__", leaving)
    before_start = functools.partial(_before, observer.before_start)
    others: list[tuple[Any, str]] = [
        (kind, "__enter__") for kind in (profiler.emit_nvtx, profiler.emit_itt, profiler_legacy.profile)
    ]
    # Called by programs without a profiler object; torch's own code has references to them.
    others += [(torch.autograd, name) for name in ("_enable_profiler", "_enable_profiler_legacy")]
    yield from (Patch(owner, name, before_start) for owner, name in others if hasattr(owner, name))
    if hasattr(torch.autograd, "_prepare_profiler"):
        taken = functools.partial(_before, functools.partial(observer.before_prepare, None))
        yield Patch(torch.autograd, "_prepare_profiler", taken)
    if hasattr(torch.autograd, "_disable_profiler"):
        yield Patch(torch.autograd, "_disable_profiler", disabling)


def _before(first: Callable[[], object], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    return call


def prepared_profilers() -> list[Any]:
    """Return the ``torch.autograd.profiler.profile`` objects that have prepared; see `live_objects`."""
    from torch.autograd import profiler

    objects = (each for each in live_objects(profiler.profile) if type(each) is profiler.profile)
    return [each for each in objects if each.entered and each.kineto_results is None]


def end_left_session(error: RuntimeError) -> bool:
    """End a Kineto session that was never stopped, if ``error`` says that it blocks the next one.

    torch 2.13 discards such a session when the next profiler prepares. torch 2.11 first disables the profiler of
    this thread; if that profiler is gone, this raises, and so does every later profiler of the process. Enabling
    and disabling a profiler takes the session over and ends it; without a session, that would crash.

    Returns:
        Whether the session was ended, so that preparing again succeeds.
    """
    if "Can't disable Kineto profiler when it's not running" not in str(error):
        return False
    with Suppressed(Exception):
        _record_nothing(prepare=False)
        return True
    return False


def _record_nothing(*, prepare: bool) -> None:
    """Start and stop a recording of the CPU alone, which initializes no GPU."""
    import torch
    from torch.autograd import profiler

    functions: Any = torch._C._autograd  # the C functions: torch's Python names may be patched
    empty = profiler.profile(use_cpu=True)
    if prepare:
        functions._prepare_profiler(empty.config(), empty.kineto_activities)
    try:
        functions._enable_profiler(empty.config(), empty.kineto_activities)
    finally:
        if profilers.running():
            functions._disable_profiler()


def leave_recording() -> Any:
    """Turn off the profiler of this thread without reading its events, which are lost.

    Returns:
        An object that keeps the profiler's memory alive: ranges that are open now write to it when they close.
        None if this version of torch cannot do it; the profiler then stays on.
    """
    import torch
    from torch.autograd import profiler

    options = getattr(torch._C._autograd, "_ProfilerDisableOptions", None)
    if options is None:
        return None
    bindings: Any = torch._C._autograd
    memory = _memory_of_profiler()
    bindings._disable_profiler_legacy(options(True, False))  # no reading
    profiler._run_on_profiler_stop()
    return memory


def discard_trace() -> None:
    """Make Kineto drop the trace that it still holds after `leave_recording`.

    Otherwise CUPTI records until the next profiler prepares, which drops it.
    """
    _record_nothing(prepare=True)


def hold_recording() -> Callable[[], None]:
    """Keep the memory of this thread's profiler, also at exit, until the function that this returns is called.

    torch crashes at exit if a thread ended with its profiler on, as then nothing else holds that memory.
    """
    memory = _memory_of_profiler()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # Python's own references end at exit
    return functools.partial(ctypes.pythonapi.Py_DecRef, ctypes.py_object(memory))


def _memory_of_profiler() -> Any:
    """Return an object that keeps the memory of this thread's profiler; its trace does not show that."""
    import torch

    operators: Any = torch.ops.profiler
    switch: Any = getattr(torch.autograd, "_enable_record_function", lambda _: None)
    with without_modes():
        # A callback keeps the state of the thread that added it, in which the profiler's memory is.
        future: Any = torch.futures.Future()
        switch(False)
        try:
            record = operators._record_function_enter_new("", None)
            operators._call_end_callbacks_on_jit_fut._RecordFunction(record, future)
            operators._record_function_exit._RecordFunction(record)
        finally:
            switch(True)
    return future


def record_functions() -> list[Any]:
    """Return each `torch.profiler.record_function` object; takes 90 ms for 350,000 objects."""
    from torch.autograd.profiler import record_function

    kinds = (record_function, *record_function.__subclasses__())
    return [each for kind in kinds for each in gc.get_referrers(kind) if isinstance(each, record_function)]


def end_record_functions(ranges: Iterable[Any]) -> None:
    """End the open ones of ``ranges``, while no profiler records; torch ignores their second end.

    torch crashes if a range is open when its recording stops, and ends in the next recording.
    """
    import torch

    leave = torch.ops.profiler._record_function_exit._RecordFunction
    with without_modes():
        for context in ranges:
            if context.record is not None:
                leave(context.record)


def end_forks_without_destructors() -> None:
    """Have processes that are forked from now on skip the C++ destructors at their end, where the system can.

    The destructor of Kineto's ``ConfigLoader`` waits for a thread that a fork does not have: it hangs or aborts.
    """
    libc = c_library()
    if hasattr(os, "register_at_fork") and hasattr(libc, "on_exit"):
        os.register_at_fork(after_in_child=functools.partial(_end_without_destructors, libc))


def _end_without_destructors(libc: Any) -> None:
    libc.on_exit(libc._exit, None)  # gets the exit status; handlers that were registered earlier are not called
    libc.__cxa_atexit(libc.fflush, None, None)  # runs before it, as exit itself flushes last


_LEVEL_ERROR, _LEVEL_USDT = 4, 5  # Kineto's severities: what torch lets it print, and that of these lines


@contextlib.contextmanager
def without_start_and_stop() -> Iterator[None]:
    """Keep Kineto from printing "USDT: ... profiler_start" and "profiler_stop" while the body runs.

    These lines have the highest severity, so that an error that Kineto logs meanwhile is not printed either. They
    stay where the program chose what Kineto prints, by ``KINETO_LOG_LEVEL``, and where this variable of Kineto
    cannot be found.
    """
    severity = None if "KINETO_LOG_LEVEL" in os.environ else least_severity()
    if severity is None or severity.value != _LEVEL_ERROR:
        yield
        return
    severity.value = _LEVEL_USDT + 1
    try:
        yield
    finally:
        severity.value = _LEVEL_ERROR


@functools.cache
def least_severity() -> ctypes.c_int | None:
    """Return the least severity that Kineto prints; None in a version of torch without these lines."""
    import torch

    with Suppressed(OSError, ValueError, AttributeError):
        library = ctypes.CDLL(torch._C.__file__)  # finds the symbols of the libraries that it is linked to
        name = library._ZN9libkineto8toStringENS_16LoggerOutputTypeE
        name.restype = ctypes.c_char_p
        if (name(_LEVEL_ERROR), name(_LEVEL_USDT)) == (b"ERROR", b"USDT"):
            return ctypes.c_int.in_dll(library, "_ZN9libkineto6Logger14severityLevel_E")
    return None
