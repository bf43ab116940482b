"""Annotated functions and classes, and helpers, for tests of `annotate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import instrument

Recorded = Callable[..., list[dict[str, Any]]]


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events]


@instrument.annotate("named", color="green", category="compute", payload=1)
def named() -> int:
    return 1
