"""Logs events of this library to the standard logger "instrument".

The application chooses the level: ``logging.getLogger("instrument").setLevel(...)``. structlog is not used, as it
imports rich, whose import draws from Python's global random generator.
"""

from __future__ import annotations

import sys
from typing import Any

from . import stderr
from .interrupts import is_interrupt
from .printable import printable


def _log(level: str, event: str, fields: dict[str, Any]) -> None:
    """Log an event as one sentence: "instrument: window not recorded (window=1, reason=...)"."""
    import logging

    try:
        error = fields.pop("exc_info", None)
        details = ", ".join(f"{name}={printable(str(value))}" for name, value in fields.items())
        sentence = f"instrument: {printable(str(event))}{f' ({details})' if details else ''}"
        if not _past_capture(getattr(logging, level), sentence, error):
            logging.getLogger("instrument").log(getattr(logging, level), sentence, exc_info=error, stacklevel=3)
    except Exception as error:  # of the application's handlers and filters, which must not end the loop
        if is_interrupt(error):
            raise
        if level == "WARNING":
            last_resort(event, error)


def _past_capture(level: int, sentence: str, error: Any) -> bool:
    """Write to the original standard error if no handler is configured; return whether this replaces logging.

    Without a handler, `logging.lastResort` would write to the ``sys.stderr`` that the program installed.
    """
    import logging

    file, default, logger = stderr.at_start(), logging.lastResort, logging.getLogger("instrument")
    if file is None or file is sys.stderr or default is None or logger.hasHandlers():
        return False
    if logger.isEnabledFor(level) and level >= default.level:
        caught = error and (type(error), error, error.__traceback__)
        record = logger.makeRecord(logger.name, level, __file__, 0, sentence, (), caught)
        if logger.filter(record):
            logging.StreamHandler(file).handle(record)
    return True


def last_resort(event: str, *errors: Exception) -> None:
    """Write ``event`` to standard error when logging fails; raise nothing."""
    try:
        file = stderr.at_start() or sys.stderr
        file.write(f"instrument: {event}: {', '.join(map(repr, errors))}\n")
    except Exception:
        return


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("INFO", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows by default."""
    _log("WARNING", event, fields)
