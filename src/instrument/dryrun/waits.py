"""What the pretended GPU tells of: waits, and what cannot be carried out without a real one."""

from __future__ import annotations

from typing import Protocol


class Waits(Protocol):
    """Takes note, at the line of the user's that runs now on this thread."""

    def wait(self, op: str, cause: str) -> None:
        """Take note that the caller waits for the GPU here; ``op`` and ``cause`` are as in `SyncEvent`."""

    def uncovered(self, why: str) -> None:
        """Take note of something that a dry run cannot carry out."""
