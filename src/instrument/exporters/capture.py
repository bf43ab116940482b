"""`Exporter` and `Capture`: the interface of exporters."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Capture(Protocol):
    """The recording of one window. All methods are called on one thread.

    A capture is made at the first step of the window's warm-up or, without warm-up, at the first recorded step. A
    capture that is always complete needs neither ``ended`` nor ``incomplete``.

    Attributes:
        raw: the trace of torch.profiler that `save` wrote, which another process compresses and reads, or None.
        ended: whether the recording ended before `stop`; `step`, `add_metadata` and `stop` then do nothing.
        incomplete: why the recording is incomplete, in words; known after `save`.
    """

    raw: Path | None

    def start(self) -> None:
        """Start recording."""

    def step(self, number: int | None) -> None:
        """Begin the recorded step ``number``; with None, end the last one."""

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into the recording, if its format allows that; called after `start`."""

    def stop(self) -> None:
        """Stop recording."""

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Write the files into ``folder`` and return them; none if the tool itself writes them later."""

    def discard(self) -> None:
        """End a capture that never started."""


class Exporter(Protocol):
    """Makes captures; the manifest has its ``name``."""

    name: str
    hint: str  # where users find the recording, if the exporter writes no files

    def prepare(self) -> None:
        """Do slow set-up work before the loop begins."""

    def capture(self) -> Capture:
        """Make the capture of one window."""
