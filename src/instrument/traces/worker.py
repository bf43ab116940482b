"""What a process that reads files for another does; it imports little, for imports are waited for."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import TraceError

if TYPE_CHECKING:
    from .trace import Trace


def attempt(read: Callable[[Path], Trace], path: Path) -> Trace | str:
    """Return what ``read`` does, or why it failed: not all errors can travel to another process."""
    try:
        return read(path)
    except TraceError as error:
        return error.reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def serve() -> None:
    """Do what the standard input asks for until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not get among them
    sys.stderr = None  # the progress bars of several would overwrite each other
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            _send(answers, *_do(*pickle.load(sys.stdin.buffer)))


def _do(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    columns: list[pickle.PickleBuffer] = []
    try:
        answer = function(*args), ""
        return pickle.dumps(answer, 5, buffer_callback=columns.append), columns
    except Exception as error:
        return pickle.dumps((None, f"{type(error).__name__}: {error}")), []


def _send(stream: IO[bytes], answer: bytes, columns: list[pickle.PickleBuffer]) -> None:
    """Send an answer and, after it, its columns just as they lie in memory."""
    pickle.dump((answer, [column.raw().nbytes for column in columns]), stream)
    for column in columns:
        stream.write(column.raw())
    stream.flush()
