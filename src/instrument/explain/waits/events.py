"""`SyncEvent`, one synchronization as it was seen, and `Recorder`, which counts events as findings."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ...base.findings import NOT_COVERED, Direction, Site, SyncFinding
from .fixes import fix_of

Source = Literal["live", "dry run", "trace"]
CHOSEN = "the device was chosen before the dry run began"


@dataclass
class SyncEvent:
    """One synchronization: a call that makes the CPU wait for the GPU.

    Attributes:
        op: the outermost public call: the name of a function or method without its module ("item", "to",
            "synchronize", "unique"), or what the line does ("bool", "getitem", "setitem", "format", "print");
            `NOT_COVERED` for what a dry run could not run.
        cause: why it synchronizes, in a few words.
        site: the user's line; None if no Python frame is known.
        via: the line of the library that made the call; None if the user's line did.
        direction: direction of the copy; None if it is not a copy.
        bytes: bytes of the copy; None if it is not a copy, or unknown.
        blocked_ns: how long the CPU was blocked; None if unknown.
        idle_ns: how long the GPU was left idle; None if unknown.
        region: the names of the regions around the call, outermost first.
        step: the number of the step; None outside steps.
        thread: the name of the thread.
        backward: the autograd node that ran.
        allowed: the reason why it is allowed; None if it is not.
        forbidden: it happened inside `no_syncs`, or code that is not covered would fail on a GPU.
    """

    op: str
    cause: str
    site: Site | None = None
    via: Site | None = None
    direction: Direction | None = None
    bytes: int | None = None
    blocked_ns: int | None = None
    idle_ns: int | None = None
    region: tuple[str, ...] = ()
    step: int | None = None
    thread: str = ""
    backward: str | None = None
    allowed: str | None = None
    forbidden: bool = False


Key = tuple[Site | None, Site | None, str, str | None, bool]
CountByStep = Counter[int | None]  # number of calls by step; None for those outside steps
MAX_FINDINGS = 1000  # a program that generates code at run time must not fill the memory


class Tally:
    """The events of one operation at one line, counted; ``first`` is not counted yet."""

    def __init__(self, first: SyncEvent) -> None:
        self._first = first
        self._forbidden = False
        self._count = self._timed = 0
        self._bytes: int | None = None
        self._blocked_ns: int | None = None
        self._idle_ns: int | None = None
        self._regions: Counter[tuple[str, ...]] = Counter()
        self._vias: Counter[Site] = Counter()
        self.steps: CountByStep = Counter()

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
        finding = SyncFinding(
            first.op, first.cause, first.site, vias[0][0] if vias else None, first.direction, first.thread,
            first.backward, first.allowed, self._forbidden, self._count, self._bytes, self._blocked_ns,
            self._timed, self._idle_ns, self._regions.copy(), self.steps.copy(), self._vias.copy(),
        )  # fmt: skip
        return replace(finding, fix=fix_of(finding)) if finding.covered else finding


class Recorder:
    """Collects the findings of one detector; `add` may be called from any thread.

    Attributes:
        steps: number of steps that were checked.
        step: the number of the current step; None outside steps.
        dropped: number of synchronizations at lines beyond the first `MAX_FINDINGS`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step: int | None = None
        self.dropped = 0
        self._tallies: dict[Key, Tally] = {}
        self._lock = threading.RLock()  # a signal handler of the program may synchronize, too

    def add(self, event: SyncEvent) -> None:
        """Count ``event``."""
        key = _key(event)
        with self._lock:
            tally = self._tallies.get(key)
            if tally is None and len(self._tallies) < MAX_FINDINGS:
                tally = self._tallies.setdefault(key, Tally(event))
            if tally is None:
                self.dropped += 1
            else:
                tally.add(event)

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


def _key(event: SyncEvent) -> Key:
    """Return the key of the finding that ``event`` belongs to."""
    what = f"{NOT_COVERED}: {event.cause}" if event.op == NOT_COVERED else event.op
    if event.site is not None:  # a user's line identifies it alone
        return event.site, None, what, None, event.allowed is None
    return None, event.via, what, event.backward, event.allowed is None


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else one + other
