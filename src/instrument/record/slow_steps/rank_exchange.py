"""`RankExchange`: takes the times of all ranks to rank 0, through the store of the job.

Each rank has one key, which it overwrites at every interval from a thread of its own, through a connection of its
own: a line of JSON for each of its last intervals, the newest first. Rank 0 reads what is there. There are no
collectives, and no rank waits for another.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from ...base import log
from ...base.compat.training import job_store
from ...base.guard import guard
from .rank_judging import RankTimes

FEATURE = "comparing the ranks"
_LOOK_S = (
    0.1  # after its own interval rank 0 looks for the times of the others; then after twice as long, and so on
)
_LATE = 2  # intervals of rank 0 without news, after which it does not wait for a rank
_KEPT = 8  # intervals in the value of a key, so that a read of rank 0 may come late
_PATIENCE = timedelta(seconds=2)  # for one request to the store
_RETRY_S = 30.0  # after an error of the store
_END_S = 3.0  # time limit for the end of the thread: a process must not end during a request
_PREFIX = "instrument/slow ranks/"
_OVER = "over"  # the key that says that rank 0 reads no more


class RankExchange:
    """Publishes the times of this rank; on rank 0, also collects those of the others.

    Args:
        rank: the number of this rank.
        world_size: the number of ranks.
        on_interval: called on rank 0 for each of its intervals, on the thread, with the times of the same steps
            by rank. Rank 0 waits for one that lags, up to seven intervals, but not for one that is silent.
        number: of this comparison, as each loop of a job may have one; the same on all ranks.
    """

    def __init__(
        self, rank: int, world_size: int, on_interval: Callable[[dict[int, RankTimes]], None], number: int = 0
    ) -> None:
        self._prefix = f"{_PREFIX}{number}/"
        self._rank = rank
        self._world_size = world_size
        self._on_interval = on_interval
        self._given: SimpleQueue[RankTimes | None] = SimpleQueue()
        self._store: Any = None
        self._retry_s = 0.0  # when to connect again
        self._ended = False
        self._process = os.getpid()
        self._look_s = _LOOK_S  # until the next look
        self._sent: list[str] = []  # the lines of the key
        self._rows: dict[int, dict[int, RankTimes]] = {
            other: {} for other in range(world_size)
        }  # not judged, by step
        self._newest = dict.fromkeys(self._rows, -1)  # the last step of each that was read
        self._intervals = 0  # of rank 0
        self._heard = dict.fromkeys(self._rows, 0)  # how many there were when times of each were last read
        follow = guard.contained(FEATURE)(self._follow)
        self._thread = threading.Thread(target=follow, name="instrument slow ranks", daemon=True)
        self._thread.start()

    def publish(self, times: RankTimes) -> None:
        """Hand over the times of an interval; the thread does the rest."""
        self._given.put(times)

    def end(self, wait_s: float = _END_S) -> None:
        """Delete the key of this rank and end the thread, which takes milliseconds unless the store hangs."""
        self._ended = True
        if self._process == os.getpid():
            self._given.put(None)
            self._thread.join(wait_s)

    def _follow(self) -> None:
        times: RankTimes | None = None
        while True:
            try:
                self._pass_on(times)
            except Exception as error:  # such as of a store that is gone
                self._store, self._retry_s = None, time.monotonic() + _RETRY_S
                self._rows[0].clear()
                if not self._ended:
                    guard.note(FEATURE, error)
            if self._ended and self._given.empty():
                return
            try:
                times = self._given.get(timeout=self._look_s if self._rank == 0 and self._rows[0] else None)
            except Empty:
                times = None

    def _pass_on(self, times: RankTimes | None) -> None:
        if self._store is None and not self._connect():
            return
        if times is not None and self._rank == 0:
            self._rows[0][times.step] = times
            self._look_s = _LOOK_S
            self._intervals += 1
        elif times is not None:
            self._sent = [json.dumps(times), *self._sent][:_KEPT]
            self._store.set(str(self._rank), "\n".join(self._sent))
        if self._rows[0] and (times is None or self._ended or len(self._rows[0]) > _LATE):
            self._look_s *= 2
            self._collect()
            self._judge()
        if self._ended and self._given.empty():
            self._leave()

    def _connect(self) -> bool:
        if self._ended or time.monotonic() < self._retry_s:
            return False
        is_first, self._retry_s = not self._retry_s, time.monotonic() + _RETRY_S
        store = job_store(self._prefix)
        if store is None:
            if is_first and self._rank == 0:
                log.warning(
                    "slow_ranks() compares nothing: this job has no store that torch can clone, as 2.7 can"
                )
            return False
        store.set_timeout(_PATIENCE)
        if is_first:  # what an earlier run in the same job left; the ranks of this one publish an interval later
            keys = self._keys()
            store.multi_set(keys, [""] * len(keys))
            if self._rank == 0:
                store.delete_key(_OVER)
        self._store = store
        return True

    def _keys(self) -> list[str]:
        """Return the key of this rank; on rank 0, which has none, those of the others."""
        return [str(rank) for rank in (range(1, self._world_size) if self._rank == 0 else (self._rank,))]

    def _leave(self) -> None:
        """Leave no key, nor delete one that rank 0 may be about to read, as it would wait for it."""
        if self._rank == 0:
            self._store.set(_OVER, "")
        elif not self._store.check([_OVER]):
            self._store.set(str(self._rank), "")
            return
        for key in self._keys():  # those of dead ranks too
            self._store.delete_key(key)

    def _collect(self) -> None:
        """Read the keys of the ranks whose times are missing."""
        newest = max(self._rows[0])
        keys = self._existing([key for key in self._keys() if self._newest[int(key)] < newest])
        for key, value in zip(keys, self._store.multi_get(keys) if keys else (), strict=True):
            rank, known = int(key), self._newest[int(key)]
            for line in value.splitlines():
                times = RankTimes(*json.loads(line))
                if times.step <= known:
                    break
                self._rows[rank][times.step] = times
                self._newest[rank] = max(self._newest[rank], times.step)
                self._heard[rank] = self._intervals

    def _existing(self, keys: list[str]) -> list[str]:
        """Return the keys that exist, as nearly always all do; reading another one would wait for it."""
        if not keys or self._store.check(keys):
            return keys
        half = len(keys) // 2
        return [*self._existing(keys[:half]), *self._existing(keys[half:])] if half else []

    def _judge(self) -> None:
        """Hand over the intervals for which no further times will come."""
        for step in sorted(self._rows[0]):
            if len(self._rows[0]) < _KEPT and any(self._is_waited_for(rank, step) for rank in self._rows):
                return
            ranks = {rank: rows[step] for rank, rows in self._rows.items() if step in rows}
            for rows in self._rows.values():
                for old in [other for other in rows if other <= step]:
                    del rows[old]
            self._on_interval(ranks)

    def _is_waited_for(self, rank: int, step: int) -> bool:
        return rank != 0 and self._newest[rank] < step and self._intervals - self._heard[rank] <= _LATE
