"""`Recording`: one window while it is open, with its costs, its log of torch.compile and the end of its thread."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import IO, Any

from ...base import log
from ...base.compat.compiler import follow_compile_trace
from ...base.errors import CaptureError
from ...base.files import make_folder, part_file, publish
from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.run_folder import COMPILE_LOG
from ...base.trace_marks import STEPS
from ..allocator_history.window_memory import WindowMemory
from ..exporters.exporter import Capture
from ..planning.schedule import Window
from ..regions import dispatch

SaveResult = tuple[
    list[Path], dict[str, Any], list[str]
]  # the files, the line of the manifest, and why parts are missing


@dataclass(eq=False, repr=False)
class Recording:
    """A window and its capture. Once it records, it belongs to its thread: torch's profiler must stop there.

    Args:
        window: the window.
        capture: its capture.
        opened_at_step: the number of the step that begins now.
        cost: measures what the window costs.
        on_thread_end: called with this object when its thread ends, before `stop` or `abandon` has ended it.
        compile_log: writes what torch compiles in the window, if the user wants that.
        memory: records the history of GPU memory in it, likewise.

    Attributes:
        steps: the first and the last step that the trace marks so far; None if it marks none.
        start_ns: when recording began, in ns since the epoch; None in warm-up.
        end_ns: when it ended. Measured from ``start_ns`` on, so that a clock that is set back does not show.
        other_thread_stepped: whether another thread ended a step, when nothing could be started or stopped.
        cut_step: the step whose end did not run or was not recorded; None if all steps are complete.
        thread: the thread that records, by `threading.get_ident`; None in warm-up.
        save_result: the result of saving it; None before.
        on_trace_ready_called: whether on_trace_ready was called.
    """

    window: Window
    capture: Capture
    opened_at_step: int
    cost: WindowCost
    on_thread_end: Callable[[Recording], None]
    compile_log: WindowCompileLog | None
    memory: WindowMemory | None
    steps: tuple[int, int] | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    other_thread_stepped: bool = False
    cut_step: int | None = None
    thread: int | None = None
    save_result: SaveResult | None = None
    on_trace_ready_called: bool = False
    _began_ns: int = 0  # when recording began, of the clock that nobody sets
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._at_thread_end = functools.partial(self.on_thread_end, self)

    def on_own_thread(self) -> bool:
        """Return whether this thread can end the window: any thread in warm-up, then the one that records."""
        return self.thread in (None, threading.get_ident())

    def note_foreign_step(self, window: int | str) -> None:
        """Warn, the first time, that another thread ended a step."""
        if not self.other_thread_stepped:
            self.other_thread_stepped = True
            log.warning(
                "a step ended on another thread than the one that opened the window; the window stays open",
                window=window,
            )

    @property
    def ended_early(self) -> bool:
        """Whether the capture ended before the window did."""
        return getattr(self.capture, "ended", False)

    @property
    def incomplete(self) -> list[str]:
        """Why the capture is incomplete, in words; known once it is saved."""
        return list(getattr(self.capture, "incomplete", ()))

    @property
    def seconds(self) -> float | None:
        """How long it was recorded; None before its end and if it ended in warm-up."""
        return (self.end_ns - self.start_ns) / 1e9 if self.end_ns and self.start_ns else None

    def _now_ns(self) -> int:
        if self.start_ns is None:
            return time.time_ns()
        return self.start_ns + time.perf_counter_ns() - self._began_ns

    def warm_up(self) -> None:
        """Begin a warm-up step. Modules get hooks now: the backward of its forward may run in a recorded step."""
        dispatch.active.begin_warm_up(self)

    def step(self, number: int, metadata: Mapping[str, str], mark: bool) -> None:
        """Begin to record step ``number``; the first one puts ``metadata`` into the trace.

        Without ``mark``, neither the trace nor `steps` shows the step.
        """
        if self.start_ns is None:
            with self.cost.stall():
                if self.memory is not None:
                    self.memory.start()  # first: what it needs is not in the trace
                self.thread = threading.get_ident()
                at_thread_end(self._at_thread_end)
                self.capture.start()
                self._began_ns, self.start_ns = time.perf_counter_ns(), time.time_ns()  # at once: for an interrupt
            dispatch.active.end_warm_up(self)
            for key, value in metadata.items():
                self.capture.add_metadata(key, value)
        if mark:
            self.capture.step(number)
            if self.memory is not None:
                self.memory.step(number)
            self.steps = (self.steps[0] if self.steps else number, number)

    def end_step(self) -> None:
        """End the recorded step before the next one begins."""
        if self.memory is not None:
            self.memory.step(None)
        self.capture.step(None)

    def leave_out(self, number: int) -> None:
        """Remove the last step, ``number``, from `steps`, as it never ran."""
        if self.steps is not None:
            self.steps = (self.steps[0], number - 1) if self.steps[0] < number else None

    def ends_with(self, number: int) -> bool:
        """Return whether step ``number`` is the last recorded one."""
        return self.steps is not None and self.steps[1] == number

    def mark_last_step_cut(self) -> None:
        """Note that the last step did not end; it counts only if no other step is recorded."""
        if self.steps is not None and self.cut_step is None:
            first, self.cut_step = self.steps
            self.steps = first, max(first, self.cut_step - 1)

    def stop(self) -> None:
        """Stop recording; put the steps, and the number of warm-up steps before them, into the trace.

        Raises:
            CaptureError: another thread opened the window.
        """
        if not self.on_own_thread():
            raise CaptureError("the loop ended on another thread than the one that opened the window")
        self.end_step()
        first, last = self.steps or (1, 0)  # an empty range
        self.capture.add_metadata(STEPS, f"{first}-{last}")
        self.capture.add_metadata("instrument_warmup", str(first - self.opened_at_step if self.steps else 0))
        if self.compile_log is not None:
            self.compile_log.stop()
        with self.cost.stall():
            self.capture.stop()
            self.end_ns, self._stopped = self._now_ns(), True
            if self.memory is not None:
                self.memory.stop()
        cancel_at_thread_end(self._at_thread_end)

    def abandon(self) -> None:
        """End the capture after a failure or an unused warm-up; may be called again after an interrupt."""
        try:
            if self.compile_log is not None:
                self.compile_log.discard()
            if self.memory is not None:
                self.memory.discard()
            dispatch.active.end_warm_up(self)
            if self._stopped:
                return
            self.end_ns = self.end_ns or self._now_ns()
            with suppress(CaptureError):  # the caller knows the reason
                if self.start_ns is None:
                    self.capture.discard()
                else:
                    self.capture.stop()
            self._stopped = True
            cancel_at_thread_end(self._at_thread_end)
        finally:
            dispatch.active.end_warm_up(self)  # again, as an interrupt may have come in the first call
            dispatch.active.check()


class WindowCost:
    """Measures the time in which the profiler of a window blocks the loop, and the memory of the process.

    The first measurement of memory is made with the object.
    """

    def __init__(self) -> None:
        self._stall_ns = 0
        self._rss_before_bytes = resident_bytes()

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Count the time of the body, in which the profiler is made, starts, stops or writes its trace."""
        began_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._stall_ns += time.perf_counter_ns() - began_ns

    def entry(self) -> dict[str, Any]:
        """Return the keys of the manifest: ``stall_s``, ``rss_before_bytes`` and ``rss_after_bytes``."""
        return {
            "stall_s": self._stall_ns / 1e9,
            "rss_before_bytes": self._rss_before_bytes,
            "rss_after_bytes": resident_bytes(),
        }


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None where the system has no ``/proc``."""
    with Suppressed(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


_FEATURE = "the log of torch.compile"


class WindowCompileLog:
    """Writes what torch compiles from `start` to `stop`; no file is written if nothing is compiled.

    Args:
        folder: the folder of the window.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._end: Callable[[], None] | None = None
        self._cleanup = ExitStack()  # removes the part that has no name yet
        self._part: Path | None = None
        self._file: IO[str] | None = None

    @guard.contained(_FEATURE)
    def start(self) -> None:
        """Begin; the program then compiles a little slower, as torch describes what it compiles."""
        self._end = follow_compile_trace(self._write)

    @guard.contained(_FEATURE)
    def _write(self, text: str) -> None:
        if self._end is None or self._process != os.getpid():  # a forked child has the same open file
            return
        if self._part is None:
            make_folder(self._folder)
            self._part = self._cleanup.enter_context(part_file(self._folder / f"rank{COMPILE_LOG}"))
            self._file = self._part.open("w", encoding="utf-8")
        if self._file is not None:
            self._file.write(f"{text}\n")

    @guard.contained(_FEATURE)
    def stop(self) -> None:
        """End the log; may be called again."""
        end, self._end = self._end, None
        if end is not None:
            end()
        if self._file is not None and self._process == os.getpid():
            self._file.close()

    @guard.contained(_FEATURE)
    def save(self, stem: str) -> Path | None:
        """Give the file its name, which begins as that of the trace; return it, if there is one."""
        with self._cleanup:
            if self._part is None:
                return None
            path = self._folder / f"{stem}{COMPILE_LOG}"
            publish(self._part, path)
        return path

    @guard.contained(_FEATURE)
    def discard(self) -> None:
        """End the log without a file."""
        self.stop()
        self._cleanup.close()


_threads: dict[int, threading.Thread] = getattr(threading, "_active", {})  # by identifier


class _Calls(list[Callable[[], None]]):
    """Makes the calls when it is freed, if that happens on the thread that made it.

    CPython frees the values of a `threading.local` on the thread that ends, before `Thread.join` returns. At exit
    the main thread frees those of daemon threads, and a forked child those of its parent's threads: the calls are
    not made.
    """

    def __init__(self) -> None:
        self._thread = get_ident(), os.getpid()

    def __del__(self, get_ident: Callable[[], int] = get_ident, getpid: Callable[[], int] = os.getpid) -> None:
        if not self or self._thread != (get_ident(), getpid()):
            return
        try:
            for call in self:
                call()
        finally:
            _threads.pop(get_ident(), None)  # logging a line lists the thread again, as a dummy and for good


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.calls = _Calls()  # nothing else may refer to it


_state = _ThreadState()


def at_thread_end(call: Callable[[], None]) -> None:
    """Call ``call()``, which contains its errors, when the current thread ends, if `threading.Thread` started it.

    Python knows a thread of C code only while that calls Python, and up to 3.12.3 crashes if torch is called then.
    """
    thread = _threads.get(get_ident())
    if thread not in (None, threading.main_thread()) and not isinstance(thread, threading._DummyThread):
        _state.calls.append(call)


def cancel_at_thread_end(call: Callable[[], None]) -> None:
    """Undo `at_thread_end` on the same thread; on another thread, do nothing."""
    if call in _state.calls:
        _state.calls.remove(call)
