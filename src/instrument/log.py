"""Events of the library, in the standard logger "instrument".

The application decides what is shown: ``logging.getLogger("instrument").setLevel(...)``. Not through structlog: it
imports rich, which draws from Python's global random generator when it is imported.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from .printable import printable


def _log(level: str, event: str, fields: dict[str, Any]) -> None:
    """Log an event as one sentence: "instrument: window not recorded (window=1, reason=...)"."""
    import logging

    error = fields.pop("exc_info", None)
    event = printable(str(event))
    details = ", ".join(f"{name}={printable(str(value))}" for name, value in fields.items())
    sentence = f"instrument: {event} ({details})" if details else f"instrument: {event}"
    with suppress(Exception):  # the application's own handlers and filters: what they raise is not for the loop
        number = getattr(logging, level)
        logging.getLogger("instrument").log(number, sentence, exc_info=error, stacklevel=3)


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("INFO", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows unless told otherwise."""
    _log("WARNING", event, fields)
