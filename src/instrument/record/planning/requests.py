"""`RequestedWindows`: the windows of a schedule, and those that are requested while the loop runs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import merge

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
        every: what the window is to show recurs after so many steps, so it may as well be later by a multiple of
            them; 0 if it does not recur.
        ranks: the ranks that record it; None is those of the profile.
        automatic: opened by a slow step or the clock, not by a person or the program.
        id: by which `instrument trigger` asks for the window that serves the request; empty without it.
    """

    reason: str
    active: int = 3
    warmup: int = 1
    first: int | None = None
    every: int = 0
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
