"""Mark a window for VTune, which records it: nothing of ours is written.

``vtune -collect hotspots -start-paused ...`` records the windows alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..regions.emitters.itt import IttEmitter
from ..regions.region import Region, by_name


class VtuneExporter:
    """Resumes the collection for the recorded steps of each window, and pauses it after them."""

    name = "vtune"
    hint = "marked for VTune; once it wrote them: vtune -report summary -r RESULT, or open it in vtune-gui"

    def __init__(self) -> None:
        self._itt = IttEmitter()

    def prepare(self) -> None:
        """Nothing is slow here."""

    def capture(self) -> VtuneCapture:
        """Make the capture of one window."""
        return VtuneCapture(self._itt)


class VtuneCapture:
    """One window, with a task "step" for each step."""

    def __init__(self, itt: IttEmitter) -> None:
        self._itt = itt
        self.raw: Path | None = None
        self._step: Any = None

    def start(self) -> None:
        """Record from here on, in all processes that VTune follows."""
        import ittapi

        ittapi.resume()

    def step(self, number: int | None) -> None:
        """End the step that is recorded, and begin the next."""
        if self._step is not None:
            self._itt.end(self._step)
            self._step = None
        if number is not None:
            self._step = self._itt.start(Region("step", by_name("step")))

    def add_metadata(self, key: str, value: str) -> None:
        """A result has no place for it."""

    def stop(self) -> None:
        """Record no more."""
        import ittapi

        ittapi.pause()

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Nothing to write: VTune does."""
        return []

    def discard(self) -> None:
        """Nothing was started."""
