"""Wrappers that show a function's calls as regions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ...guard import guard
from ...regions import dispatch
from ...regions import region as regions
from ...regions.region import Region
from .adapter import MegatronAdapter
from .references import FEATURE


def with_region(
    adapter: MegatronAdapter, original: Callable[..., Any], region_of: Callable[..., Region | None]
) -> Callable[..., Any]:
    """Return ``original`` with each call in the region that ``region_of(*arguments)`` returns, if any.

    Ranges that Megatron pushes inside and does not pop are closed with the region.
    """

    def when() -> bool:
        return not dispatch.tracing() and adapter.attached and dispatch.recording

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        region = None
        with guard.contained(FEATURE):
            region = region_of(*args, **kwargs)
        if region is None:
            return original(*args, **kwargs)
        with adapter.ranges.around(region, sys._getframe(1)):
            return original(*args, **kwargs)

    return functools.wraps(original)(guard.around(FEATURE, original, call, when))


def with_region_named(adapter: MegatronAdapter, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with each call in the region ``name``."""
    region = regions.make(name, None, None, None, None)
    return with_region(adapter, original, lambda *_, **__: region)
