"""Events of the library, in the standard logger "instrument".

The application decides what is shown: ``logging.getLogger("instrument").setLevel(...)``. Not through structlog: it
imports rich, which draws from Python's global random generator when it is imported.
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
    except Exception as error:  # the application's own handlers and filters: what they raise is not for the loop
        if is_interrupt(error):
            raise
        if level == "WARNING":
            last_resort(event, error)


def _past_capture(level: int, sentence: str, error: Any) -> bool:
    """Write to standard error as at the start, where logging would write to what the program put in its place.

    It would, as `logging.lastResort` does, where no handler is configured.
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
    """Write ``event`` to standard error, where logging fails; raise nothing."""
    try:
        file = stderr.at_start() or sys.stderr
        file.write(f"instrument: {event}: {', '.join(map(repr, errors))}\n")
    except Exception:
        return


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("INFO", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows unless told otherwise."""
    _log("WARNING", event, fields)
