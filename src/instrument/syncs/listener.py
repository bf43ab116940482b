"""Makes events of synchronizations as they happen; the base class of listeners, which receive them."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..base.compat import autograd
from ..base.errors import SyncError
from ..base.findings import Site
from ..explain.waits import comments, sites
from ..explain.waits.events import Recorder, SyncEvent
from . import policy


class LiveRecorder(Recorder):
    """Collects what happens in a program while it runs.

    Args:
        path: returns the names of the regions that are open on this thread.

    Attributes:
        syncs: number of synchronizations.
        blocked_ns: how long the CPU was blocked in them.
        untimed: how many have no time.
    """

    def __init__(self, path: Callable[[], tuple[str, ...]] = tuple) -> None:
        super().__init__()
        self.path = path
        self.syncs = self.blocked_ns = self.untimed = 0

    def add(self, event: SyncEvent) -> None:
        """Count ``event``."""
        with self._lock:
            super().add(event)
            self.syncs += 1
            self.blocked_ns += event.blocked_ns or 0
            self.untimed += event.blocked_ns is None

    def make_event(self, op: str, cause: str, frame: FrameType | None, **more: Any) -> SyncEvent:
        """Return the event of a synchronization that ``frame`` makes now, with everything known about it.

        Args:
            op: as in `SyncEvent`.
            cause: as in `SyncEvent`.
            frame: the frame of the call, or of anything it calls; the user's line is searched outward from it.
            more: further attributes of the event.
        """
        place = sites.locate(frame)
        allowed = policy.allow_reason() or comments.allowed_at(place.site)
        forbidden = allowed is None and policy.syncs_forbidden()
        return SyncEvent(
            op, cause, place.site, place.via, region=self.path(), step=self.step, allowed=allowed,
            forbidden=forbidden, thread=threading.current_thread().name, backward=autograd.autograd_node(), **more,
        )  # fmt: skip


class SyncListener:
    """Base class for consumers of synchronization events.

    `check` is called when nothing may be raised, as inside torch's hooks; it queues warnings and errors,
    which `raise_pending` delivers once the call has returned.

    Attributes:
        recorder: records the events.
    """

    def __init__(self) -> None:
        self.recorder = LiveRecorder()
        self._pending: deque[tuple[int, str, Site | None, bool]] = deque()  # thread, text, site, is an error

    def check(self, event: SyncEvent, thread: int) -> None:
        """Queue a warning or an error if ``event`` on ``thread`` breaks a rule of this listener."""
        raise NotImplementedError

    def queue(self, text: str, event: SyncEvent, thread: int, *, error: bool) -> None:
        """Have `raise_pending` warn about ``event``, or raise a `SyncError`."""
        self._pending.append((thread, text, event.site, error))

    def raise_pending(self, thread: int | None = None) -> None:
        """Issue the queued warnings of ``thread``, or of all threads, and raise the first queued error.

        Raises:
            SyncError: for a synchronization that is not allowed.
        """
        errors = []
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            of_thread, text, site, is_error = pending
            if thread not in (None, of_thread):
                self._pending.append(pending)
            elif is_error:
                errors.append(text)
            else:
                file, line = (site.file, site.line) if site else ("<unknown>", 1)
                warnings.warn_explicit(text, UserWarning, file, line)
        if errors:
            raise SyncError(errors[0])

    def clear_pending(self) -> None:
        """Drop the queued warnings and errors."""
        self._pending.clear()


def describe(event: SyncEvent) -> str:
    """Return one sentence on ``event``: where it synchronizes, and why."""
    where = event.site or event.via or f"thread {event.thread}"
    code = f" `{event.site.code}`" if event.site is not None and event.site.code else ""
    backward = f", in the backward of {event.backward}" if event.backward else ""
    return f"{where}:{code} makes the CPU wait for the GPU ({event.op}: {event.cause}{backward})"
