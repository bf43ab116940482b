"""The loop of a child process that reads files; it imports little, because the parent waits for it."""

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
