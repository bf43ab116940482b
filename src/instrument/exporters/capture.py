"""What an exporter is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Capture(Protocol):
    """One window's recording. All is called on one thread.

    It is made at the first step of the window's warm-up or, without one, at the first recorded step. A capture
    that is always complete needs neither ``ended`` nor ``incomplete``.

    Attributes:
        raw: the trace of torch.profiler that `save` wrote, which another process compresses and reads; None where
            there is none.
        ended: whether the recording ended before `stop`; `step`, `add_metadata` and `stop` then do nothing.
        incomplete: why the recording is not complete, in words; known once `save` returned.
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
