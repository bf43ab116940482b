"""Regions as torch.profiler ranges of category ``user_annotation``, which also show on the GPU's lane."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar

from ...compat.profilers import range_functions
from ..region import Region
from .recording_notes import RecordingNotes

_KEYS = count()


class TorchProfilerEmitter:
    """Opens torch.profiler ranges during one recording.

    torch (2.13 and before) crashes if a range is open when one recording stops, and ends or is freed during the
    next: torch writes into the first recording's memory. Open ranges are therefore ended as soon as a recording
    stops. They show in its trace, up to its end.
    """

    name = "torch"
    _open: ClassVar[dict[int, Any]] = {}  # shared by the process, as torch records one profile at a time

    def __init__(self) -> None:
        self._enter, self._exit = range_functions()
        self.notes = RecordingNotes()
        self._follow = self.notes.follow

    def push(self, region: Region) -> Any:
        """Open a range."""
        self._follow(region.plain)
        key = next(_KEYS)
        shown = region.arguments
        self._open[key] = self._enter(region.plain, *shown) if shown else self._enter(region.plain)
        return key

    def pop(self, handle: Any) -> None:
        """Close the range, unless its recording stopped in the meantime."""
        record = self._open.pop(handle, None)
        if record is not None:
            self._exit(record)

    start = push
    end = pop

    def close(self, handle: Any) -> None:
        """Close the range when another is opened at once or the recording stops."""
        self.pop(handle)

    def mark(self, region: Region) -> None:
        """Show an instant as a range of zero length: the trace format of torch.profiler has no instants."""
        self._exit(self._enter(region.plain))

    @classmethod
    def end_all(cls) -> None:
        """End every open range: a recording stopped, and no profiler records now."""
        _, leave = range_functions()
        while cls._open:
            leave(cls._open.popitem()[1])
