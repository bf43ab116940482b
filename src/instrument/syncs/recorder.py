"""Records synchronization events as findings; the base class of listeners, which receive events as they happen."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from ..compat import autograd
from ..errors import SyncError
from ..findings import NOT_COVERED, Site, SyncFinding
from . import comments, policy, sites
from .events import SyncEvent
from .fixes import fix_of

Key = tuple[Site | None, Site | None, str, str | None, bool]
CountByStep = Counter[int | None]  # number of calls by step; None for those outside steps
MAX_FINDINGS = 1000  # a program that generates code at run time must not fill the memory


class Tally:
    """The events of one operation at one line, counted."""

    def __init__(self, event: SyncEvent) -> None:
        self._first = event
        self._forbidden = False
        self._count = self._timed = 0
        self._bytes: int | None = None
        self._blocked_ns: int | None = None
        self._idle_ns: int | None = None
        self._regions: Counter[tuple[str, ...]] = Counter()
        self._vias: Counter[Site] = Counter()
        self.steps: CountByStep = Counter()
        self.add(event)

    def add(self, event: SyncEvent) -> None:
        """Count ``event``."""
        self._count += 1
        self._forbidden = self._forbidden or event.forbidden
        self._regions[event.region] += 1
        self.steps[event.step] += 1
        if event.via is not None:
            self._vias[event.via] += 1
        self._bytes = _sum(self._bytes, event.bytes)
        self._idle_ns = _sum(self._idle_ns, event.idle_ns)
        if event.blocked_ns is not None:
            self._blocked_ns = _sum(self._blocked_ns, event.blocked_ns)
            self._timed += 1

    def finding(self) -> SyncFinding:
        """Return the finding of the events so far."""
        first, vias = self._first, self._vias.most_common(1)
        found = SyncFinding(
            first.op, first.cause, first.site, vias[0][0] if vias else None, first.direction, first.thread,
            first.backward, first.allowed, self._forbidden, self._count, self._bytes, self._blocked_ns,
            self._timed, self._idle_ns, self._regions.copy(), self.steps.copy(), self._vias.copy(),
        )  # fmt: skip
        return replace(found, fix=fix_of(found)) if found.covered else found


class Recorder:
    """Collects the findings of one detector; `add` may be called from any thread.

    Attributes:
        steps: number of steps that were checked.
        step: the number of the current step; None outside steps.
        dropped: number of synchronizations at lines beyond the first `MAX_FINDINGS`.
    """

    def __init__(self, path: Callable[[], tuple[str, ...]] = tuple) -> None:
        self.path = path
        self.steps = 0
        self.step: int | None = None
        self.dropped = 0
        self._tallies: dict[Key, Tally] = {}
        self._lock = threading.RLock()  # a signal handler of the program may synchronize, too

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

    def add(self, event: SyncEvent) -> None:
        """Count ``event``."""
        key = _key(event)
        with self._lock:
            new = None
            tally = self._tallies.get(key)
            if tally is None and len(self._tallies) < MAX_FINDINGS:
                new = Tally(event)
                tally = self._tallies.setdefault(key, new)
            if tally is None:
                self.dropped += 1
            elif tally is not new:
                tally.add(event)

    def steps_of(self, event: SyncEvent) -> CountByStep:
        """Return the calls by step of the finding that ``event`` belongs to; empty if there is none."""
        with self._lock:
            tally = self._tallies.get(_key(event))
            return Counter() if tally is None else tally.steps.copy()

    def reassign_steps(self, assign: Callable[[CountByStep], CountByStep]) -> None:
        """Replace the calls by step of each finding with what ``assign`` returns for them."""
        with self._lock:
            for tally in list(self._tallies.values()):
                tally.steps = assign(tally.steps)

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self._tallies

    @property
    def findings(self) -> list[SyncFinding]:
        """The findings so far, in the order in which they were first seen."""
        with self._lock:
            tallies = list(self._tallies.values())
        return [tally.finding() for tally in tallies]

    def clear(self) -> None:
        """Drop all findings."""
        with self._lock:
            self._tallies.clear()
            self.dropped = 0


def findings_of(*events: SyncEvent) -> list[SyncFinding]:
    """Return the findings of ``events``."""
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return recorder.findings


class _Pending(NamedTuple):
    thread: int
    text: str
    site: Site | None
    error: bool


class SyncListener:
    """Base class for consumers of synchronization events.

    `check` is called when nothing may be raised, as inside torch's hooks; it queues warnings and errors,
    which `raise_pending` delivers once the call has returned.

    Attributes:
        recorder: records the events.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._pending: deque[_Pending] = deque()

    def check(self, event: SyncEvent, thread: int) -> None:
        """Queue a warning or an error if ``event`` on ``thread`` breaks a rule of this listener."""
        raise NotImplementedError

    def queue(self, text: str, event: SyncEvent, thread: int, *, error: bool) -> None:
        """Have `raise_pending` warn about ``event``, or raise a `SyncError`."""
        self._pending.append(_Pending(thread, text, event.site, error))

    def raise_pending(self, thread: int | None = None) -> None:
        """Issue the queued warnings of ``thread``, or of all threads, and raise the first queued error.

        Raises:
            SyncError: for a synchronization that is not allowed.
        """
        errors = []
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            if thread is not None and pending.thread != thread:
                self._pending.append(pending)
            elif pending.error:
                errors.append(pending)
            else:
                file, line = (pending.site.file, pending.site.line) if pending.site else ("<unknown>", 1)
                warnings.warn_explicit(pending.text, UserWarning, file, line)
        if errors:
            raise SyncError(errors[0].text)

    def clear_pending(self) -> None:
        """Drop the queued warnings and errors."""
        self._pending.clear()


def describe(event: SyncEvent) -> str:
    """Return one sentence on ``event``: where it synchronizes, and why."""
    where = event.site or event.via or f"thread {event.thread}"
    code = f" `{event.site.code}`" if event.site is not None and event.site.code else ""
    backward = f", in the backward of {event.backward}" if event.backward else ""
    return f"{where}:{code} makes the CPU wait for the GPU ({event.op}: {event.cause}{backward})"


def _key(event: SyncEvent) -> Key:
    """Return the key of the finding that ``event`` belongs to."""
    inner = (
        (event.via, event.backward) if event.site is None else (None, None)
    )  # a user's line identifies it alone
    what = f"{NOT_COVERED}: {event.cause}" if event.op == NOT_COVERED else event.op
    return event.site, inner[0], what, inner[1], event.allowed is None


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else one + other
