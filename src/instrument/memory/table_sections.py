"""Tables on the page of a memory snapshot: failures, inferred uses, large blocks, growth, calls of the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ..page.names import shown_name
from ..page.table import table_section
from .breakdown import Breakdown, Place, Use
from .categories import EVIDENCE, category_words
from .driver_traffic import DriverTraffic, traffic_texts
from .failures import REASONS, FailedAllocation
from .growth import Growth


def failures_section(failures: Sequence[FailedAllocation]) -> dict[str, Any] | None:
    """Return the table of the allocations that failed; None if none did."""
    columns = {
        "Line": "text", "Why": "text", "Asked for": "bytes", "In use": "bytes", "Reserved": "bytes",
        "Largest free piece": "bytes", "Left at the driver": "bytes",
    }  # fmt: skip
    rows = [
        [
            _text(each.place),
            REASONS[each.reason],
            each.bytes,
            each.used_bytes,
            each.reserved_bytes,
            each.largest_hole_bytes,
            None if each.device_free_bytes < 0 else each.device_free_bytes,
        ]
        for each in failures
    ]
    return table_section("failures", "Out of memory", "Allocations that failed", columns, rows) if rows else None


def inferred_section(peaks: Mapping[str, Breakdown]) -> dict[str, Any] | None:
    """Return the table of what is inferred at one peak, or at two, and from what; None if nothing is.

    Args:
        peaks: what was in use, by the words that tell it apart, such as "before".
    """
    inferred = {side: found.by_evidence() for side, found in peaks.items()}
    columns = {"Category": "text", "Evidence": "text"}
    for side in peaks:
        columns |= {side.capitalize() or "Memory": "bytes", f"Blocks {side}".strip(): "count"}
    rows = [
        [
            category_words(category),
            evidence,
            *(amount for parts in inferred.values() for amount in parts.get((category, evidence), (0, 0))),
            EVIDENCE[evidence],
        ]
        for category, evidence in dict.fromkeys(chain.from_iterable(inferred.values()))
    ]
    columns["The evidence is"] = "long"
    if not rows:
        return None
    note = "Where no line is known, the category follows from other evidence."
    return table_section("inferred", "What is inferred", "Inferred uses at the peak", columns, rows, note)


def largest_section(blocks: Sequence[Use], when: str) -> dict[str, Any] | None:
    """Return the table of the largest blocks, such as those "at the peak"; None if nothing was in use."""
    columns = {"Line": "text", "Category": "text", "Bytes each": "bytes", "Blocks": "count", "Memory": "bytes"}
    rows = [
        [shown_name(use.source), category_words(use.category), use.bytes // use.blocks, use.blocks, use.bytes]
        for use in blocks
    ]
    caption = f"The largest blocks {when}; those alike are one row"
    return table_section("largest", "Largest blocks", caption, columns, rows) if rows else None


def growth_section(growth: Sequence[tuple[Place, Growth]]) -> dict[str, Any] | None:
    """Return the table of the lines whose memory several steps left behind; None if there is none."""
    columns = {"Line": "text", "Steps": "count", "Memory": "bytes", "Blocks": "count"}
    rows = [[_text(place), each.steps, each.bytes, each.blocks] for place, each in growth]
    if not rows:
        return None
    note = "What a line allocated in each of several steps is still in use: a leak, unless it is meant."
    caption = "Lines whose memory several steps left behind"
    return table_section("growth", "Kept from several steps", caption, columns, rows, note)


def traffic_section(traffic: DriverTraffic) -> dict[str, Any] | None:
    """Return the lines at which memory went back to the driver, and what was taken later; None without either."""
    columns = {"Line": "text", "Why": "text", "Times": "count", "Memory": "bytes"}
    rows = [[_text(each.place), each.reason, each.times, each.bytes] for each in traffic.returns]
    note = " ".join(traffic_texts(traffic))
    caption = "Lines at which memory went back to the driver"
    return table_section("driver", "Memory from the driver", caption, columns, rows, note) if note else None


def _text(place: Place | None) -> str:
    return shown_name(place.text) if place else "unknown"
