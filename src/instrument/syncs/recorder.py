"""Gathers events into findings: the same operation at the same line is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import compat
from . import comments, policy, sites
from .finding import NOT_COVERED, Event, Finding, Site

Key = tuple[Site | None, Site | None, str, str | None, bool]
MAX_FINDINGS = 1000  # a program that makes code as it runs must not fill the memory


class Recorder:
    """The findings of one detector; `add` may be called from any thread.

    Attributes:
        steps: how many steps were looked at.
        step: the number of the current step; None outside of steps.
        dropped: waits at further lines than `MAX_FINDINGS`.
    """

    def __init__(self, path: Callable[[], tuple[str, ...]] = tuple) -> None:
        self.path = path
        self.steps = 0
        self.step: int | None = None
        self.dropped = 0
        self._found: dict[Key, Finding] = {}
        self._lock = threading.RLock()  # a signal handler of the program may wait for the GPU, too

    def note(self, op: str, cause: str, frame: FrameType | None, **more: Any) -> Event:
        """Return the event of a wait that the caller of ``frame`` makes now, with all that is known here.

        Args:
            op: as in `Event`.
            cause: as in `Event`.
            frame: of the call, or of anything it calls; the user's line is looked for outward from it.
            more: further attributes of the event.
        """
        place = sites.locate(frame)
        allowed = policy.allowed_here() or comments.allowed_at(place.site)
        forbidden = allowed is None and policy.forbidden_here()
        return Event(
            op, cause, place.site, place.via, region=self.path(), step=self.step, allowed=allowed,
            forbidden=forbidden, thread=threading.current_thread().name, backward=compat.autograd_node(), **more,
        )  # fmt: skip

    def add(self, event: Event) -> None:
        """Count ``event``."""
        key = _key(event)
        with self._lock:
            new = None
            found = self._found.get(key)
            if found is None and len(self._found) < MAX_FINDINGS:
                new = Finding.of(event)
                found = self._found.setdefault(key, new)
            if found is None:
                self.dropped += 1
            elif found is not new:
                found.add(event)

    def like(self, event: Event) -> Finding | None:
        """Return the finding that ``event`` would be counted in; None where it would be a new one."""
        with self._lock:
            return self._found.get(_key(event))

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in the order in which it was first seen."""
        with self._lock:
            return list(self._found.values())

    def clear(self) -> None:
        """Forget what was found."""
        with self._lock:
            self._found.clear()
            self.dropped = 0


def _key(event: Event) -> Key:
    """What tells findings apart; without a line of the user's, the library's line and the autograd node."""
    inner = (event.via, event.backward) if event.site is None else (None, None)
    what = f"{NOT_COVERED}: {event.cause}" if event.op == NOT_COVERED else event.op
    return event.site, inner[0], what, inner[1], event.allowed is None
