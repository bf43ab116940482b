"""Runs a program in a process of its own that has imported torch already, which saves three seconds.

The process is a child of one that imported torch and nothing of this library. Its program finds torch imported
before its first line: tests of what happens at that import start Python itself (`tests.support.programs`).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
# What Triton's binding says at the exit of a process whose server froze its objects (torch 2.15 on)
_LEAKS = re.compile(r"nanobind: leaked .*refleaks\.html\n?", re.DOTALL)


class _Server:
    def __init__(self, preload: str = "") -> None:
        mine, other = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(_FOLDER)!r})\nimport warm_server\nexec(warm_server.program())"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("INSTRUMENT", "PYTHON"))}
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a look for GPUs that leaves CUDA to the children
        env["LD_PRELOAD"] = preload
        with other:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(other.fileno())], env=env, pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self._connect(mine)
        atexit.register(process.wait)
        atexit.register(process.kill)  # before that
        atexit.register(self._close)

    def _connect(self, connection: socket.socket) -> None:
        self._socket, self._answers = connection, connection.makefile()

    def with_imports(self, imports: Sequence[str]) -> _Server:
        """Return a child of this server that has imported these packages too."""
        child = object.__new__(_Server)
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := f"{folder}/socket")
            listener.listen()
            self._socket.sendall(json.dumps({"address": address, "imports": imports}).encode() + b"\n")
            child._connect(listener.accept()[0])
        atexit.register(child._close)
        return child

    def _close(self) -> None:
        """End the connection, and so the server once it waits for a request."""
        with suppress(OSError):  # closed before, or its server is gone
            self._socket.shutdown(socket.SHUT_RDWR)  # also if a forked process has the socket too
        self._answers.close()
        self._socket.close()

    def run(self, request: Mapping[str, object], timeout: float, on_start: Callable[[int], object]) -> int | None:
        """Run one program; return its exit code, negative for a signal, or None if it took too long.

        ``on_start`` is called with the number of each process: `instrument run` and the program are two.
        """
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        late = threading.Event()
        timers: dict[int, threading.Timer] = {}

        def kill(process: int) -> None:
            late.set()
            os.kill(process, signal.SIGKILL)

        try:
            while "status" not in (answer := json.loads(self._answers.readline())):
                timer = timers[answer["process"]] = threading.Timer(timeout, kill, [answer["process"]])
                timer.start()
                on_start(answer["process"])
        except BaseException:  # such as a test that takes too long: the next request would get this answer
            for process in timers:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._close()
            _server.cache_clear()
            raise
        finally:
            for timer in timers.values():
                timer.cancel()
        return None if late.is_set() else int(answer["status"])


@functools.cache
def _server(process: int, imports: tuple[str, ...], preload: str) -> _Server:
    return _server(process, (), preload).with_imports(imports) if imports else _Server(preload)


def run(
    command: Sequence[str | Path], env: Mapping[str, str], *, cwd: Path | None = None, input: str = "",
    timeout: float = 300, check: bool = False, ranks: int = 0, imports: tuple[str, ...] = (), preload: str = "",
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``command``, which starts this Python, as `subprocess.run` does; its output is captured as text.

    With ``check``, a failure is an `AssertionError` that shows what the program printed. With ``ranks``, that many
    processes run the program, as under torchrun, and a line on stderr says how each that failed ended. With
    ``imports``, it finds these packages imported as well, and with ``preload`` this library loaded, as by
    LD_PRELOAD.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = imports, preload
        done = _run(Path(folder), command, env, cwd, input=input, timeout=timeout, ranks=ranks, server=server)
    if check and done.returncode:
        shown = f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        raise AssertionError(f"{done.args[1]} ended with {done.returncode}\n{shown}")
    return done


class Program:
    """A program that runs beside the test.

    Attributes:
        pid: the number of its process.
    """

    def __init__(self, stdout: Path, ended: Future[subprocess.CompletedProcess[str]], pids: list[int]) -> None:
        self._stdout, self._ended, self._pids = stdout, ended, pids
        self._read = 0

    @property
    def pid(self) -> int:
        return self._pids[-1]

    def readline(self) -> str:
        """Wait for the next line that it prints."""
        while "\n" not in (rest := self._stdout.read_text()[self._read :] if self._stdout.exists() else ""):
            assert not self._ended.done(), self._ended.result()
            time.sleep(0.01)
        line = rest.partition("\n")[0] + "\n"
        self._read += len(line)
        return line

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for its end, for ``timeout`` seconds; then a `concurrent.futures.TimeoutError` is raised."""
        return self._ended.result(timeout)


@contextmanager
def started(
    command: Sequence[str | Path], env: Mapping[str, str], *, cwd: Path | None = None
) -> Iterator[Program]:
    """Run ``command`` as `run` does, beside the block, at whose end it is killed; one at a time, and no `run`."""
    pids: list[int] = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as thread:
        ended = thread.submit(_run, Path(name), command, env, cwd, on_start=pids.append)
        program = Program(Path(name, "stdout"), ended, pids)
        try:
            yield program
        finally:
            while not ended.done():  # the process may start later, or be replaced by another one
                if pids:
                    with suppress(ProcessLookupError):
                        program.send_signal(signal.SIGKILL)
                wait([ended], 0.01)


def _run(
    folder: Path, command: Sequence[str | Path], env: Mapping[str, str], cwd: Path | None, *, input: str = "",
    timeout: float = 300, ranks: int = 0, server: tuple[tuple[str, ...], str] = ((), ""),
    on_start: Callable[[int], object] = lambda number: None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``command``, whose input and output are files in ``folder``."""
    line = [str(part) for part in command]
    assert line[0] == sys.executable, line
    files = {name: folder / name for name in ("stdin", "stdout", "stderr")}
    for path in files.values():
        path.write_text(input if path.name == "stdin" else "")
    request: dict[str, Any] = {name: str(path) for name, path in files.items()}
    request |= {"command": line, "env": dict(env), "cwd": str(cwd or Path.cwd()), "ranks": ranks}
    status = _server(os.getpid(), *server).run(request, timeout, on_start)
    output, errors = (files[name].read_bytes().decode() for name in ("stdout", "stderr"))
    errors = _LEAKS.sub("", errors)
    if status is None:
        raise subprocess.TimeoutExpired(line, timeout, output, errors)
    return subprocess.CompletedProcess(line, status, output, errors)
