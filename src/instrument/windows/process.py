"""`FinalizerProcess`: a Python process that finishes recorded windows, so that training does not."""

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

from ..descriptors import OwnSocket
from ..guard import guard
from ..interrupts import Suppressed, is_interrupt
from .background import BackgroundProcess

FEATURE = "finishing a window"
_CODE = """\
import os, sys
if hasattr(os, "nice"):
    os.nice(19)
from importlib.util import module_from_spec, spec_from_file_location
sys.path += [folder for folder in {path!r} if folder not in sys.path]
spec = spec_from_file_location("instrument", {init!r}, submodule_search_locations=[{package!r}])
sys.modules["instrument"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from instrument.windows.finalize import main
main({parent})
"""
# Training comes first, also before the imports, which are half a second of work. Isolated, Python finds the
# standard library and installed packages first, whatever lies in the current folder; the package is the one that
# runs here.

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOM = 1 << 15  # bytes that the connection takes without being read
_KILL_S = 5  # how long its end may take once it is killed
_TOO_LONG = "was killed as it took too long"
_FLUSH_S = 0.1  # how often `end` looks for jobs that have room now
_WAKE = b'{"kind": "wake", "job": 0}\n'
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a process that is gone must not end this one with SIGPIPE
_ENVIRONMENT = {
    "INSTRUMENT": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",
}


class FinalizerProcess:
    """Sends jobs to a process of its own, and hands over the answers on a thread.

    Where no thread can be started, as at exit from Python 3.12 on, `end` hands over all answers.

    The process is in a session of its own, so that Ctrl-C at the terminal does not reach it, and no child of this
    one where that is possible (`BackgroundProcess`). Once its work is done it ends after `close` or `give_up`, or
    when this process is gone. It holds none of this process's files open.

    Args:
        answered: called with each answer, a mapping with the number of its ``job``.
        gone: called after the last answer.

    Attributes:
        closed: whether it takes no more jobs.
        ended: how the process ended, in words.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, answered: Callable[[dict[str, Any]], None], gone: Callable[[FinalizerProcess], None]
    ) -> None:
        self._answered = answered
        self._gone = gone
        self._lock = threading.RLock()  # held by who sends; nobody waits for it
        self._unsent: deque[bytes] = deque()
        self._unanswered: deque[int] = deque()  # the sizes of jobs that were sent
        self._rest = b""  # of an answer that is not whole so far
        self._failed: str | None = None  # in words
        self._deadline: float | None = None  # by which `end`, where it receives the answers itself, returns
        self.closed = False
        self.ended: str | None = None
        mine, theirs = socket.socketpair()
        self._socket = OwnSocket(mine)
        try:
            python = [sys.executable or "", *(["-B"] if sys.dont_write_bytecode else []), "-I"]
            self._process = BackgroundProcess([*python, "-c", _code()], theirs, _environment())
            self._thread = self._start_thread()
        except BaseException:
            self._socket.close()  # which ends the process
            raise
        finally:
            theirs.close()
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
        """Send a job without blocking; what the connection has no room for is sent when there is some.

        Raises:
            Exception: what failed here; the process was given up.
        """
        try:
            self._unsent.append(json.dumps(job).encode() + b"\n")
            self._flush()
        except Exception as error:
            if not is_interrupt(error):
                self.give_up(error)
            raise

    def close(self) -> None:
        """Let the process end when its work is done."""
        if not self.closed:
            self.send({"kind": "end", "job": 0})
            self.closed = True

    def end(self, timeout: float) -> None:
        """Wait until its work is done and all answers are handed over; after ``timeout`` seconds kill it."""
        self.close()
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._flush()  # in a signal handler that interrupted this thread in `_flush` no other can
                self._thread.join(min(left, _FLUSH_S))
            if self._thread.is_alive():
                self._kill(_TOO_LONG)
                self._thread.join(_KILL_S)
                return
        if self.ended is None:  # there was no thread, or it failed
            self._deadline = deadline
            self._receive()

    def give_up(self, error: Exception) -> None:
        """Send nothing more because of ``error``: the process ends once it has done what it was sent."""
        self.closed = True
        self._failed = self._failed or f"was given up: {error!r}"
        with Suppressed(OSError):  # the process is gone
            if self._connected():
                self._socket.shutdown(socket.SHUT_WR)

    def _kill(self, why: str) -> None:
        self.closed = True
        if self.ended is None:
            self._failed = self._failed or why
            self._process.kill()

    def _flush(self, *, waits: bool = False) -> None:
        """Send what there is room for; with ``waits`` also a job that is larger than the room.

        It waits for no other thread: the one that sends looks again afterwards. A signal handler may call this on
        the thread that it interrupted here, and sends what is left.
        """
        while self._fits() and self._lock.acquire(blocking=False):
            try:
                with Suppressed(IndexError):  # such a handler sent it
                    self._send_next(waits)
            finally:
                self._lock.release()

    def _fits(self) -> bool:
        with Suppressed(IndexError):  # there is none, or another thread sent it
            size = len(self._unsent[0])
            return not self._unanswered or sum(self._unanswered.copy()) + size <= _ROOM
        return False

    def _send_next(self, waits: bool) -> None:
        if not self._fits():
            return
        large = len(self._unsent[0]) > _ROOM
        data = self._unsent.popleft() if waits or not large else _WAKE  # whose answer the other thread waits for
        self._unanswered.append(len(data))
        self._write(data)

    def _write(self, data: bytes) -> None:
        with Suppressed(ConnectionError):  # the process is gone, which is noticed where answers are received
            self._limit()
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
        self.ended = self._failed or ended  # before the connection closes: a job may come now
        self._socket.close()
        _running.discard(self)
        self._gone(self)

    def _read(self) -> None:
        """Hand over the answers that come, until the connection ends."""
        while True:
            while b"\n" in self._rest:
                line, _, rest = self._rest.partition(b"\n")
                answer = _parsed(line)
                asked = "job" in answer
                if asked:
                    self._answered(answer)
                else:
                    self._process.exit_code = answer.get("exit_code", self._process.exit_code)
                self._rest = rest  # not before: an answer that could not be parsed or handed over is tried again
                if asked:
                    self._went_on()
            data = self._received()
            if not data:
                return
            self._rest += data

    def _went_on(self) -> None:
        """A job was answered: send what there is room for, also a large one."""
        with Suppressed(IndexError):  # it is the line of a window, for which nobody asked
            self._unanswered.popleft()
        self._flush(waits=True)

    def _limit(self) -> None:
        if self._deadline is not None:
            self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))

    def _received(self) -> bytes:
        with Suppressed(ConnectionError):  # the process is gone
            self._limit()
            if self._connected():
                return self._socket.recv(1 << 12)
        return b""

    def _connected(self) -> bool:
        if self._socket.own:
            return True
        self._kill("cannot be reached, as the program closed the connection")
        return False

    def forked(self) -> None:
        """Let go of the process in a fork of this one."""
        self._socket.close()
        self._process.forked()


def _parsed(line: bytes) -> dict[str, Any]:
    """Return an answer, empty for half a line of a process that was killed and for what is not Python prints."""
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
def _forked() -> None:
    for process in list(_running):
        process.forked()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
