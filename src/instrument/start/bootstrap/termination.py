"""`Termination`: saves an open window at SIGTERM, as from a scheduler or torchrun, before the process ends."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from ...base import log
from ...base.compat import autograd
from ...base.files import OwnDescriptor
from ...base.guard import guard
from ...base.interrupts import c_handler, c_library, is_default
from ...integrations.loop import Loop
from ...record import gpu_wait
from ...record.cuda_graphs import cuda_graphs
from ...record.windows.profile import Profile
from ...record.windows.window_recorder import ChangeQueue

FEATURE = "handling SIGTERM"
_REASON = "SIGTERM ended the program"
_PACKAGE = Path(__file__).parents[2]
_RECORDING = ("record/windows", "record/planning", "record/handover", "record/exporters", "integrations/loop.py")
_RECORDING_PATHS = tuple(str(_PACKAGE / path) for path in _RECORDING)
_ITERATION_FILE = str(_PACKAGE / "record/windows/steps.py")  # runs the program's own iterator
_GRACE_S = 10  # time for a long call to return, so that Python can run the handler
_GPU_S = 5  # for work of the GPU that still runs
_SAVING_S = 15  # for the window; torchrun sends SIGKILL 30 s after SIGTERM
_CHECK_INTERVAL_S = 0.05
_CALL_MAIN = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None  # calls the main thread


class Termination:
    """Handles SIGTERM while windows may be open, unless the program has its own handler, in Python or in C.

    The window is saved on the main thread, if it records there; else its line in the manifest says why it is not.
    Only the main thread can set a handler: if a profile starts on another one, a signal that nothing else uses
    interrupts the main thread for that. SIGTERM then ends the process, with the
    same exit status as without this handler. A second signal ends it at once. The first one ends it after 10 s if
    the main thread is in a call that does not return, such as a collective whose other ranks are gone, as Python
    runs no handler then. A thread detects this by reading the wakeup descriptor, to which Python writes signal
    numbers.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = weakref.ref(loop)
        self._process = os.getpid()
        self._pipe: tuple[OwnDescriptor, OwnDescriptor] | None = None
        self._c_handler: int | None = None  # Python's own, while `_on_signal` is installed
        self._sent = 0  # signals that this process sent to itself
        self._saving = False
        self._call_again = False  # the handler came too early and is called again

    def install(self) -> None:
        """Handle the signal from the time that the first window may be open."""
        if os.name == "nt":
            return
        if _CALL_MAIN is not None and _is_main() and is_default(_CALL_MAIN):
            signal.signal(_CALL_MAIN, self._on_call)
        Profile.start_callbacks.append(self._on_profile_start)
        Profile.idle_callbacks.append(self._on_profiles_idle)
        os.register_at_fork(after_in_child=self._restore_after_fork)

    @guard.contained(FEATURE)
    def _on_profile_start(self) -> None:
        if self._pipe is not None or os.getpid() != self._process:
            return
        if not _is_main():
            if _CALL_MAIN is not None and signal.getsignal(_CALL_MAIN) == self._on_call:
                signal.pthread_kill(threading.main_thread().ident or 0, _CALL_MAIN)
            return
        if not is_default(signal.SIGTERM):
            return
        reader, writer = map(OwnDescriptor, os.pipe())
        os.set_blocking(writer.number, False)
        before = signal.set_wakeup_fd(writer.number, warn_on_full_buffer=False)
        if before != -1:  # the descriptor of another user, such as an event loop
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._pipe = reader, writer
        self._sent = 0
        signal.signal(signal.SIGTERM, self._on_signal)
        self._c_handler = c_handler(signal.SIGTERM)
        threading.Thread(target=self._read_signals, args=(reader,), name="instrument-sigterm", daemon=True).start()

    def _on_call(self, *_: Any) -> None:
        self._on_profile_start()

    @guard.contained(FEATURE)
    def _on_profiles_idle(self) -> None:
        """Stop handling the signal, as no window is open or to come."""
        if not (self._saving or self._call_again):
            self.remove()

    def remove(self) -> None:
        """Restore the previous handling; the thread ends by itself."""
        if self._pipe is not None and _is_main() and os.getpid() == self._process:
            self._restore()

    @guard.contained(FEATURE)
    def check(self) -> None:
        """Forget descriptors that the program closed: their numbers may belong to its own files by now."""
        if self._pipe is None or self._pipe[1].is_valid:
            return
        if _is_main() and os.getpid() == self._process:
            self._restore()
            log.warning(
                "SIGTERM no longer saves an open window, "
                "because the program closed file descriptors that it did not open"
            )

    @guard.contained(FEATURE)
    def _restore_after_fork(self) -> None:
        """Restore the handling in a forked child."""
        if self._pipe is not None:
            reader = self._pipe[0]
            self._restore()
            reader.close()

    def _restore(self) -> None:
        assert self._pipe is not None
        current = signal.set_wakeup_fd(-1)
        if current != self._pipe[1].number:
            signal.set_wakeup_fd(current)
        if self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        writer, self._pipe = self._pipe[1], None
        writer.close()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        """Save an open window; later, if that interrupts recording, a backward pass or a graph capture."""
        if self._saving:
            _end_process()
        early = True
        with guard.contained(FEATURE):
            early = autograd.in_backward() or cuda_graphs.capturing or _is_in_recording(frame)
            early = early or ChangeQueue.is_used_elsewhere()
        if early:
            self._call_again = True
            return
        self._saving = True
        try:
            with guard.contained("saving at SIGTERM"), gpu_wait.at_most(_GPU_S):
                loop = self._loop()
                if loop is not None:
                    loop.stop(interrupted=_REASON)
                Profile.stop_all(_REASON)
        finally:  # also if an error is raised
            _end_process()

    @guard.contained(FEATURE)
    def _read_signals(self, reader: OwnDescriptor) -> None:
        """Count the signals that arrive, even while the main thread is blocked."""
        received = 0
        while numbers := reader.read(4096):
            if self._is_replaced():
                continue
            first = received == 0
            received += numbers.count(signal.SIGTERM)
            if received - self._sent > 1:
                _end_process()
            elif first and received:
                threading.Thread(target=self._ensure_handled, name="instrument-sigterm", daemon=True).start()
        reader.close()

    @guard.contained(FEATURE)
    def _ensure_handled(self) -> None:
        """Call the handler again if it came too early; end the process if it does not run in time."""
        deadline = time.monotonic() + _GRACE_S
        while not self._saving:
            if self._call_again:
                self._call_again = False
                self._sent += 1
                _thread.interrupt_main(signal.SIGTERM)
            elif self._is_replaced():
                return
            elif time.monotonic() > deadline or self._pipe is None:  # the signal is no longer handled
                _end_process()
            time.sleep(_CHECK_INTERVAL_S)
        time.sleep(_SAVING_S)
        _end_process()

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_signal and c_handler(signal.SIGTERM) == self._c_handler

    def _is_replaced(self) -> bool:
        """Return whether the program has set a handler of its own, in Python or in C, or ignores the signal."""
        return not (self._is_installed() or is_default(signal.SIGTERM))


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_in_recording(frame: FrameType | None) -> bool:
    """Return whether the code that opens and closes windows called ``frame``."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_RECORDING_PATHS) and frame.f_code.co_filename != _ITERATION_FILE:
            return True
        frame = frame.f_back
    return False


def _end_process() -> None:
    """End the process by the signal, from any thread."""
    libc = c_library()
    if libc is not None:
        libc.signal(int(signal.SIGTERM), None)  # signal.signal works only on the main thread
    os.kill(os.getpid(), signal.SIGTERM)
