"""`RequestedWindows`: the windows of a schedule, and those that are requested while the loop runs; `Agreement`.

The ranks of a job exchange requests through the store that torch.distributed was initialized with, each on a
thread and through a connection of its own. No rank waits for another, and there is no collective: a rank that is
late or dead delays no other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from heapq import merge
from typing import Any

from ...base.compat.training import job_store
from ...base.guard import guard
from .ranks import rank
from .schedule import NEVER, Schedule, StepAction, TorchSchedule, Window

SCHEDULE = "schedule"
"""The reason of a planned window, in the manifest."""


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window that is requested while the loop runs.

    Attributes:
        reason: who requests it, in words, for the manifest.
        active: the number of recorded steps.
        warmup: the number of warm-up steps before them.
        first: the first step of the warm-up; None is the next step.
        ranks: the ranks that record it; None is those of the profile.
        automatic: opened by a slow step or the clock, not by a person or the program.
        id: by which `instrument trigger` asks for the window that serves the request; empty without it.
    """

    reason: str
    active: int = 3
    warmup: int = 1
    first: int | None = None
    ranks: frozenset[int] | None = None
    automatic: bool = False
    id: str = ""


@dataclass(order=True, slots=True)
class _Added:
    """A window that the schedule does not have."""

    warmup: int
    active: int
    stop: int
    planned_before: int = field(compare=False)  # how many planned windows begin before it
    recorded: bool = field(compare=False)  # by this rank
    ranks: frozenset[int] | None = field(compare=False)  # that record it; None is those of the profile
    requests: list[WindowRequest] = field(compare=False, default_factory=list)


class RequestedWindows:
    """The windows of a schedule and the requested ones, numbered together in the order of their steps.

    All methods are called on the thread of the loop, with steps that do not decrease except by `go_to`.

    Args:
        planned: the schedule.
        phase: the beginning of the label of each window: the phase of the program; empty for training steps.
        has_schedule: whether the user gave a schedule; without one, a window may have no marked steps.

    Attributes:
        phase: as given.
        has_schedule: as given.
        records_planned: whether this rank records planned windows that no request joined.
        open_ended: whether further requests are expected.
    """

    def __init__(self, planned: Schedule | TorchSchedule, phase: str = "", *, has_schedule: bool = True) -> None:
        self.records_planned = True
        self.open_ended = False
        self._planned = planned
        self.phase = phase
        self.has_schedule = has_schedule
        self._added: list[_Added] = []  # in order
        self._joined: dict[
            int, tuple[Window, list[WindowRequest]]
        ] = {}  # planned windows with requests, by their number
        self._begun: Window | None = None  # the planned window that began last, by its number in the schedule

    @property
    def plans_ahead(self) -> bool:
        """Whether `next_window` returns a planned window before it begins."""
        return self._planned.plans_ahead

    @property
    def planned_count(self) -> int | None:
        """The number of planned windows; None if the schedule is endless."""
        return self._planned.count

    def is_last(self, index: int) -> bool:
        """Return whether no window can follow window ``index``."""
        planned = self._planned.count
        return not self.open_ended and planned is not None and planned + len(self._added) == index

    def last_before(self, step: int) -> int:
        """Return the number of the last window that ends before ``step``; 0 for none."""
        planned = self._planned.next_window(step)
        before = (self._planned.count or 0) if planned is None else planned.index - 1
        return before + sum(each.stop <= step for each in self._added)

    def go_to(self, step: int, reached: int) -> None:
        """Go on with ``step`` in place of ``reached``.

        After a step back, planned windows in between begin again, and requested ones do not.
        """
        if step < reached:
            self._added = [each for each in self._added if each.stop <= step or each.warmup >= reached]
            joined = self._joined.items()
            self._joined = {
                number: each for number, each in joined if each[0].stop <= step or each[0].warmup >= reached
            }
        if self._begun is not None and not self.plans_ahead:  # its end is not known before it is over
            self._begun = replace(self._begun, stop=min(self._begun.stop, step))

    def add(self, request: WindowRequest, step: int, *, recorded: bool = True) -> Window:
        """Return the window that serves a request, which came before ``step``.

        That is a window of its own, which begins at ``step`` or, if a window is open then, after that window; or
        the next window, if the recorded steps of that one begin before its own would end.

        Args:
            request: the request.
            step: the step that begins now.
            recorded: whether this rank records the window.
        """
        first = max(step, request.first or 0)
        while True:
            active, planned, added = first + request.warmup, self._planned_from(first), self._added_from(first)
            stop = active + request.active
            joins_added = planned is None or (added is not None and added.warmup < planned.warmup)
            following = added if joins_added else planned
            if following is None or stop <= following.warmup:
                before = self._begun_before(planned)
                return self._add(_Added(first, active, stop, before, recorded, request.ranks), request)
            if first <= following.active or following.stop == NEVER:
                if isinstance(following, Window):
                    return self._join(following, request, recorded)
                return self._join_added(following, request, recorded)
            first = following.stop

    def _add(self, window: _Added, request: WindowRequest) -> Window:
        window.requests.append(request)
        insort(self._added, window)
        return self._window_of(window)

    def _join_added(self, added: _Added, request: WindowRequest, recorded: bool) -> Window:
        added.recorded |= recorded
        both = added.ranks is not None and request.ranks is not None
        added.ranks = (added.ranks or frozenset()) | (request.ranks or frozenset()) if both else None
        added.requests.append(request)
        return self._window_of(added)

    def _join(self, planned: Window, request: WindowRequest, recorded: bool) -> Window:
        if recorded or self.records_planned:
            self._joined.setdefault(planned.index, (planned, []))[1].append(request)
        return self._numbered(planned)

    def opened_by(self, window: Window) -> list[str]:
        """Return why ``window`` was opened: "schedule", and the reasons of requests, each once."""
        planned = self.records_planned and self._added_with(window.index) is None
        reasons = [SCHEDULE] * planned + [request.reason for request in self._requests_of(window)]
        return list(dict.fromkeys(reasons))

    def is_requested(self, window: Window) -> bool:
        """Return whether a person or the program asked for ``window``, not only a schedule or a slow step."""
        return not all(request.automatic for request in self._requests_of(window))

    def _requests_of(self, window: Window) -> list[WindowRequest]:
        added = self._added_with(window.index)
        if added is not None:
            return added.requests
        return self._joined.get(self._planned_number(window.index), (None, []))[1]

    def chosen_ranks(self, window: Window) -> frozenset[int] | None:
        """Return the ranks that requests chose for ``window``; None if those of the profile record it."""
        added = self._added_with(window.index)
        return None if added is None else added.ranks

    def label(self, window: Window) -> int | str:
        """Return the number of a planned window in the schedule, and "step-812" for a requested one.

        In the phase "eval", that is "eval-0001" and "eval-step-812".
        """
        added = self._added_with(window.index)
        if added is not None:
            return f"{self.phase and f'{self.phase}-'}step-{added.active}"
        number = self._planned_number(window.index)
        return f"{self.phase}-{number:04d}" if self.phase else number

    def at(self, step: int) -> tuple[StepAction, Window | None]:
        """Return what the profiler does in ``step``, and its window (None in `StepAction.WAIT`)."""
        action, planned = self._planned.at(step)  # called for each step, as schedules that are functions expect
        self._begun = planned or self._begun
        added = self._added_from(step)
        if added is not None and added.warmup <= step:
            if not added.recorded:
                return StepAction.WAIT, None
            return (StepAction.WARMUP if step < added.active else StepAction.ACTIVE), self._window_of(added)
        if planned is None or not self._is_recorded(planned):
            return StepAction.WAIT, None
        return action, self._numbered(planned)

    def next_window(self, step: int) -> Window | None:
        """Return the window that ``step`` is in, else the next one; None if no further one is known."""
        added = next((each for each in self._added if each.recorded and each.stop > step), None)
        if self.records_planned:
            planned = self._planned.next_window(step)
        else:
            planned = next((window for window, _ in self._joined.values() if window.stop > step), None)
        if added is not None and (planned is None or added.warmup < planned.warmup):
            return self._window_of(added)
        return planned and self._numbered(planned)

    def after(self, index: int) -> Iterator[Window]:
        """Yield the known windows after number ``index``; of an endless schedule, only the next planned one."""
        first = index + 1 - sum(number <= index for number in self._added_numbers())
        last = first if self._planned.count is None else self._planned.count
        planned = filter(None, map(self._planned.window, range(first, last + 1)))
        added = [self._window_of(each) for each in self._added if each.recorded]
        return merge(
            [window for window in added if window.index > index],
            map(self._numbered, filter(self._is_recorded, planned)),
            key=lambda window: window.index,
        )

    def _is_recorded(self, planned: Window) -> bool:
        return self.records_planned or planned.index in self._joined

    def _planned_from(self, step: int) -> Window | None:
        """Return the planned window that ``step`` is in, else the next one if it is known."""
        if self._planned.plans_ahead:
            return self._planned.next_window(step)
        return self._begun if self._begun is not None and self._begun.stop > step else None

    def _begun_before(self, planned: Window | None) -> int:
        """Return how many planned windows begin before ``planned``; for None, before now."""
        if planned is not None:
            return planned.index - 1
        begun = self._begun.index if self._begun is not None else 0
        return begun if self._planned.count is None else self._planned.count

    def _added_from(self, step: int) -> _Added | None:
        """Return the added window that ``step`` is in, else the next one."""
        return next((each for each in self._added if each.stop > step), None)

    def _added_numbers(self) -> Iterator[int]:
        return (each.planned_before + place for place, each in enumerate(self._added, start=1))

    def _added_with(self, index: int) -> _Added | None:
        """Return the added window with number ``index``."""
        numbered = zip(self._added, self._added_numbers(), strict=True)
        return next((each for each, number in numbered if number == index), None)

    def _planned_number(self, index: int) -> int:
        """Return the number in the schedule of the planned window with number ``index``."""
        return index - sum(number < index for number in self._added_numbers())

    def _numbered(self, planned: Window) -> Window:
        """Return a planned window with its number among all windows."""
        before = sum(each.planned_before < planned.index for each in self._added)
        return replace(planned, index=planned.index + before) if before else planned

    def _window_of(self, added: _Added) -> Window:
        place = next(place for place, each in enumerate(self._added, start=1) if each is added)
        return Window(added.planned_before + place, added.warmup, added.active, added.stop)


AGREEING = "agreeing on a window"
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
        follow = guard.contained(AGREEING)(self._follow)
        self._thread = threading.Thread(target=follow, name="instrument ranks", daemon=True)
        self._read = {"ask": 0, "decision": 0}  # how many entries of each kind were read
        self._progress: deque[tuple[float, int]] = deque(maxlen=20)  # time and steps done at the last polls
        self._agreed: WindowRequest | None = None  # rank 0's last decision
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
                        self._agreed = replace(request, first=self._first_step())
                        self._put("decision", self._agreed)
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

    def _first_step(self) -> int:
        """Return the first step of a requested window, which all ranks will reach later."""
        agreed = self._agreed
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
