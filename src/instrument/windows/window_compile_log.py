"""`WindowCompileLog`: writes torch's log of what is compiled in a window beside the trace of the window."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from ..compat.compile_trace import follow_compile_trace
from ..guard import guard
from ..part_file import make_folder, part_file, publish
from ..run_folder import COMPILE_LOG

_FEATURE = "the log of torch.compile"


class WindowCompileLog:
    """Writes what torch compiles from `start` to `stop`; no file is written if nothing is compiled.

    Args:
        folder: the folder of the window.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._end: Callable[[], None] | None = None
        self._cleanup = ExitStack()  # removes the part that has no name yet
        self._part: Path | None = None
        self._file: IO[str] | None = None

    @guard.contained(_FEATURE)
    def start(self) -> None:
        """Begin; the program then compiles a little slower, as torch describes what it compiles."""
        self._end = follow_compile_trace(self._write)

    @guard.contained(_FEATURE)
    def _write(self, text: str) -> None:
        if self._end is None or self._process != os.getpid():  # a forked child has the same open file
            return
        if self._part is None:
            make_folder(self._folder)
            self._part = self._cleanup.enter_context(part_file(self._folder / f"rank{COMPILE_LOG}"))
            self._file = self._part.open("w", encoding="utf-8")
        if self._file is not None:
            self._file.write(f"{text}\n")

    @guard.contained(_FEATURE)
    def stop(self) -> None:
        """End the log; may be called again."""
        end, self._end = self._end, None
        if end is not None:
            end()
        if self._file is not None and self._process == os.getpid():
            self._file.close()

    @guard.contained(_FEATURE)
    def save(self, stem: str) -> Path | None:
        """Give the file its name, which begins as that of the trace; return it, if there is one."""
        with self._cleanup:
            if self._part is None:
                return None
            path = self._folder / f"{stem}{COMPILE_LOG}"
            publish(self._part, path)
        return path

    @guard.contained(_FEATURE)
    def discard(self) -> None:
        """End the log without a file."""
        self.stop()
        self._cleanup.close()
