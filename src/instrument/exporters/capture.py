"""What an exporter is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Capture(Protocol):
    """One window's recording. All is called on one thread.

    A capture is made when the window's warm-up begins, or its first recorded step if it has none. ``raw`` is the
    file that `save` wrote if it is a trace of torch.profiler, which another process compresses and reads then. A
    capture whose recording may end before `stop`, or lack its last kernels, has ``cut``: why, in words, else
    empty; where it ended early, `step` and `stop` do nothing.
    """

    raw: Path | None

    def start(self) -> None:
        """Record from here on."""

    def step(self, number: int | None) -> None:
        """The recorded step ``number`` begins, or with None the last one ended."""

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into what is being recorded, where it has a place for it; after `start`."""

    def stop(self) -> None:
        """Record no more."""

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Write the files into ``folder``, and return them; none where the tool itself writes them later."""

    def discard(self) -> None:
        """End a capture that never started."""


class Exporter(Protocol):
    """Makes captures; ``name`` is what the manifest calls it."""

    name: str
    hint: str  # where to find what was recorded, when the exporter has no files of its own

    def prepare(self) -> None:
        """Do what is slow the first time, before the loop begins."""

    def capture(self) -> Capture:
        """Make the capture of one window."""
