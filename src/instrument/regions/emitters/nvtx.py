"""Regions as NVTX ranges with domain, color, category and payload: Nsight Systems, Nsight Compute."""

from __future__ import annotations

import math
from typing import Any

from ... import log
from ...compat.nvtx import nvtx_domain
from ...interrupts import is_interrupt
from ..region import DOMAIN, Region


def _category(category: str | int | None) -> str | int | None:
    # NVTX numbers categories with 32 bits; a number beyond them becomes a name.
    return str(category) if isinstance(category, int) and not 0 <= category < 1 << 32 else category


def _payload(payload: Any) -> Any:
    # nvtx passes integers on as int64; one beyond that becomes the nearest float.
    if not isinstance(payload, int) or -(1 << 63) <= payload < 1 << 63:
        return payload
    try:
        return float(payload)
    except OverflowError:
        return math.copysign(math.inf, 1 if payload > 0 else -1)


class NvtxEmitter:
    """Emits registered strings with cached attributes: 60 ns a range while no tool records."""

    name = "nvtx"

    def __init__(self) -> None:
        try:
            import nvtx  # noqa: F401
        except ImportError:
            raise ImportError("nvtx is missing: pip install nvtx") from None
        self._domains: dict[str, Any] = {}
        self.domain(DOMAIN)

    def domain(self, name: str) -> Any:
        """Return the domain called ``name``, or None if the tool does not listen to it."""
        if name not in self._domains:
            self._domains[name] = nvtx_domain(name)  # kept, as the domain is destroyed with its last reference
        return self._domains[name]

    def _prepare(self, region: Region) -> tuple[Any, Any]:
        domain = self.domain(region.domain)
        category = _category(region.category)
        attributes = domain and domain.get_event_attributes(
            message=region.name, color=region.color, category=category
        )
        if attributes is not None and region.payload is not None:
            try:
                attributes.payload = _payload(region.payload)
            except Exception as error:  # show the range without it: nvtx needs numpy for anything but a number
                if is_interrupt(error):
                    raise
                log.warning("payload not shown", region=region.name, error=repr(error))
        prepared = region.prepared["nvtx"] = (domain, attributes)
        return prepared

    def push(self, region: Region) -> Any:
        """Push a range on this thread's stack."""
        domain, attributes = region.prepared.get("nvtx") or self._prepare(region)
        if domain is not None:
            domain.push_range(attributes)
        return domain

    def pop(self, domain: Any, /) -> None:
        """Pop the range."""
        if domain is not None:
            domain.pop_range()

    def start(self, region: Region) -> tuple[Any, int]:
        """Start a range that others may overlap."""
        domain, attributes = region.prepared.get("nvtx") or self._prepare(region)
        return domain, (domain.start_range(attributes) if domain is not None else 0)

    def end(self, handle: tuple[Any, int], /) -> None:
        """End the range."""
        domain, range_id = handle
        if domain is not None:
            domain.end_range(range_id)

    def mark(self, region: Region) -> None:
        """Show an instant."""
        domain, attributes = region.prepared.get("nvtx") or self._prepare(region)
        if domain is not None:
            domain.mark(attributes)


class NvtxStartEndEmitter(NvtxEmitter):
    """Emits ranges that belong to no thread instead of nested ones."""

    push = NvtxEmitter.start
    pop = NvtxEmitter.end
