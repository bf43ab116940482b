"""`SnapshotDump`: writes a memory snapshot on a thread of its own."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ...base.errors import CaptureError
from ...base.files import make_folder, part_file, publish
from ...base.guard import guard

FEATURE = "writing a memory snapshot"
_PROTOCOL = 4  # that of torch's own snapshots, for which its page is made
_WAIT_S = 0.1
_FREED_AT_ONCE = 1000  # events that are freed without a break, in which other threads can run

Snapshot = dict[str, Any]


class SnapshotDump:
    """Writes ``snapshot``, and then frees it, while the program goes on.

    Nobody else may use the snapshot. The pickler hands over 64 kB at a time, between which other threads run.

    Args:
        snapshot: what torch returned.
        path: the file; it appears whole, or not at all.
        size_bytes: its largest size.

    Attributes:
        done: whether it is over.
        entries: the events in the file.
        bytes: the size of the file; None before it is written, and where that failed.
        dropped: the events that were left out, as the file would have been too large.
        seconds: how long it took.
        failure: the reason why no file was written, in words; None otherwise.
    """

    def __init__(self, snapshot: Snapshot, path: Path, size_bytes: int) -> None:
        self.path = path
        self.done = False
        self.entries = count_events(snapshot)
        self.dropped = 0
        self.bytes: int | None = None
        self.seconds = 0.0
        self.failure: str | None = None
        self._size_bytes = size_bytes
        self._gave_up = False
        self._when_done: list[Callable[[], None]] = []
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name="instrument memory snapshot", daemon=True
        )

    def start(self) -> None:
        """Begin; where no thread can be started, as at the end of the program, write at once."""
        try:
            self._thread.start()
        except RuntimeError:
            self._thread.run()

    @property
    def is_running(self) -> bool:
        """Whether its thread writes, or makes the calls of `when_done`."""
        return self._thread.is_alive()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` when it is over, on its thread, or now if it is."""
        self._when_done.append(call)
        if self.done:
            self._notify()

    def wait(self, timeout: float, waiting: Callable[[], None]) -> None:
        """Wait until it is over, and the calls of `when_done` are made; give up after ``timeout`` s.

        ``waiting`` is called ten times a second.
        """
        deadline = time.monotonic() + timeout
        while self.is_running and time.monotonic() < deadline:
            self._thread.join(_WAIT_S)
            waiting()
        if not self.done:
            self._gave_up = self.done = True
            self.failure = f"it was not written within {timeout:.0f} s after the end of the run"

    def _run(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        try:
            self._write(snapshot)
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}".removesuffix(": ")
            guard.note(FEATURE, error)
        finally:
            self.seconds = time.perf_counter() - began
            self.done = True
            self._notify()
            _free(snapshot)

    def _notify(self) -> None:
        while self._when_done:
            with guard.contained(FEATURE):
                self._when_done.pop(0)()

    def _write(self, snapshot: Snapshot) -> None:
        make_folder(self.path.parent)
        with part_file(self.path) as part:
            while not self._fits(snapshot, part):
                if not drop_older_half(snapshot):
                    raise CaptureError(f"without events, it is larger than {self._size_bytes:,} bytes")
                left = count_events(snapshot)
                self.dropped, self.entries = self.dropped + self.entries - left, left
            self.check()
            size = part.stat().st_size
            publish(part, self.path)
            self.bytes = size

    def _fits(self, snapshot: Snapshot, part: Path) -> bool:
        """Write the snapshot to ``part``, unless it is too large."""
        with part.open("wb", buffering=0) as file:
            try:
                pickle.Pickler(_LimitedFile(file, self._size_bytes, self), _PROTOCOL).dump(snapshot)
            except _TooLargeError:
                return False
        return True

    def check(self) -> None:
        """Raise if nobody waits for the file any more."""
        if self._gave_up:
            raise CaptureError(self.failure)


class _TooLargeError(Exception):
    """A file is about to exceed its limit."""


class _LimitedFile:
    """Writes to ``file`` up to ``limit`` bytes."""

    def __init__(self, file: BinaryIO, limit: int, dump: SnapshotDump) -> None:
        self._file = file
        self._left = limit
        self._dump = dump

    def write(self, data: bytes) -> int:
        """Write ``data``.

        Raises:
            OSError: the system takes no more.
        """
        self._left -= len(data)
        if self._left < 0:
            raise _TooLargeError
        self._dump.check()
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        return len(data)


def count_events(snapshot: Snapshot) -> int:
    """Return the number of events of all GPUs."""
    return sum(map(len, snapshot.get("device_traces", ())))


def drop_older_half(snapshot: Snapshot) -> bool:
    """Remove the older half of the events of each GPU; return False if there were none."""
    had_events = count_events(snapshot) > 0
    for events in snapshot.get("device_traces", ()):
        del events[: (len(events) + 1) // 2]
    return had_events


def _free(snapshot: Snapshot) -> None:
    """Free a snapshot little by little: its millions of objects at once would hold all threads."""
    for events in snapshot.get("device_traces", ()):
        while events:
            del events[-_FREED_AT_ONCE:]
    snapshot.clear()
