"""Events of the library, through structlog into the standard logger "instrument".

The application decides what is shown: ``logging.getLogger("instrument").setLevel(...)``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from .printable import printable


def _logger() -> Any:
    # structlog is imported on the first event: most programs never have one.
    import logging

    import structlog

    return structlog.wrap_logger(
        logging.getLogger("instrument"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[structlog.stdlib.filter_by_level, _sentence],
    )


def _sentence(_: object, __: str, fields: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Render an event for the standard logger: "instrument: window not recorded (window=1, reason=...)"."""
    event, error = fields.pop("event"), fields.pop("exc_info", None)
    event = printable(str(event))
    details = ", ".join(f"{name}={printable(str(value))}" for name, value in fields.items())
    return (f"instrument: {event} ({details})" if details else f"instrument: {event}",), {"exc_info": error}


def _log(level: str, event: str, fields: dict[str, object]) -> None:
    with suppress(Exception):  # the application's own handlers and filters: what they raise is not for the loop
        getattr(_logger(), level)(event, **fields)


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("info", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows unless told otherwise."""
    _log("warning", event, fields)
