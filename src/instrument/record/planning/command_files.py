"""`CommandFiles`: receives the commands of `instrument trigger` in this process; `ask` is the sending side.

Two files in the folder of the run, which only the user of the process can read and write: the command is appended
to one, and the answer to the other.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base import process_id
from ...base.files import LineFile, OwnDescriptor, make_folder
from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.units import integer
from .ranks import chosen_ranks
from .requests import WindowRequest

FEATURE = "commands of instrument trigger"
_COMMANDS, _ANSWERS = ".commands", ".answers"
_NAME = re.compile(rf"\.{process_id.WRITER}\.(?P<machine>[0-9a-f]{{8}})({_COMMANDS}|{_ANSWERS})")
_KEY = "question"  # of a command and its answer
_TIMEOUT_S = 5.0  # for an answer
_POLL_S = 0.2


class CommandFiles:
    """Answers commands on a thread, which looks for them five times a second.

    Args:
        folder: the folder of the run.
        default: the request of a command that says nothing else.
    """

    def __init__(self, folder: Path, default: WindowRequest) -> None:
        self._folder = folder
        self._default = default
        self._process = 0
        self._over = threading.Event()
        self._files: list[LineFile] = []
        self._opened: OwnDescriptor | None = None
        self._request: Callable[[WindowRequest], dict[str, Any]]
        self._window_of: Callable[[str], dict[str, Any]]

    def begin(
        self, request: Callable[[WindowRequest], dict[str, Any]], window_of: Callable[[str], dict[str, Any]]
    ) -> None:
        """Create the files, and answer.

        Args:
            request: called on the thread with each request; returns the answer.
            window_of: called on the thread with the id of a request; returns the window that serves it.

        Raises:
            OSError: the folder takes no files.
        """
        make_folder(self._folder)
        remove_stale_commands(self._folder)
        self._request, self._window_of = request, window_of
        self._process = os.getpid()
        self._over = threading.Event()
        name = f".{process_id.writer()}.{process_id.machine()}{_COMMANDS}"
        commands = self._folder.absolute() / name
        self._files = [LineFile(commands.with_suffix(_ANSWERS)), LineFile(commands)]
        for file in self._files:
            file.create()
        # Kept open: `commands_of` finds the folder of a process by it, and no other file takes its place.
        self._opened = OwnDescriptor(os.open(commands, os.O_RDONLY | os.O_CLOEXEC))
        watch = guard.contained(FEATURE)(self._watch)
        threading.Thread(
            target=watch, args=(self._opened, *self._files, self._over), name="instrument commands", daemon=True
        ).start()

    def end(self) -> None:
        """Take no more commands, and remove the files."""
        if self._process == os.getpid():  # else a forked child
            self._over.set()
            for file in self._files:
                with Suppressed(OSError):
                    file.path.unlink(missing_ok=True)
            if self._opened is not None:
                self._opened.close()

    def _watch(self, opened: OwnDescriptor, answers: LineFile, commands: LineFile, over: threading.Event) -> None:
        try:
            while not over.wait(_POLL_S) and _is_file(commands.path, opened):
                for command in commands.take():
                    answer: Mapping[str, Any] = {}
                    with guard.contained(FEATURE):
                        answer = self._answer(command)
                    with guard.contained(FEATURE):  # a full disk
                        answers.append({**answer, _KEY: command.get(_KEY)})
        finally:
            if not over.is_set():  # nobody is to wait for an answer
                self.end()

    def _answer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command; return an answer with the key ``error`` if it is wrong."""
        if "window_of" in given:
            return self._window_of(str(given["window_of"]))
        try:
            reason = str(given.get("reason") or "instrument trigger")
            steps = given.get("steps")
            active = self._default.active if steps is None else integer("steps", steps, least=1)
            ranks = chosen_ranks(given.get("ranks"))
        except (ValueError, TypeError) as error:
            return {"error": str(error)}
        asked = replace(
            self._default, reason=reason[:500], active=active, ranks=ranks, id=str(given.get("id", ""))[:64]
        )
        return self._request(asked)


def _is_file(path: Path, opened: OwnDescriptor) -> bool:
    """Return whether ``path`` is still the file of an open descriptor, and not one of another user."""
    with Suppressed(OSError):
        return opened.is_valid and os.path.samestat(path.lstat(), os.fstat(opened.number))
    return False


def _is_left(path: Path) -> bool:
    """Return whether a file of commands or answers belongs to a process of this machine that has exited."""
    name = _NAME.fullmatch(path.name)
    return name is not None and process_id.has_exited(name)


def remove_stale_commands(folder: Path) -> None:
    """Remove the files of processes of this machine that were killed."""
    for path in [*folder.glob(f".*{_COMMANDS}"), *folder.glob(f".*{_ANSWERS}")]:
        if _is_left(path):
            with Suppressed(OSError):
                path.unlink(missing_ok=True)


def commands_of(target: str) -> list[Path]:
    """Return the files of commands of a process, or of all processes of a run.

    Args:
        target: the number of a process, or the folder of a run.

    Raises:
        ValueError: ``target`` is neither.
        LookupError: no process takes commands there.
    """
    folder = Path(target)
    if target.isdecimal() and not folder.is_dir():
        return [_commands_of_process(target)]
    if not folder.is_dir():
        raise ValueError(f'"PID|RUN" must be the number of a process or the folder of a run: {target!r}')
    paths = sorted(path for path in folder.glob(f".*{_COMMANDS}") if _NAME.fullmatch(path.name))
    if not paths:
        raise LookupError(f'no process with the trigger "command" records into {target}')
    return paths


def _commands_of_process(process: str) -> Path:
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                path = descriptor.readlink()
                name = _NAME.fullmatch(path.name)
                if name is not None and name["process"] == process:
                    return path
    except OSError as error:
        text = f"cannot look into process {process}: {error.strerror}; give the folder of its run"
        raise LookupError(text) from None
    raise LookupError(f'process {process} has no running profile with the trigger "command"')


def ask(path: Path, command: Mapping[str, Any]) -> dict[str, Any] | None:
    """Append a command to the file ``path`` and return the answer; None if no process of this machine takes it.

    Raises:
        OSError: the process does not answer in time, or belongs to somebody else.
    """
    remove_stale_commands(path.parent)
    name = _NAME.fullmatch(path.name)
    if name is None or name["machine"] != process_id.machine():  # a shared folder may show it late
        return None
    key = uuid.uuid4().hex
    try:
        LineFile(path).append({**command, _KEY: key})
    except FileNotFoundError:
        return None
    answers = LineFile(path.with_suffix(_ANSWERS))
    deadline = time.monotonic() + _TIMEOUT_S
    while path.exists() and not _is_left(path):
        for answer in answers.take():
            if answer.pop(_KEY, None) == key:
                return answer or None
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")
        time.sleep(_POLL_S / 4)
    return None
