"""What follows a window, on a thread of its own while training goes on: files, manifest, summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import settings
from ..exporters.capture import Capture
from ..guard import guard
from .manifest import Manifest


class Aftermath:
    """Finishes the windows of one run in order.

    Args:
        manifest: where each window gets its line.
        hint: what to tell the user where there are no files of ours.
    """

    def __init__(self, manifest: Manifest, hint: str) -> None:
        self._manifest = manifest
        self._hint = hint
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._summary: Any = None  # of all windows so far
        self._files: list[Path] = []
        self._unsaid = 0  # recorded windows that no summary spoke of yet

    def later(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run ``call`` after what was handed over before; what it raises is contained."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="instrument")
        self._pending = [future for future in self._pending if not future.done() or future.exception()]
        try:
            self._pending.append(self._worker.submit(self._contained, call, *args, **kwargs))
        except RuntimeError:  # no thread can be started any more: the interpreter is shutting down
            self._contained(call, *args, **kwargs)

    @staticmethod
    def _contained(call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with guard.contained("finishing a window"):
            call(*args, **kwargs)

    def recorded(self, capture: Capture, save: Callable[[], list[Path]], reasons: list[str], **entry: Any) -> None:
        """A window was recorded: read its trace before it is compressed, save the files, add the line."""
        with guard.contained("the summary"):
            if capture.raw is not None and settings.summary:
                from ..traces.kineto import read_kineto
                from ..traces.summary import Timing, merge, summarize

                summary = summarize(read_kineto(capture.raw), Timing.of(entry))
                self._summary = merge([self._summary, summary]) if self._summary is not None else summary
        failure = None
        try:
            files = save()
        except Exception as error:
            failure = error
            files = [capture.raw] if capture.raw is not None and capture.raw.exists() else []
            entry["status"] = entry["status"] if files else "failed"
            reasons = [*reasons, f"{'not compressed' if files else 'not saved'}: {type(error).__name__}: {error}"]
        if files or failure is None:
            self._files += files
            self._unsaid += 1
        self._manifest.add(**entry, reason="; ".join(reasons) or None, files=files)
        if failure is not None:
            guard.failed("saving a window", failure)

    def report(self, hidden: Sequence[str], tell: Callable[[str], None] | None = None) -> None:
        """Tell the summary of the windows so far, once; ``hidden`` are regions inside compiled code."""
        if not (self._unsaid and settings.summary):
            return
        self._unsaid, said = 0, self._unsaid
        from rich.console import Console

        # Not stdout: that may be the program's result. And not by rich, which ends the program on a broken pipe.
        console = Console(stderr=True)
        with console.capture() as captured:
            if self._summary is not None:
                from ..report.terminal import render

                files = [_short(path) for path in self._files]
                folder = _short(self._manifest.folder)
                render(self._summary, files=files, folder=folder, hidden=hidden, console=console)
            elif self._hint:
                windows = "1 window" if said == 1 else f"{said} windows"
                console.print(f"instrument: {windows} {self._hint}", highlight=False, soft_wrap=True)
        if tell is not None:
            tell(captured.get())
            return
        with suppress(OSError, ValueError, AttributeError):  # closed, broken or missing
            sys.stderr.write(captured.get())
            sys.stderr.flush()

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
            for future in self._pending:
                error = future.exception()
                if isinstance(error, Exception):  # let through by `_contained`: strict settings
                    raise error


def _short(path: Path) -> Path:
    """Return ``path`` as seen from the current folder, if it lies below."""
    with suppress(OSError, ValueError):  # elsewhere, or the current folder is gone
        return path.relative_to(Path.cwd())
    return path
