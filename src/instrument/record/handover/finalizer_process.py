"""`FinalizerProcess`: in the training process, starts `finalizer_main` as a process, sends jobs, gets answers."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base.descriptors import OwnSocket
from ...base.guard import guard
from ...base.interrupts import Suppressed, is_interrupt
from .background_process import BackgroundProcess

FEATURE = "finishing a window"
_CODE = """\
import sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path += [folder for folder in {path!r} if folder not in sys.path]
spec = spec_from_file_location("instrument", {init!r}, submodule_search_locations=[{package!r}])
sys.modules["instrument"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from instrument.finish.finalizer_main import main
main({parent})
"""
# Isolated mode ignores the current folder, and the package is loaded from the folder of this file.

_PACKAGE = Path(__file__).resolve().parents[2]
_BUFFER_BYTES = 1 << 15  # bytes that the connection buffers
_KILL_S = 5  # time limit for the exit of the killed process
_TOO_LONG = "was killed because it took too long"
_FLUSH_S = 0.1  # how often `end` tries to send waiting jobs
_WAKE = b'{"kind": "wake", "job": 0}\n'
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a dead process must not end this one with SIGPIPE
_ENVIRONMENT = {
    "INSTRUMENT": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",
}


class FinalizerProcess:
    """Sends jobs to a process that it starts, and passes on the answers, on a thread.

    Without a thread, as at exit from Python 3.12 on, `end` passes on all answers.

    The process has its own session, so that Ctrl-C at the terminal does not reach it, and is not a child of this
    process where possible (`BackgroundProcess`). It exits when its work is done after `close` or `give_up`, or
    when this process has exited. It holds none of this process's files open.

    Args:
        on_answer: called with each answer, a mapping with the number of its ``job``.
        on_exit: called after the last answer.

    Attributes:
        closed: whether no more jobs are accepted.
        ended: how the process ended, in words.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, on_answer: Callable[[dict[str, Any]], None], on_exit: Callable[[FinalizerProcess], None]
    ) -> None:
        self._on_answer = on_answer
        self._on_exit = on_exit
        self._lock = threading.RLock()  # held while sending; never waited for
        self._unsent: deque[bytes] = deque()
        self._unanswered: deque[int] = deque()  # the sizes of jobs that were sent
        self._incomplete_answer = b""  # of an incomplete answer
        self._failure: str | None = None  # in words
        self._deadline: float | None = None  # for `end`, when it receives the answers itself
        self._awaited = False  # by `end`
        self._thread: threading.Thread | None = None
        self.closed = False
        self.ended: str | None = None
        mine, other = socket.socketpair()
        self._socket = OwnSocket(mine)
        try:
            python = [sys.executable or "", *(["-B"] if sys.dont_write_bytecode else []), "-I"]
            self._process = BackgroundProcess([*python, "-c", _code()], other, _environment())
            self._thread = self._start_thread()
        except BaseException:
            self._socket.close()  # the process then exits
            raise
        finally:
            other.close()
        _running.add(self)

    def _start_thread(self) -> threading.Thread | None:
        receive = guard.contained(FEATURE)(self._receive)
        thread = threading.Thread(target=receive, name="instrument", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread

    def send(self, job: Mapping[str, Any]) -> None:
        """Send a job without blocking; it waits in a queue while the connection is full.

        Raises:
            Exception: sending failed, and the process is abandoned.
        """
        try:
            self._unsent.append(json.dumps(job).encode() + b"\n")
            self._flush()
            self._share_cpu()
        except Exception as error:
            if not is_interrupt(error):
                self.give_up(error)
            raise

    def close(self) -> None:
        """Let the process end when its work is done."""
        if not self.closed:
            self.send({"kind": "end", "job": 0})
            self.closed = True

    def end(self, timeout: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until the work is done and all answers are passed on; kill the process after ``timeout`` s.

        ``waiting`` is called ten times a second meanwhile. The process no longer yields the CPU to this one.
        """
        self._awaited = True
        self.close()
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._share_cpu()
                self._flush()  # a signal handler that interrupted `_flush` on this thread has to do it
                self._thread.join(min(left, _FLUSH_S))
                waiting()
            if self._thread.is_alive():
                self._kill(_TOO_LONG)
                self._thread.join(_KILL_S)
                return
        if self.ended is None:  # there was no thread, or it failed
            self._deadline = deadline
            self._receive()

    def give_up(self, error: Exception) -> None:
        """Send no more jobs because of ``error``; the process exits after those that it has."""
        self.closed = True
        self._failure = self._failure or f"was abandoned: {error!r}"
        with Suppressed(OSError):  # the process is gone
            if self._connected():
                self._socket.shutdown(socket.SHUT_WR)

    def _share_cpu(self) -> None:
        """Give the process little of the CPU, or its share while `end` waits.

        Each call may be refused. Without a thread nothing repeats it in `end`, so the process keeps its share.
        """
        if self.ended is None:  # later, another process may have its number
            waited_for = self._awaited or self._thread is None
            (self._process.take_share if waited_for else self._process.yield_cpu)()

    def _kill(self, why: str) -> None:
        self.closed = True
        if self.ended is None:
            self._failure = self._failure or why
            self._process.kill()

    def _flush(self, *, blocking: bool = False) -> None:
        """Send the jobs that the connection has room for; with ``blocking``, also one that exceeds its buffer.

        Never waits for another thread: the sending thread checks for new jobs afterwards. A signal handler may
        call this on the thread that it interrupted here, and sends the rest.
        """
        while self._next_job_fits() and self._lock.acquire(blocking=False):
            try:
                with Suppressed(IndexError):  # a signal handler sent it
                    self._send_next(blocking)
            finally:
                self._lock.release()

    def _next_job_fits(self) -> bool:
        with Suppressed(IndexError):  # no job is left
            size = len(self._unsent[0])
            return not self._unanswered or sum(self._unanswered.copy()) + size <= _BUFFER_BYTES
        return False

    def _send_next(self, blocking: bool) -> None:
        if not self._next_job_fits():
            return
        large = len(self._unsent[0]) > _BUFFER_BYTES
        data = self._unsent.popleft() if blocking or not large else _WAKE  # to be answered
        self._unanswered.append(len(data))
        self._write(data)

    def _write(self, data: bytes) -> None:
        with Suppressed(ConnectionError):  # the process has exited; `_receive` handles it
            self._set_timeout()
            if self._connected():
                self._socket.sendall(data, _NO_SIGNAL)

    def _receive(self) -> None:
        for _ in range(2):
            try:
                self._read()
                break
            except Exception as error:
                if is_interrupt(error):
                    raise
                if isinstance(error, TimeoutError):
                    self._deadline = time.monotonic() + _KILL_S
                    self._kill(_TOO_LONG)
                else:
                    self.give_up(error)
                    guard.note(FEATURE, error)
        else:
            self._kill(_TOO_LONG)
        ended = self._process.wait()
        self.ended = self._failure or ended  # before the connection closes: a job may come now
        self._socket.close()
        _running.discard(self)
        self._on_exit(self)

    def _read(self) -> None:
        """Pass on answers until the connection ends."""
        while True:
            while b"\n" in self._incomplete_answer:
                line, _, rest = self._incomplete_answer.partition(b"\n")
                answer = _parse_answer(line)
                asked = "job" in answer
                if asked or "errors" in answer:  # also of work that no job asked for, such as an upload
                    self._on_answer(answer)
                else:
                    self._process.note(answer)
                    self._share_cpu()
                self._incomplete_answer = rest  # only now: an answer that failed is tried again
                if asked:
                    self._continue_sending()
            data = self._receive_bytes()
            if not data:
                return
            self._incomplete_answer += data

    def _continue_sending(self) -> None:
        """Send waiting jobs, also a large one, after an answer."""
        with Suppressed(IndexError):  # the answer of a job that this process did not send
            self._unanswered.popleft()
        self._flush(blocking=True)

    def _set_timeout(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))

    def _receive_bytes(self) -> bytes:
        with Suppressed(ConnectionError):  # the process is gone
            self._set_timeout()
            if self._connected():
                return self._socket.recv(1 << 12)
        return b""

    def _connected(self) -> bool:
        if self._socket.is_valid:
            return True
        self._kill("cannot be reached, as the program closed the connection")
        return False

    def detach(self) -> None:
        """Close the connection in a forked child."""
        self._socket.close()
        self._process.detach()


def _parse_answer(line: bytes) -> dict[str, Any]:
    """Return an answer; empty for an incomplete line of a killed process, and for other output."""
    with Suppressed(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict):
            return answer
    return {}


def _code() -> str:
    path = [folder for folder in sys.path if Path(folder).is_absolute()]
    package = str(_PACKAGE)
    return _CODE.format(path=path, init=str(_PACKAGE / "__init__.py"), package=package, parent=os.getpid())


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT")}
    return kept | _ENVIRONMENT


_running: weakref.WeakSet[FinalizerProcess] = weakref.WeakSet()


@guard.contained(FEATURE)
def _detach_all() -> None:
    for process in list(_running):
        process.detach()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
