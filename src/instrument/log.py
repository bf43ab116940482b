"""Logs events of this library to the standard logger "instrument", as sentences or as JSON.

The application chooses the level: ``logging.getLogger("instrument").setLevel(...)``. Each record has the name of
the event and its fields as attributes, which formatters such as structlog's ``ExtraAdder`` take. structlog itself
is not used, as it imports rich, whose import draws from Python's global random generator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from . import stderr
from .interrupts import is_interrupt
from .printable import printable

if TYPE_CHECKING:
    import logging

FORMATS = ("quiet", "console", "json")


class Output:
    """How events are written.

    Attributes:
        format: one of `FORMATS`: "quiet" leaves the level to `logging`, which shows warnings; "console" and "json"
            also show events at level INFO where the program configures no handler.
    """

    format = "quiet"


output = Output()


def _log(level: str, event: str, fields: dict[str, Any]) -> None:
    """Log an event; its fields must not have names of `logging.LogRecord`'s attributes."""
    import logging

    try:
        error = fields.pop("exc_info", None)
        extra = {"event": event, **fields}
        if output.format == "json":
            text, error = _json(level, event, fields, error), None
        else:
            text = _sentence(event, fields)
        if not _without_handler(getattr(logging, level), text, error):
            _logger().log(getattr(logging, level), text, exc_info=error, stacklevel=3, extra=extra)
    except Exception as error:  # of the application's handlers and filters, which must not end the loop
        if is_interrupt(error):
            raise
        if level == "WARNING":
            last_resort(event, error)


def _sentence(event: str, fields: Mapping[str, Any]) -> str:
    """Return an event as one sentence: "instrument: window.skipped (window=1, reason=...)"."""
    details = ", ".join(f"{name}={printable(_text(value))}" for name, value in fields.items())
    return f"instrument: {printable(str(event))}{f' ({details})' if details else ''}"


def _text(value: object) -> str:
    """Return the value of a field for a sentence; several texts, such as reasons, with semicolons between them."""
    several = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return "; ".join(cast("list[str]", value)) if several else str(value)


def _json(level: str, event: str, fields: Mapping[str, Any], error: BaseException | None) -> str:
    """Return an event as a JSON object on one line, with the traceback of ``error``."""
    import json
    import traceback
    from datetime import datetime, timezone

    time = datetime.now(timezone.utc).isoformat()
    data = {"timestamp": time, "level": level.lower(), "event": event, **fields}
    if error is not None:
        data["exception"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return json.dumps(data, default=str)


@functools.cache
def _logger() -> logging.Logger:
    """Return the logger. `getLogger` takes a lock, which stays locked if a signal handler raises just then."""
    import logging

    return logging.getLogger("instrument")


def _without_handler(level: int, text: str, error: Any) -> bool:
    """Write to standard error if no handler is configured; return whether this replaces logging.

    Without a handler, `logging.lastResort` would write to the ``sys.stderr`` that the program installed, only
    warnings, and leave them in its buffer if it is broken.
    """
    import logging

    chosen = output.format != "quiet"
    file = stderr.at_start() or sys.stderr
    default, logger = logging.lastResort, _logger()
    if file is None or not isinstance(default, logging.StreamHandler) or logger.hasHandlers():
        return False
    least = logger.level or logging.INFO if chosen else max(default.level, logger.getEffectiveLevel())
    if level >= least and level > logger.manager.disable and not logger.disabled:
        caught = error and (type(error), error, error.__traceback__)
        record = logger.makeRecord(logger.name, level, __file__, 0, text, (), caught)
        if logger.filter(record):
            stderr.write(logging.Formatter().format(record) + "\n", file)
    return True


def last_resort(event: str, *errors: Exception) -> None:
    """Write ``event`` to standard error when logging fails; raise nothing."""
    try:
        file = stderr.at_start() or sys.stderr
        stderr.write(f"instrument: {event}: {', '.join(map(repr, errors))}\n", file)
    except Exception:
        return


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("INFO", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows by default."""
    _log("WARNING", event, fields)
