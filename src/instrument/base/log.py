"""Logs the events of this library with structlog.

A program that configured structlog gets them through its own processors, with its context variables. In any other,
they go to the standard logger "instrument", as sentences or as JSON; the application chooses the level:
``logging.getLogger("instrument").setLevel(...)``. Each record has the name of the event and its fields as
attributes, which formatters such as structlog's ``ExtraAdder`` take.

The first event that is shown imports structlog, which takes about 0.15 s of CPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from . import stderr
from .imports import import_without_drawing
from .interrupts import is_interrupt
from .printable import printable

if TYPE_CHECKING:
    import logging

    from structlog.typing import EventDict, Processor

FORMATS = ("quiet", "console", "json")


class Output:
    """How events are written in a program that has not configured structlog.

    Attributes:
        format: one of `FORMATS`: "quiet" leaves the level to `logging`, which shows warnings; "console" and "json"
            also show events at level INFO where the program configures no handler.
    """

    format = "quiet"


output = Output()


def _log(level: str, event: str, fields: dict[str, Any]) -> None:
    """Log an event; its fields must not have names of `logging.LogRecord`'s attributes."""
    try:
        theirs = sys.modules.get("structlog")
        if getattr(theirs, "is_configured", bool)():
            getattr(_logger_of_program(theirs), level)(event, **fields)
        elif _is_shown(level):
            getattr(_standard(output.format), level)(event, **fields)
    except Exception as error:  # of the application's handlers and processors, which must not end the loop
        if is_interrupt(error):
            raise
        if level == "warning":
            last_resort(event, error, **fields)


def _logger_of_program(structlog: Any) -> Any:
    """Return the logger that the program configured; an event has no event loop that an asynchronous one needs."""
    chosen, stdlib = structlog.get_config()["wrapper_class"], structlog.stdlib
    wrapper = stdlib.BoundLogger if chosen is stdlib.AsyncBoundLogger else None
    return structlog.wrap_logger(None, wrapper_class=wrapper, logger_factory_args=("instrument",))


@functools.cache
def _standard(format: str) -> Any:
    """Return structlog's logger of events for the standard logger."""
    structlog = import_without_drawing("structlog")
    first: list[Processor] = []
    render: Callable[..., Any] = _sentence
    if format == "json":
        first = [
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
        ]
        render = structlog.processors.JSONRenderer(default=str)

    def as_record(_: object, level: str, fields: EventDict) -> tuple[tuple[Any], dict[str, Any]]:
        error = fields.pop("exc_info", None)
        return (render(None, level, fields),), {"error": error, "fields": fields}

    return structlog.wrap_logger(_Records(), [*first, as_record], wrapper_class=structlog.BoundLogger)


def _sentence(_: object, level: str, fields: Mapping[str, Any]) -> str:
    """Return an event as one sentence: "instrument: window.skipped (window=1, reason=...)"."""
    details = ", ".join(f"{name}={printable(_text(value))}" for name, value in fields.items() if name != "event")
    return f"instrument: {printable(str(fields['event']))}{f' ({details})' if details else ''}"


def _text(value: object) -> str:
    """Return the value of a field for a sentence; several texts, such as reasons, with semicolons between them."""
    several = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return "; ".join(cast("list[str]", value)) if several else str(value)


class _Records:
    """Takes rendered events to the standard logger or, without a handler, to standard error.

    Without a handler, `logging.lastResort` would write to the ``sys.stderr`` that the program installed, only
    warnings, and leave them in its buffer if it is broken.
    """

    def info(self, text: str, *, error: Any, fields: Mapping[str, Any], level: str = "INFO") -> None:
        """Write an event."""
        import logging

        logger, number = _logger(), getattr(logging, level)
        file = _own_file()
        if file is None:
            # Not its callers: this function, `warning`, structlog, `_log` and `info`.
            logger.log(number, text, exc_info=error, stacklevel=5 + (level != "INFO"), extra=fields)
            return
        caught = error and (type(error), error, error.__traceback__)
        record = logger.makeRecord(logger.name, number, __file__, 0, text, (), caught)
        if logger.filter(record):
            stderr.write(f"{stderr.fresh_line(file)}{logging.Formatter().format(record)}\n", file)

    def warning(self, text: str, **about: Any) -> None:
        """Write an event."""
        self.info(text, **about, level="WARNING")


@functools.cache
def _logger() -> logging.Logger:
    """Return the logger. `getLogger` takes a lock, which stays locked if a signal handler raises just then."""
    import logging

    return logging.getLogger("instrument")


def _own_file() -> Any:
    """Return the file that events are written to because no handler is configured; None if one is."""
    import logging

    if not isinstance(logging.lastResort, logging.StreamHandler) or _logger().hasHandlers():
        return None
    return stderr.at_start() or sys.stderr


def _is_shown(level: str) -> bool:
    """Return whether somebody sees an event: for others, structlog is not imported."""
    import logging

    logger, number = _logger(), getattr(logging, level.upper())
    if _own_file() is None:
        return logger.isEnabledFor(number)
    if output.format != "quiet":
        least = logger.level or logging.INFO
    else:
        least = max(cast("logging.Handler", logging.lastResort).level, logger.getEffectiveLevel())
    return bool(number >= least and number > logger.manager.disable and not logger.disabled)


def last_resort(event: str, *errors: Exception, **fields: Any) -> None:
    """Write ``event`` to standard error when logging fails; raise nothing."""
    try:
        file = stderr.at_start() or sys.stderr
        text = _sentence(None, "", {"event": event, **fields})
        stderr.write(f"{stderr.fresh_line(file)}{text}: {', '.join(map(repr, errors))}\n", file)
    except Exception:
        return


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("info", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows by default."""
    _log("warning", event, fields)
