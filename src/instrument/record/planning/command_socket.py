"""`CommandSocket`: lets `instrument trigger` open windows in this process; and the other end, which it uses.

A Unix socket in the folder of the run: whoever may connect is the user of the process, on the same machine.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.arguments import integer
from ...base.descriptors import OwnDescriptor, OwnSocket
from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.part_file import make_folder
from .ranks import chosen_ranks
from .requests import WindowRequest

FEATURE = "commands of instrument trigger"
_PREFIX, _SUFFIX = ".instrument-", ".sock"
_LIMIT_BYTES = 1 << 16  # of a command or an answer
_TIMEOUT_S = 5.0  # for the other end to send or take one
_OWN_DESCRIPTORS = Path("/proc/self/fd")


class CommandSocket:
    """Answers commands on a thread, which sleeps until one comes.

    Args:
        folder: the folder of the run.
        default: the request of a command that says nothing else.
    """

    def __init__(self, folder: Path, default: WindowRequest) -> None:
        self._folder = folder
        self._default = default
        self._name = ""
        self._process = 0
        self._place: OwnDescriptor | None = None
        self._socket: OwnSocket | None = None
        self._request: Callable[[WindowRequest], dict[str, Any]]
        self._window_of: Callable[[str], dict[str, Any]]

    def begin(
        self, request: Callable[[WindowRequest], dict[str, Any]], window_of: Callable[[str], dict[str, Any]]
    ) -> None:
        """Listen.

        Args:
            request: called on the thread with each request; returns the answer.
            window_of: called on the thread with the id of a request; returns the window that serves it.

        Raises:
            OSError: the folder takes no socket.
        """
        self._name = f"{_of_this_machine()}{os.getpid()}{_SUFFIX}"
        self._process = os.getpid()
        make_folder(self._folder)
        # Kept open: `find` finds the folder of a process by it.
        self._place = OwnDescriptor(os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC))
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            remove_stale_sockets(self._folder)
            new = self._folder / f".new{self._name}"  # another rank would take one that refuses for a stale one
            new.unlink(missing_ok=True)  # of a killed process that had this number
            server.bind(_address(self._folder, new.name, self._place.number))
            new.chmod(0o600)  # before anybody can connect
            server.listen()
            new.replace(self._folder / self._name)
        except BaseException:
            server.close()
            raise
        self._socket, self._request, self._window_of = OwnSocket(server), request, window_of
        answer = guard.contained(FEATURE)(self._answer_all)
        threading.Thread(target=answer, args=(self._socket,), name="instrument commands", daemon=True).start()

    def end(self) -> None:
        """Stop listening, and remove the socket's file."""
        if self._process != os.getpid():  # a forked child
            return
        listening, self._socket = self._socket, None
        if listening is not None and listening.is_valid:
            with Suppressed(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listening.close()
            with Suppressed(OSError):
                (self._folder / self._name).unlink()
        if self._place is not None:
            self._place.close()

    def _answer_all(self, listening: OwnSocket) -> None:
        try:
            while listening.is_valid:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    if self._socket is listening:  # else `end` was called
                        raise
                    return
                with connection, guard.contained(FEATURE), Suppressed(OSError):
                    connection.settimeout(_TIMEOUT_S)
                    answer = self._answer(_received(connection))
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        finally:
            if self._socket is listening:  # nobody is to wait for an answer
                self.end()

    def _answer(self, command: bytes) -> dict[str, Any]:
        """Carry out a command; return an answer with the key ``error`` if it is wrong."""
        try:
            given = json.loads(command)
            if not isinstance(given, dict):
                raise ValueError("a command must be an object")
            if "window_of" in given:
                return self._window_of(str(given["window_of"]))
            reason = str(given.get("reason") or "instrument trigger")
            steps = given.get("steps")
            active = self._default.active if steps is None else integer("steps", steps, least=1)
            ranks = chosen_ranks(given.get("ranks"))
        except (ValueError, TypeError, RecursionError) as error:
            return {"error": str(error)}
        asked = replace(
            self._default, reason=reason[:500], active=active, ranks=ranks, id=str(given.get("id", ""))[:64]
        )
        return self._request(asked)


def _address(folder: Path, name: str, descriptor: int) -> str:
    """Return an address of at most 107 bytes, as sockets have it, whatever the length of the path is."""
    return str((_OWN_DESCRIPTORS / str(descriptor) if _OWN_DESCRIPTORS.is_dir() else folder) / name)


def _of_this_machine() -> str:
    """Return how the names of the sockets of this machine begin; only here is a refusal a sign of the end."""
    return f"{_PREFIX}{socket.gethostname()}-"


def remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets of processes of this machine that were killed."""
    for path in folder.glob(f"{_of_this_machine()}*{_SUFFIX}"):
        with suppress(OSError), _connected(path):
            pass


def _received(connection: socket.socket) -> bytes:
    """Return what the other end sent before a newline."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LIMIT_BYTES:
        more = connection.recv(1 << 12)
        if not more:
            break
        data += more
    return data


def sockets_of(target: str) -> list[Path]:
    """Return the sockets of a process, or of all processes of a run.

    Args:
        target: the number of a process, or the folder of a run.

    Raises:
        ValueError: ``target`` is neither.
        LookupError: nothing listens there.
    """
    folder = Path(target)
    if target.isdecimal() and not folder.is_dir():
        return [_socket_of(int(target))]
    if not folder.is_dir():
        raise ValueError(f'"PID|RUN" must be the number of a process or the folder of a run: {target!r}')
    found = sorted(path for path in folder.iterdir() if path.name.startswith(_PREFIX) and path.suffix == _SUFFIX)
    if not found:
        raise LookupError(f'no process with the trigger "command" records into {target}')
    return found


def _socket_of(process: int) -> Path:
    places = []
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                places.append(descriptor.readlink())
    except OSError as error:
        text = f"cannot look into process {process}: {error.strerror}; give the folder of its run"
        raise LookupError(text) from None
    for place in places:
        if place.is_absolute() and place.is_dir():
            for path in place.glob(f"{_PREFIX}*-{process}{_SUFFIX}"):
                return path
    raise LookupError(f'process {process} has no running profile with the trigger "command"')


def ask(path: Path, command: dict[str, Any]) -> dict[str, Any] | None:
    """Send a command to the socket ``path`` and return the answer; None if nobody listens there any more.

    Raises:
        OSError: the process does not answer in time, or belongs to somebody else.
        ValueError: the answer is not JSON.
    """
    with _connected(path) as connection:
        if connection is None:
            return None
        connection.sendall(json.dumps(command).encode() + b"\n")
        answer = json.loads(_received(connection) or b"null")
        return answer if isinstance(answer, dict) else None


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket | None]:
    place = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                connection.connect(_address(path.parent, path.name, place))
            except (ConnectionRefusedError, FileNotFoundError):  # left by a killed process
                if path.name.startswith(_of_this_machine()):
                    path.unlink(missing_ok=True)
                yield None
                return
            yield connection
    finally:
        os.close(place)
