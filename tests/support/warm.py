"""Runs a program in a process of its own that has imported torch already, which saves three seconds.

The process is a child of one that imported torch and nothing of this library. Its program finds torch imported
before its first line: tests of what happens at that import start Python itself (`tests.support.programs`).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


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

    def run(self, request: Mapping[str, object], timeout: float) -> int | None:
        """Run one program; return its exit code, negative for a signal, or None if it took too long."""
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
    timeout: float = 300, check: bool = False, ranks: int = 0, imports: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``command``, which starts this Python, as `subprocess.run` does; its output is captured as text.

    With ``check``, a failure is an `AssertionError` that shows what the program printed. With ``ranks``, that many
    processes run the program, as under torchrun. With ``imports``, it finds these packages imported as well. The
    library that ``env`` names in LD_PRELOAD is loaded.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
    """
    line = [str(part) for part in command]
    assert line[0] == sys.executable, line
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
        for path in files.values():
            path.write_text(input if path.name == "stdin" else "")
        request: dict[str, Any] = {name: str(path) for name, path in files.items()}
        request |= {"command": line, "env": dict(env), "cwd": str(cwd or Path.cwd()), "ranks": ranks}
        status = _server(os.getpid(), imports, env.get("LD_PRELOAD", "")).run(request, timeout)
        output, errors = (files[name].read_bytes().decode() for name in ("stdout", "stderr"))
    if status is None:
        raise subprocess.TimeoutExpired(line, timeout, output, errors)
    if check and status:
        raise AssertionError(f"{line[1]} ended with {status}\nstdout:\n{output}\nstderr:\n{errors}")
    return subprocess.CompletedProcess(line, status, output, errors)
