"""Processes of one's own to read files in, which leave the caller's script alone.

Those of `multiprocessing` run the caller's ``__main__`` again unless it is guarded, are forbidden to daemons,
and where one of them dies the results of all are lost. These import what they are sent and nothing else.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any


def python(code: str, *arguments: str) -> list[str]:
    """Return the command line of a Python process that runs ``code`` and imports what this process would.

    Python itself would look into the current folder first, where any file may have the name of a module.
    """
    return [sys.executable or "", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", *arguments]


class Processes(ThreadPoolExecutor):
    """Calls functions in fresh Python processes; a thread waits for each.

    A function travels by name, so that it has to be importable and not of ``__main__``. One that kills its
    process fails alone. The end of a ``with`` block waits for nothing: collect the results inside.

    Args:
        count: how many processes.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle = [self._start() for _ in range(count)]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """Call the function with arguments that pickle; the future raises RuntimeError if it fails."""
        return super().submit(self._call, pickle.dumps((function, args)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """End the processes, in the middle of their work if they have any."""
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
            python("from instrument.traces.worker import serve; serve()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1 << 20,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # idle ones spin while the others would work
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
