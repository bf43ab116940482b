"""Runs a tool that runs the program: signals reach the program, and its exit code is returned."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def run(command: Sequence[str], environment: Mapping[str, str], program: Sequence[str]) -> int:
    """Run ``command``, which starts ``program``, and return the exit code: 128 plus the number of a signal.

    A signal makes the tools end their recording, and some then leave the program running. The tool therefore runs
    in a session of its own without signals, and the program gets each signal once, as it does without the tool.
    """
    with _forward_signals(program) as follow:
        child = subprocess.Popen(list(command), env=dict(environment), start_new_session=True)
        follow(child)
        code = child.wait()
    return code if code >= 0 else 128 - code


class _Signals:
    """Forwards signals to the program, including those that arrive before it starts."""

    def __init__(self, program: Sequence[str]) -> None:
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._early_signals: list[int] = []

    def follow(self, child: subprocess.Popen[bytes]) -> None:
        """Send signals to the program that ``child`` runs from now on."""
        self._child = child
        for number in self._early_signals:
            self(number)

    def __call__(self, number: int, _: FrameType | None = None) -> None:
        if self._child is None:
            self._early_signals.append(number)
            return
        with suppress(ProcessLookupError, PermissionError):
            tool = self._child.pid
            found = _find(tool, lambda process: _runs(process, self._program))
            os.kill(found or _find_exec_successor(tool), number)


@contextmanager
def _forward_signals(program: Sequence[str]) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    signals, before = _Signals(program), {}
    if threading.current_thread() is threading.main_thread():
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, signals)
    try:
        yield signals.follow
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find(root: int, wanted: Callable[[int], bool]) -> int | None:
    """Return the first process for which ``wanted`` is true, out of ``root`` and its descendants."""
    level = [root]
    while level:
        for process in level:
            if wanted(process):
                return process
        level = [child for process in level for child in _children(process)]
    return None


def _find_exec_successor(root: int) -> int:
    """Return the first process that is not the tool's: the program after it called ``exec``."""
    home = _program_folder(root)
    found = _find(root, lambda process: _program_folder(process) not in (home, None)) if home is not None else None
    return found or root


def _program_folder(process: int) -> Path | None:
    """Return the folder of the program that a process runs."""
    with suppress(OSError):
        return Path(f"/proc/{process}/exe").readlink().parent
    return None


def _runs(process: int, program: Sequence[str]) -> bool:
    """Return whether a process runs ``program``, directly or by the interpreter of a script."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return False
    more = len(words) - len(program)
    if more not in (0, 1):
        return False
    return words[more + 1 :] == list(program[1:]) and Path(words[more]).name == Path(program[0]).name


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
