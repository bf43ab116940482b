"""The page of a memory snapshot, and that of two: the memory over time, the peak, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..page.document import document
from ..page.names import shown_name
from ..page.summary import summary_section
from ..units import count, percentage, signed_size, size
from .batch import batch_texts
from .breakdown import NO_HISTORY, Breakdown
from .change_section import change_section
from .peak_section import peak_section
from .snapshot_data import SnapshotData
from .table_sections import (
    failures_section,
    growth_section,
    inferred_section,
    largest_section,
    traffic_section,
)
from .timeline_section import timeline_section


def page_of(snapshot: SnapshotData, device: int, limit_bytes: int | None = None, batch: int | None = None) -> str:
    """Return the text of the page of a snapshot; arguments as of `sections_of`."""
    failed = [f"{each.text}." for each in snapshot.failures(device, 1)]
    lead = " ".join((*failed, snapshot.break_down(device).text))
    return document(shown_name(snapshot.path.name), lead, sections_of(snapshot, device, limit_bytes, batch))


def sections_of(
    snapshot: SnapshotData, device: int, limit_bytes: int | None = None, batch: int | None = None
) -> list[dict[str, Any]]:
    """Return what a page shows of a snapshot: what failed, figures, the memory over time, and the peak.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        limit_bytes: as of `SnapshotData.larger_batch`.
        batch: the batch size of the program; None if it is not known.
    """
    found = snapshot.break_down(device)
    notes = [str(snapshot.path), *batch_texts(snapshot.larger_batch(device, limit_bytes), batch)]
    if not found.recorded:
        notes = [str(snapshot.path), NO_HISTORY]
    sections = (
        failures_section(snapshot.failures(device)),
        summary_section(f"Memory of GPU {device}", _figures(snapshot, found), notes),
        timeline_section(snapshot, device),
        peak_section(found) if found.recorded else None,
        inferred_section({"": found}),
        largest_section(snapshot.largest_blocks(device), "at the peak" if found.recorded else "in use"),
        growth_section(snapshot.growth(device)),
        traffic_section(snapshot.driver_traffic(device)),
    )
    return [section for section in sections if section is not None]


def page_of_change(before: SnapshotData, after: SnapshotData, device: int, estimate: Sequence[str] = ()) -> str:
    """Return the text of the page that compares two snapshots: the changes, and both beside each other.

    Args:
        before: the first snapshot.
        after: the second one.
        device: the GPU.
        estimate: what another batch size would need, as of `fit_texts`.
    """
    sides = {"before": before, "after": after}
    peaks = {side: snapshot.break_down(device) for side, snapshot in sides.items()}
    old, new = (found.peak.bytes for found in peaks.values())
    change = signed_size(new - old)
    figures = [("peak before", size(old)), ("peak after", size(new)), ("difference", change)]
    notes = [f"{side.capitalize()}: {snapshot.path}" for side, snapshot in sides.items()]
    sections = (
        summary_section(f"Memory of GPU {device}", figures, [*notes, *estimate]),
        change_section(*peaks.values()),
        *_on_one_scale([timeline_section(snapshot, device, side) for side, snapshot in sides.items()]),
        *(peak_section(found, side) for side, found in peaks.items()),
        inferred_section(peaks),
    )
    return document(
        shown_name(f"{before.path.name} → {after.path.name}"),
        f"GPU {device}: the peak went from {size(old)} to {size(new)}, {change}.",
        [section for section in sections if section is not None],
    )


def _on_one_scale(timelines: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    there = [timeline for timeline in timelines if timeline is not None]
    top = max((timeline["top_bytes"] for timeline in there), default=0)
    notes = ["Both charts have the same scale of bytes, and each its own length."] * (len(there) > 1)
    return [timeline | {"top_bytes": top, "notes": notes + timeline["notes"]} for timeline in there]


def _figures(snapshot: SnapshotData, found: Breakdown) -> list[tuple[str, str]]:
    peak = found.peak
    state = snapshot.state(peak.device)
    shares = {
        "older than the recorded events": peak.before_bytes,
        "with a known line": found.known_bytes,
        "of inferred use": found.inferred_bytes,
        "of unknown use": found.unknown_bytes,
    }
    return [
        *[("in use at the peak", size(peak.bytes))] * found.recorded,
        *[("reserved then", size(found.reserved_bytes))] * (found.reserved_bytes >= peak.bytes),
        *(
            (f"of the peak: {name}", f"{size(part)} ({percentage(part / peak.bytes)})")
            for name, part in shares.items()
            if part and found.recorded
        ),
        ("recorded events", count((snapshot.events.device == peak.device).sum())),
        ("in use at the end", size(state.used_bytes)),
        ("largest free piece then", size(state.largest_hole_bytes)),
    ]
