"""`Agreement`: opens a requested window at the same step on all ranks of a job.

The ranks exchange requests through the store that torch.distributed was initialized with. Each does so on a thread
of its own, through a connection of its own, and without collectives, so that a late or dead rank delays no other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ...base.compat.training import job_store
from ...base.guard import guard
from ...base.job import rank
from .requests import WindowRequest

FEATURE = "agreeing on a window"
POLL_S = 0.5  # how often a rank asks the store; one small message each time
NOTICE_S = 4 * POLL_S  # between a decision and its window: every rank has asked at least twice
_JOIN_S = 1.5 * POLL_S  # a request this long before an agreed window still reaches all ranks in time
_LEAST_POLLS = 3  # before the first decision, as the speed of the loop is not known earlier
_LEAST_STEPS = 3  # between a decision and its window, as ranks may be a step or two apart
_PATIENCE = 10  # polls that a rank has between the announcement of an entry and the entry itself
_END_S = 1.0  # time limit for the end of the thread
_PREFIX = "instrument/windows/"
_numbers = itertools.count(1)  # of the agreements in this process: the same profile has the same one on all ranks


class Agreement:
    """Passes the requests of this rank to rank 0, and what rank 0 decides to this rank.

    Rank 0 gives each request its first step, so far ahead that all ranks learn of it before they reach it.
    Requests that come meanwhile get the same step, such as those of ranks that see the same file touched.

    Args:
        store: the store of the job.
        decided: called with each request, and its first step, on the thread.
        step: returns the number of the current step.
        done: returns how many steps ended, also where the numbers jump.
    """

    def __init__(
        self,
        store: Any,
        decided: Callable[[WindowRequest], None],
        step: Callable[[], int],
        done: Callable[[], int],
    ) -> None:
        self._store = store  # None once it has failed
        self._decided = decided
        self._step = step
        self._done = done
        self._asked: deque[WindowRequest] = deque()
        self._ended = threading.Event()
        self._process = os.getpid()
        self._leads = rank() == 0
        follow = guard.contained(FEATURE)(self._follow)
        self._thread = threading.Thread(target=follow, name="instrument ranks", daemon=True)
        self._read = {"ask": 0, "decision": 0}  # how many entries of each kind were read
        self._progress: deque[tuple[float, int]] = deque(maxlen=20)  # time and steps done at the last polls
        self._agreed: WindowRequest | None = None  # rank 0's last decision, without those on what recurs
        self._waited = {"ask": 0, "decision": 0}  # polls since the next entry of each kind was announced

    @classmethod
    def begin(
        cls, decided: Callable[[WindowRequest], None], step: Callable[[], int], done: Callable[[], int]
    ) -> Agreement | None:
        """Start the thread; return None in a job with one rank, or without a store."""
        store = job_store(f"{_PREFIX}{next(_numbers)}/")
        if store is None:
            return None
        made = cls(store, decided, step, done)
        made._thread.start()
        return made

    @property
    def active(self) -> bool:
        """Whether requests are passed on; else they are this rank's own."""
        return not self._ended.is_set() and self._process == os.getpid()

    def propose(self, request: WindowRequest) -> None:
        """Pass on a request, on any thread and in a signal handler."""
        self._asked.append(request)
        if self._store is None:
            self._keep_asked()

    def end(self) -> None:
        """End the thread, which takes milliseconds unless the store hangs; requests not passed on are dropped."""
        self._ended.set()
        if self._process == os.getpid():
            self._thread.join(_END_S)

    def _follow(self) -> None:
        try:
            while not self._ended.wait(POLL_S):
                self._progress.append((time.monotonic(), self._done()))
                while self._asked:
                    self._put("ask", self._asked[0])
                    self._asked.popleft()
                if self._leads and len(self._progress) >= _LEAST_POLLS:
                    for request in self._new("ask"):
                        decision = replace(request, first=self._first_step(request))
                        self._agreed = self._agreed if request.every else decision
                        self._put("decision", decision)
                for request in self._new("decision"):
                    self._decided(request)
        except Exception:  # such as of a store that is gone
            self._store = None
            self._ended.set()
            self._keep_asked()
            raise

    def _keep_asked(self) -> None:
        """Make the requests that cannot be passed on this rank's own."""
        with suppress(IndexError):  # another thread takes them too
            while True:
                self._decided(self._asked.popleft())

    def _first_step(self, request: WindowRequest) -> int:
        """Return the first step of a requested window, which all ranks will reach later."""
        agreed = self._agreed
        if request.every and request.first is not None:
            return (
                request.first
                + max(-(-(self._ahead(NOTICE_S) - request.first) // request.every), 0) * request.every
            )
        if agreed is not None and agreed.first is not None and self._ahead(_JOIN_S) <= agreed.first:
            return agreed.first
        return self._ahead(NOTICE_S)

    def _ahead(self, seconds: float) -> int:
        """Return a step that the loop does not reach in ``seconds``, by its fastest steps in the last 10 s."""
        polls = itertools.pairwise(self._progress)
        speeds = [(last - first) / (ended - began) for (began, first), (ended, last) in polls]
        return self._step() + max(_LEAST_STEPS, math.ceil(1.2 * max(speeds) * seconds))

    def _put(self, kind: str, request: WindowRequest) -> None:
        number = self._store.add(f"{kind}/count", 1)
        ranks = None if request.ranks is None else sorted(request.ranks)
        self._store.set(f"{kind}/{number}", json.dumps({**asdict(request), "ranks": ranks}))

    def _new(self, kind: str) -> list[WindowRequest]:
        """Return the entries of a kind that this rank has not read."""
        requests = []
        for number in range(self._read[kind] + 1, self._store.add(f"{kind}/count", 0) + 1):
            if self._store.check([f"{kind}/{number}"]):
                values = json.loads(self._store.get(f"{kind}/{number}"))
                ranks = values.pop("ranks")
                requests.append(WindowRequest(**values, ranks=None if ranks is None else frozenset(ranks)))
            elif self._waited[kind] < _PATIENCE:  # its rank is about to write it, unless it died
                self._waited[kind] += 1
                break
            self._read[kind], self._waited[kind] = number, 0
        return requests
