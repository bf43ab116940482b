"""Runs a program that may fail, crash, hang or say anything, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...printable import printable

_GRACE_S = 5.0  # a profiler that is asked to end still removes what it left


class Ended(NamedTuple):
    """How a program ended; ``code`` is None where it took too long."""

    code: int | None
    output: str

    def how(self, what: str) -> str:
        """Return in words how ``what`` ended, with the last line that it printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        said = f": {printable(lines[-1][:300])}" if lines else ""
        if self.code is None:
            return f"{what} did not end in time{said}"
        if self.code < 0:
            return f"{what} died of {signal.Signals(-self.code).name}{said}"
        return f"{what} ended with code {self.code}{said}"


def run(command: Sequence[str], folder: Path, limit_s: float, environ: Mapping[str, str]) -> Ended:
    """Run ``command`` and return how it ended; what it started ends with it.

    Args:
        command: the program and its arguments.
        folder: an empty folder, in which it runs, so that it meets no file of the user's; what it prints goes to
            a file there: a pipe would be kept open by whatever it left behind.
        limit_s: how long it may take.
        environ: its environment.

    Raises:
        OSError: it cannot be started, or the file not be written.
    """
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environ,
            start_new_session=True,
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(limit_s)
        finally:
            if child.returncode is None:
                _end(child)
    return Ended(code, log.read_bytes().decode(errors="replace"))


def _end(child: subprocess.Popen[bytes]) -> None:
    _signal(child, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    _signal(child, getattr(signal, "SIGKILL", signal.SIGTERM))  # it, or what it left
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, number)  # it leads a group of its own
        else:
            child.kill()
