"""`MemorySnapshot`: a snapshot of torch's allocator, with what can be done with it."""

from __future__ import annotations

import os
from pathlib import Path

from ..guard import guard
from ..page.document import frame, write_page
from .page_sections import page_of
from .snapshot_data import SnapshotData


class MemorySnapshot(SnapshotData):
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
        chosen = self.fullest_device if device is None else device
        if chosen is None or chosen not in self.devices:
            there = ", ".join(map(str, self.devices)) or "none"
            raise ValueError(f'"device" must be a GPU with memory in {self.path} ({there}): {device!r}')
        return write_page(path, page_of(self, chosen))

    @guard.contained("page in a notebook")
    def _repr_html_(self) -> str | None:
        device = self.fullest_device
        return None if device is None else frame(page_of(self, device))

    def __repr__(self) -> str:
        sizes = f"{len(self.events):,} events, {len(self.segments):,} segments"
        return f"<memory snapshot {str(self.path)!r}: {sizes}>"


def peak_text(snapshot: MemorySnapshot) -> str:
    """Return the memory at the peak of the GPU with the highest one, by category, as a sentence."""
    device = snapshot.fullest_device
    return "The memory snapshot has no memory of a GPU." if device is None else snapshot.break_down(device).text
