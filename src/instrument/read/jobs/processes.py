"""Reads files in child processes that do not import the caller's script: the parent's side and the child's.

`ProcessPoolExecutor` imports the caller's ``__main__`` again, cannot run in daemonic processes, and loses the
results of all workers if one dies; so do the pools that are built on `multiprocessing`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...base.errors import TraceError

if TYPE_CHECKING:
    from ..tables.trace import Trace


def read_or_reason(read: Callable[[Path], Trace], path: Path) -> Trace | str:
    """Return the trace that ``read`` returns, or why it failed: some errors cannot be pickled."""
    try:
        return read(path)
    except TraceError as error:
        return error.reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def serve() -> None:
    """Make the calls that arrive on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the functions must not mix with the answers
    sys.stderr = None  # progress bars of several processes would overwrite each other
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            _send(answers, *_call_or_reason(*pickle.load(sys.stdin.buffer)))


def _call_or_reason(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[bytes, list[pickle.PickleBuffer]]:
    columns: list[pickle.PickleBuffer] = []
    try:
        answer = function(*args), ""
        return pickle.dumps(answer, 5, buffer_callback=columns.append), columns
    except Exception as error:
        return pickle.dumps((None, f"{type(error).__name__}: {error}")), []


def _send(stream: IO[bytes], answer: bytes, columns: list[pickle.PickleBuffer]) -> None:
    """Send an answer, followed by the raw memory of its columns."""
    pickle.dump((answer, [column.raw().nbytes for column in columns]), stream)
    for column in columns:
        stream.write(column.raw())
    stream.flush()


def python(code: str, *arguments: str) -> list[str]:
    """Return the command line of a Python process that runs ``code`` with the module search path of this one.

    By default Python searches the current folder first, where any file may have the name of a module.
    """
    return [sys.executable or "", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", *arguments]


class Processes(ThreadPoolExecutor):
    """Calls functions in new Python processes, each driven by a thread.

    Functions are pickled by name: they must be importable, and not from ``__main__``. A function that kills its
    process fails alone. The end of a ``with`` block does not wait for results: collect them inside.

    Args:
        count: the number of processes.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle = [self._start() for _ in range(count)]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """Call the function with picklable arguments; the future raises RuntimeError if the call fails."""
        return super().submit(self._call, pickle.dumps((function, args)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Kill the processes, even while they work."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        for process in self._all:
            process.kill()
        super().shutdown(wait=wait)
        for process in self._all:
            process.communicate()

    def _call(self, task: bytes) -> Any:
        process = self._idle.pop() if self._idle else self._start()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(task)
            process.stdin.flush()
            answer, error = _receive(process.stdout)
        except (EOFError, BrokenPipeError) as broken:
            raise RuntimeError(f"the process that read it ended with exit code {process.wait()}") from broken
        self._idle.append(process)
        if error:
            raise RuntimeError(error)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            python("from instrument.read.jobs.processes import serve; serve()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1 << 20,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its idle threads would spin and slow down the others
        )
        self._all.append(process)
        return process


def _receive(stream: IO[bytes]) -> Any:
    answer, sizes = pickle.load(stream)
    columns = [bytearray(size) for size in sizes]
    for column in columns:
        rest = memoryview(column)
        while len(rest):
            count = stream.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            rest = rest[count:]
    return pickle.loads(answer, buffers=columns)
