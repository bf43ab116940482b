"""Events of the library, through structlog into the standard logger "instrument".

The application decides what is shown: ``logging.getLogger("instrument").setLevel(...)``.
"""

from __future__ import annotations

from typing import Any


def _logger() -> Any:
    # structlog is imported on the first event: most programs never have one.
    import logging

    import structlog

    return structlog.wrap_logger(
        logging.getLogger("instrument"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
        ],
    )


def info(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level INFO."""
    _logger().info(event, **fields)


def warning(event: str, **fields: object) -> None:
    """Log ``event`` with its fields at level WARNING, which Python shows unless told otherwise."""
    _logger().warning(event, **fields)
