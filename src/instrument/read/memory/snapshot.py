"""`MemorySnapshot`: a snapshot of torch's allocator, with its page and its export as dictionaries for JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...base.page_file import InNotebook, write_page
from .batch import ASSUMPTION, FIT_ASSUMPTION, BatchFit
from .breakdown import ChangedPart, Place, Use, compare_peaks, compare_regions
from .categories import CATEGORIES
from .snapshot_data import SnapshotData


class MemorySnapshot(SnapshotData, InNotebook):
    """A memory snapshot of torch's caching allocator, with the attributes of `SnapshotData`."""

    def to_html(self, path: str | os.PathLike[str], device: int | None = None) -> Path:
        """Write the memory of a GPU as one HTML file, which needs no network, and return its path.

        Args:
            path: the file.
            device: the GPU; by default the one with the highest peak.

        Raises:
            ValueError: the snapshot has no memory of ``device``, or of any GPU.
            OSError: the file cannot be written.
        """
        from ...show.sections.memory import page_of

        fullest = self.fullest_device
        chosen = (0 if fullest is None else fullest) if device is None else device
        return write_page(path, page_of(self, self._checked(chosen)))

    def _page(self) -> str | None:
        from ...show.sections.memory import page_of

        device = self.fullest_device
        return None if device is None else page_of(self, device)

    def __repr__(self) -> str:
        sizes = f"{len(self.events):,} events, {len(self.segments):,} segments"
        return f"<memory snapshot {str(self.path)!r}: {sizes}>"


def peak_text(snapshot: MemorySnapshot) -> str:
    """Return the memory at the peak of the GPU with the highest one, by category, as a sentence."""
    device = snapshot.fullest_device
    return "The memory snapshot has no memory of a GPU." if device is None else snapshot.break_down(device).text


_POINTS = 1000  # of a timeline


def as_dict(
    snapshot: MemorySnapshot, device: int, limit_bytes: int | None = None, batch: int | None = None
) -> dict[str, Any]:
    """Return what a snapshot shows of a GPU. Sizes are bytes, and unrounded.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        limit_bytes: as of `MemorySnapshot.larger_batch`.
        batch: the batch size of the program; None if it is not known.
    """
    larger = snapshot.larger_batch(device, limit_bytes)
    largest = None if batch is None or larger.factor is None else int(batch * larger.factor)
    found = snapshot.break_down(device)
    timeline = snapshot.timeline(device).thinned(_POINTS)
    traffic = snapshot.driver_traffic(device)
    return {
        "path": str(snapshot.path),
        "device": device,
        "peak_bytes": found.peak.bytes if found.recorded else None,
        "reserved_bytes": found.reserved_bytes,
        "cached_bytes": found.cached_bytes,
        "before_bytes": found.peak.before_bytes,
        "known_bytes": found.known_bytes,
        "inferred_bytes": found.inferred_bytes,
        "unknown_bytes": found.unknown_bytes,
        "uses": [_use(use) for use in found.uses],
        "largest_blocks": [_use(use) for use in snapshot.largest_blocks(device)],
        "timeline": {
            "event": timeline.event.tolist(),
            "time_ns": timeline.time_ns.tolist(),
            "reserved_bytes": timeline.reserved_bytes.tolist(),
            "bytes": dict(zip(CATEGORIES, timeline.bytes.tolist(), strict=True)),
        },
        "growth": [{**growth._asdict(), **_of(place)} for place, growth in snapshot.growth(device)],
        "state": snapshot.state(device)._asdict(),
        "failed": snapshot.failed(device),
        "failures": [
            {**each._asdict(), "place": _of(each.place), "limit_bytes": each.limit_bytes}
            for each in snapshot.failures(device)
        ],
        "driver_traffic": traffic._asdict()
        | {"returns": [{**each._asdict(), "place": _of(each.place)} for each in traffic.returns]},
        "larger_batch": {**larger._asdict(), "batch": batch, "largest": largest, "assumed": ASSUMPTION}
        if found.recorded
        else None,
    }


def changes_as_dict(
    before: MemorySnapshot, after: MemorySnapshot, device: int, fit: BatchFit | None = None
) -> dict[str, Any]:
    """Return how the peak of a GPU changed from one snapshot to another: the parts of either list add up to it."""
    peaks = before.break_down(device), after.break_down(device)
    return {
        "changes": [_part(part) for part in compare_peaks(*peaks)],
        "changes_by_region": [_part(part) for part in compare_regions(*peaks)],
        "batch_fit": fit and _fit(fit),
    }


def _fit(fit: BatchFit) -> dict[str, Any]:
    stretches = [each._asdict() for each in fit.stretches]
    return {"batches": fit.batches, "stretches": stretches, "assumed": FIT_ASSUMPTION}


def _part(part: ChangedPart) -> dict[str, Any]:
    return {**part._asdict(), "change_bytes": part.change_bytes}


def _use(use: Use) -> dict[str, Any]:
    return {**use._asdict(), "place": _of(use.place), "modules": [_of(each) for each in use.modules]}


def _of(place: Place | None) -> Any:
    return place and place._asdict()
