"""torch's structured log of compilation, which ``TORCH_TRACE`` writes, while the program runs."""

from __future__ import annotations

import logging
from collections.abc import Callable


class _Handler(logging.Handler):
    """Calls ``write`` with the text of each record."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


def follow_compile_trace(write: Callable[[str], None]) -> Callable[[], None] | None:
    """Have ``write`` called with the text of each record, on the thread that compiles; it must not raise.

    Returns:
        A function that ends this; None if this version of torch lacks the log.
    """
    try:
        from torch._logging._internal import TorchLogsFormatter, trace_log

        formatter = TorchLogsFormatter(trace=True)
    except (ImportError, TypeError):
        return None
    handler = _Handler(write)
    handler.setFormatter(formatter)
    trace_log.addHandler(handler)
    return lambda: trace_log.removeHandler(handler)
