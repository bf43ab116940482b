"""`process_trace`: has the traces of a framework's own profiler summarized and diagnosed in another process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import CaptureError
from ...base.guard import exiting, guard
from .finalizer_process import FinalizerProcess

FEATURE = "processing a trace"
_WAIT_S = 60.0  # how long `finish` waits


class TraceProcessor:
    """Sends traces to one process, which starts with the first of them."""

    def __init__(self) -> None:
        self._process: FinalizerProcess | None = None
        self._sent = 0

    def send(self, trace: Path) -> None:
        """Send a trace, without waiting."""
        process = self._process
        if process is None or not process.takes_jobs:
            process = self._process = FinalizerProcess(trace.parent, _handle_answer, lambda process: None)
            atexit.unregister(finish)
            atexit.register(finish)
        self._sent += 1
        process.send({"kind": "trace", "job": self._sent, "path": str(trace)})

    def finish(self) -> None:
        """Wait for the traces that were sent."""
        process, self._process = self._process, None
        if process is not None:
            process.end(_WAIT_S)


def _handle_answer(answer: Mapping[str, Any]) -> None:
    for _, error in answer["errors"]:
        guard.note(FEATURE, CaptureError(error))


_processor = TraceProcessor()


@guard.contained(FEATURE)
def process_trace(trace_path: str | os.PathLike[str]) -> None:
    """Have a trace compressed, summarized and diagnosed by another process; return at once.

    NAME.summary.txt, NAME.diagnosis.json and NAME.diagnosis.html are written beside the trace. A trace that is not
    gzipped is replaced by one that is. No failure reaches the caller: it is logged. The exit of the program waits
    for the files, up to a minute.

    Args:
        trace_path: the file that `torch.profiler.profile.export_chrome_trace` wrote.
    """
    _processor.send(Path(trace_path).absolute())


@guard.contained(FEATURE)
def finish() -> None:
    """Wait until the files of all traces are written, for a minute."""
    with exiting():
        _processor.finish()
