"""The page of a memory snapshot, and that of two: the memory over time, the peak, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..page.document import document
from ..page.names import shown_name
from ..page.summary import summary_section
from ..units import count, percentage, size
from .batch import batch_texts
from .breakdown import Breakdown
from .change_section import change_section
from .peak_section import peak_section
from .snapshot_data import SnapshotData
from .table_sections import failures_section, growth_section, traffic_section
from .timeline_section import timeline_section, top_bytes


def page_of(snapshot: SnapshotData, device: int, limit_bytes: int | None = None, batch: int | None = None) -> str:
    """Return the text of the page of a snapshot; arguments as of `sections_of`."""
    found = snapshot.break_down(device)
    reserved = f", of {size(found.reserved_bytes)} reserved" * (found.reserved_bytes >= found.peak.bytes)
    lead = f"GPU {device}: {size(found.peak.bytes)} in use at the peak{reserved}."
    return document(shown_name(snapshot.path.name), lead, sections_of(snapshot, device, limit_bytes, batch))


def sections_of(
    snapshot: SnapshotData, device: int, limit_bytes: int | None = None, batch: int | None = None
) -> list[dict[str, Any]]:
    """Return what a page shows of a snapshot: figures, the memory over time, the peak, and what went wrong.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        limit_bytes: as of `SnapshotData.larger_batch`.
        batch: the batch size of the program; None if it is not known.
    """
    found, timeline = snapshot.break_down(device), snapshot.timeline(device)
    notes = [str(snapshot.path), *batch_texts(snapshot.larger_batch(device, limit_bytes), batch)]
    sections = (
        summary_section(f"Memory of GPU {device}", _figures(snapshot, found), notes),
        failures_section(snapshot.failures(device)),
        timeline_section(timeline, found.peak, "memory", "Memory over time", top_bytes(timeline)),
        peak_section(found, "peak", "The peak"),
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
    peaks = {name: snapshot.break_down(device) for name, snapshot in sides.items()}
    timelines = {name: snapshot.timeline(device) for name, snapshot in sides.items()}
    old, new = (found.peak.bytes for found in peaks.values())
    change = f"{'-' if new < old else '+'}{size(abs(new - old))}"
    figures = [("peak before", size(old)), ("peak after", size(new)), ("difference", change)]
    notes = [f"{name.capitalize()}: {snapshot.path}" for name, snapshot in sides.items()]
    top = top_bytes(*timelines.values())
    sections = (
        summary_section(f"Memory of GPU {device}", figures, [*notes, *estimate]),
        change_section(*peaks.values()),
        *(
            timeline_section(timelines[name], peaks[name].peak, f"memory-{name}", f"Memory over time, {name}", top)
            for name in sides
        ),
        *(peak_section(peaks[name], f"peak-{name}", f"The peak {name}") for name in sides),
    )
    return document(
        shown_name(f"{before.path.name} → {after.path.name}"),
        f"GPU {device}: the peak went from {size(old)} to {size(new)}, {change}.",
        [section for section in sections if section is not None],
    )


def _figures(snapshot: SnapshotData, found: Breakdown) -> list[tuple[str, str]]:
    peak = found.peak
    state = snapshot.state(peak.device)
    events = int((snapshot.events.device == peak.device).sum())
    shares = {
        "older than the recorded events": peak.before_bytes,
        "with a known line": found.known_bytes,
        "of inferred use": found.inferred_bytes,
        "of unknown use": found.unknown_bytes,
    }
    return [
        ("in use at the peak", size(peak.bytes)),
        *[("reserved then", size(found.reserved_bytes))] * (found.reserved_bytes >= peak.bytes),
        *(
            (f"of the peak: {name}", f"{size(part)} ({percentage(part / peak.bytes)})")
            for name, part in shares.items()
            if part
        ),
        ("recorded events", count(events)),
        ("in use at the end", size(state.used_bytes)),
        ("largest free piece then", size(state.largest_hole_bytes)),
    ]
