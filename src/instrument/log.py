"""Events of the library, through structlog into the standard logger "instrument".

The application decides what is shown: ``logging.getLogger("instrument").setLevel(...)``.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any


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
    details = ", ".join(f"{name}={value}" for name, value in fields.items())
    return (f"instrument: {event} ({details})" if details else f"instrument: {event}",), {"exc_info": error}


def _log(level: str, event: str, fields: dict[str, object]) -> None:
    try:
        getattr(_logger(), level)(event, **fields)
    except Exception as error:  # the application's own handlers and filters: what they raise is not for the loop
        if level == "warning":
            last_resort(event, error)


def last_resort(event: str, *errors: Exception) -> None:
    """Write ``event`` to standard error, where logging fails; raise nothing."""
    try:
        sys.stderr.write(f"instrument: {event}: {', '.join(map(repr, errors))}\n")
    except Exception:
        return


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _log("info", event, fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows unless told otherwise."""
    _log("warning", event, fields)
