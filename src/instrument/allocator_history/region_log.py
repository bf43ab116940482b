"""`RegionLog`: notes when regions and steps begin and end, for a memory snapshot."""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from threading import get_ident
from typing import Any

from ..regions.region import Region
from ..trace_marks import STEP_PREFIX

MOST = 100_000  # begins and ends that are kept, the newest ones: 10 MB of a snapshot
Handle = tuple[str, int]  # the name of a range, and its number


class RegionLog:
    """An emitter that keeps begins and ends of regions; `instrument.regions.dispatch.active.add` activates it."""

    name = "memory"

    def __init__(self) -> None:
        self._entries: deque[tuple[int, str, str, int, int]] = deque(maxlen=MOST)
        self._numbers = count()
        self._step: Handle | None = None

    def push(self, region: Region) -> Handle:
        """Note the begin of a region."""
        return self._begin(region.name)

    def pop(self, handle: Handle) -> None:
        """Note its end, on whichever thread."""
        self._entries.append((time.time_ns(), "END", handle[0], get_ident(), handle[1]))

    start = push
    end = pop

    def mark(self, region: Region) -> None:
        """Note an instant, as a range without a length."""
        self.pop(self.push(region))

    def step(self, number: int | None) -> None:
        """Note that step ``number`` begins, and the one before it ends; with None, only the latter."""
        ended, self._step = self._step, None
        if ended is not None:
            self.pop(ended)
        if number is not None:
            self._step = self._begin(f"{STEP_PREFIX}{number}")

    def _begin(self, name: str) -> Handle:
        handle = name, next(self._numbers)
        self._entries.append((time.time_ns(), "START", name, get_ident(), handle[1]))
        return handle

    def annotations(self, device: int) -> list[dict[str, Any]]:
        """Return the entries as torch has them in the ``external_annotations`` of a snapshot, and a little more.

        torch's own have ``name``, ``stage`` ("START" or "END"), ``device`` and ``time_us``, in us since the epoch.
        These also have ``source`` ("instrument"), ``range``, the number that a begin and its end share, and
        ``thread``, which `threading.get_ident` returned there.
        """
        return [
            {
                "name": name, "stage": stage, "device": device, "time_us": time_ns // 1000,
                "source": "instrument", "range": number, "thread": thread,
            }
            for time_ns, stage, name, thread, number in self._entries.copy()
        ]  # fmt: skip
