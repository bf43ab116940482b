"""`schedule`: decides from a step's number whether it is recorded; `TorchSchedule` adapts a function to it."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from ...base.compat import gpu
from ...base.units import integer

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction

NEVER = sys.maxsize  # a step that no loop reaches
SCHEDULE_OPTIONS = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait", "at", "every")
"""The arguments of `schedule`."""
_USER_NAMES = ("at", "count", "finite", "next_window", "window", "windows")


class StepAction(enum.Enum):
    """What the profiler does during one step."""

    WAIT = "wait"
    """Nothing is on."""
    WARMUP = "warmup"
    """The profiler is on, and its data is discarded."""
    ACTIVE = "active"
    """The step is recorded."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that one recording covers, and its warm-up. Steps are numbered from 0.

    Attributes:
        index: the number of the window in the schedule, from 1.
        warmup: the first warm-up step; equal to ``active`` without warm-up.
        active: the first recorded step.
        stop: the first step after the window.
    """

    index: int
    warmup: int
    active: int
    stop: int

    def __str__(self) -> str:
        return span(self.active, self.stop)

    def __dir__(self) -> list[str]:
        return ["active", "index", "stop", "warmup"]


class Schedule(ABC):
    """The windows of a run, in order and without overlap. Those of `schedule` are immutable and hashable.

    Like torch's own schedules, it can be called with a step's number and passed to ``torch.profiler.profile``.

    Attributes:
        count: the number of windows; None if the schedule is endless.
        plans_ahead: whether `next_window` returns a window before the window begins.
        warms_up_gpu: whether the step before a window is warm-up where the program uses a GPU by then.
    """

    __slots__ = ()
    plans_ahead: ClassVar[bool] = True

    count: int | None
    warms_up_gpu: bool

    @property
    def finite(self) -> bool:
        """Whether the schedule has a last window."""
        return self.count is not None

    def window(self, index: int) -> Window | None:
        """Return the window number ``index``, counted from 1; None beyond the last.

        Raises:
            ValueError: ``index`` is below 1.
        """
        if index < 1:
            raise ValueError(f'"index" must be an integer >= 1: {index!r}')
        if self.count is not None and index > self.count:
            return None
        window = self._window(index)
        if self.warms_up_gpu and gpu.in_use() is not None:
            before = self._window(index - 1).stop if index > 1 else 0
            return replace(window, warmup=max(window.active - 1, before))
        return window

    def next_window(self, step: int) -> Window | None:
        """Return the window that ``step`` is in, else the next one; None after the last.

        Raises:
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f'"step" must be an integer >= 0: {step!r}')
        return self.window(self._index(step))

    def at(self, step: int) -> tuple[StepAction, Window | None]:
        """Return what the profiler does in ``step``, and its window (None in `StepAction.WAIT`).

        Raises:
            ValueError: ``step`` is negative.
        """
        window = self.next_window(step)
        if window is None or step < window.warmup:
            return StepAction.WAIT, None
        return (StepAction.WARMUP if step < window.active else StepAction.ACTIVE), window

    def __call__(self, step: int) -> ProfilerAction:
        """Return the `torch.profiler.ProfilerAction` of ``step``, for ``torch.profiler.profile(schedule=...)``.

        Raises:
            ValueError: ``step`` is negative.
        """
        from torch.profiler import ProfilerAction

        action, window = self.at(step)
        if action is StepAction.ACTIVE:
            last = window is not None and step == window.stop - 1
            return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if action is StepAction.WARMUP else ProfilerAction.NONE

    def starting(self, step: int) -> Schedule:
        """Return the schedule of a loop that begins with ``step``: cycles start there, named steps stay."""
        return self

    def windows(self) -> Iterator[Window]:
        """Yield every window in order; endless unless `finite`."""
        for index in count(1):
            window = self.window(index)
            if window is None:
                return
            yield window

    def __dir__(self) -> list[str]:
        return list(_USER_NAMES)

    def __repr__(self) -> str:
        # The steps in the form that `schedule` reads: Schedule('2-4,7-9', warmup=1)
        head = list(islice(self.windows(), 4))
        shown = [str(window) for window in head]
        if self.count is None or self.count > 4:
            shown[3:] = ["..."] if self.count is None else ["...", str(self.window(self.count))]
        warmup = max(window.active - window.warmup for window in head)
        return f"Schedule({','.join(shown)!r}, {warmup=})"

    @abstractmethod
    def _window(self, index: int) -> Window:
        """Return the window number ``index``, which exists."""

    @abstractmethod
    def _index(self, step: int) -> int:
        """Return the number of the first window that stops after ``step``."""


@dataclass(frozen=True, slots=True, repr=False)
class _Periodic(Schedule):
    """Equal windows at equal distances; recording starts at ``first``, ``first + period``, ..."""

    count: int | None
    first: int
    period: int
    warmup: int
    active: int
    relative: bool
    warms_up_gpu: bool

    def starting(self, step: int) -> Schedule:
        return replace(self, first=self.first + step) if self.relative else self

    def _window(self, index: int) -> Window:
        start = self.first + (index - 1) * self.period
        return Window(index, start - self.warmup, start, start + self.active)

    def _index(self, step: int) -> int:
        return max((step - self.first - self.active) // self.period + 2, 1)


@dataclass(frozen=True, slots=True, repr=False)
class _Explicit(Schedule):
    """Windows that are listed one by one."""

    count: int | None
    listed: tuple[Window, ...]
    warms_up_gpu: bool = False

    def _window(self, index: int) -> Window:
        return self.listed[index - 1]

    def _index(self, step: int) -> int:
        return bisect_right(self.listed, step, key=lambda window: window.stop) + 1


NOTHING = _Explicit(0, ())
"""The schedule without windows."""


def schedule(
    at: str | int | Iterable[int] | None = None,
    *,
    wait: int = 0,
    warmup: int | None = None,
    active: int | None = None,
    repeat: int = 0,
    skip_first: int = 0,
    skip_first_wait: bool | int = 0,
    every: int | None = None,
) -> Schedule:
    """Plan which steps are recorded, in one of three ways. Steps are numbered from 0.

    Cycles, as in `torch.profiler.schedule`: ``schedule(wait=1, warmup=1, active=3, repeat=2)``.

    Named steps: ``schedule("10-12,100")``, ``schedule(at=[100, 1100], active=2)``. A number starts a window
    of ``active`` steps. A range, which only a string can hold, includes both ends and is one window.

    A period: ``schedule(every=1000, warmup=1, active=3)`` records 1000-1002, 2000-2002, ...

    Args:
        at: the steps by number, in any order: one, several, or a string such as ``"10-12,100"``.
        wait: idle steps at the start of each cycle. Cycles only.
        warmup: steps before each window in which the profiler is on and its data is discarded. Before named
            steps, as many as fit after step 0 and the previous window. 0 leaves other steps untouched; 1 keeps
            the cost of starting the profiler out of the first recorded step. By default 0 or, if the program uses
            a GPU by then, 1: the GPU's profiling interface loses the first kernels of a later window without it.
        active: recorded steps of each window: required for cycles, otherwise 1 by default. Not with ranges.
        repeat: the largest number of windows; 0 means no limit. Not with named steps.
        skip_first: the steps before the first cycle; with a period, the first step at which recording may
            start. Not with named steps.
        skip_first_wait: whether the first cycle leaves out ``wait``; any number except 0 is true. Cycles only.
        every: steps from the start of one recorded part to the next, at least ``warmup + active``.

    Raises:
        TypeError: a number is not an integer, or is True or False.
        ValueError: an argument is out of range, cannot be combined with another one, or windows overlap.
    """
    if at is not None and every is not None:
        raise ValueError(f'"every" must be left out with "at": {every!r}')
    chosen, warmup = warmup is not None, integer("warmup", warmup or 0)
    wait, repeat = integer("wait", wait), integer("repeat", repeat)
    skip_first = integer("skip_first", skip_first)
    if not isinstance(skip_first_wait, bool):
        integer("skip_first_wait", skip_first_wait)
    if active is not None:
        active = integer("active", active, least=1)

    if at is not None:
        _reject_others("at", wait=wait, repeat=repeat, skip_first=skip_first, skip_first_wait=skip_first_wait)
        return _explicit(at, warmup, active, warms_up_gpu=not chosen)
    if every is not None:
        _reject_others("every", wait=wait, skip_first_wait=skip_first_wait)
        active = active or 1
        period = integer("every", every, least=warmup + active, why=f" ({warmup=} + {active=})")
        first = max(-(-skip_first // period), 1) * period
    elif active is None:
        raise ValueError('"active" must be an integer >= 1 unless "at" or "every" is given: None')
    else:
        period = wait + warmup + active
        first = skip_first + (0 if skip_first_wait else wait) + warmup
    relative = every is None
    return _Periodic(repeat or None, first, period, warmup, active, relative, warms_up_gpu=not chosen)


def _explicit(at: str | int | Iterable[int], warmup: int, active: int | None, *, warms_up_gpu: bool) -> Schedule:
    spans = sorted(_parse(at, active))
    if not spans:
        raise ValueError(f'"at" must name at least one step: {at!r}')
    for before, after in pairwise(spans):
        if before == after:
            raise ValueError(f'"at" must name each window once: {span(*after)} twice in {at!r}')
        if before[1] > after[0]:
            raise ValueError(
                f'"at" must name windows that do not overlap: {span(*before)} and {span(*after)} '
                f"in {at!r}{f' with {active=}' if active else ''}"
            )
    stops = [0, *(stop for _, stop in spans)]
    windows = (
        Window(index, max(start - warmup, floor), start, stop)
        for index, ((start, stop), floor) in enumerate(zip(spans, stops, strict=False), start=1)
    )
    return _Explicit(len(spans), tuple(windows), warms_up_gpu)


def _parse(at: str | int | Iterable[int], active: int | None) -> Iterator[tuple[int, int]]:
    """Yield the recorded part of each window, as (first step, first step after)."""
    if isinstance(at, (bytes, bytearray, Mapping)):
        raise TypeError(f'"at" must be steps by number or a string such as "10-12,100": {at!r}')
    if not isinstance(at, str):
        several = isinstance(at, Iterable)
        for number in at if isinstance(at, Iterable) else [at]:
            start = integer("at", number, several=several)
            yield start, start + (active or 1)
        return
    for part in at.split(","):
        low, dash, high = (text.strip() for text in part.partition("-"))
        where = repr(at) if part == at else f"{part!r} in {at!r}"
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f'"at" must be steps such as "10-12,100": {where}')
        if dash and int(high) < int(low):
            raise ValueError(f'"at" must have the lower step of a range first: {where}')
        if dash and active is not None:
            raise ValueError(f'"active" must be left out with ranges in "at", {at!r}: {active!r}')
        yield int(low), (int(high) + 1 if dash else int(low) + (active or 1))


def _reject_others(kind: str, **others: int) -> None:
    """Raise for the first of ``others`` that was given, as ``kind`` excludes it."""
    for name, value in others.items():
        if value:
            raise ValueError(f'"{name}" must be left out with "{kind}": {value!r}')


def span(start: int, stop: int) -> str:
    """Return the steps from ``start`` to before ``stop`` in the form that `schedule` reads: "7" or "2-4"."""
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"


_NONE, _WARMUP, _RECORD_AND_SAVE = 0, 1, 3  # the values of torch.profiler.ProfilerAction


class TorchSchedule:
    """Calls a function that maps a step's number to a `torch.profiler.ProfilerAction`, once a step, in order.

    Later steps are unknown, so a window has no end until the function returns RECORD_AND_SAVE.
    """

    count = None
    plans_ahead = False

    def __init__(self, decide: Callable[[int], Any], first_step: int = 0) -> None:
        self._action_of_step = decide
        self._first = first_step
        self._index = 0
        self._window: Window | None = None

    def starting(self, step: int) -> TorchSchedule:
        """Return the schedule of a loop that begins with ``step``, for which the function gets 0."""
        return TorchSchedule(self._action_of_step, step)

    def at(self, step: int) -> tuple[StepAction, Window | None]:
        """Return what the profiler does in ``step``, and the window that it belongs to."""
        action = int(getattr(decided := self._action_of_step(step - self._first), "value", decided))
        if action == _NONE:
            self._window = None
            return StepAction.WAIT, None
        window = self._window
        if window is None or window.stop <= step or (action == _WARMUP and window.active < step):
            self._index += 1
            window = Window(self._index, step, step, sys.maxsize)
        if action == _WARMUP:
            window = replace(window, active=step + 1)
        elif action == _RECORD_AND_SAVE:
            window = replace(window, stop=step + 1)
        self._window = window
        return (StepAction.WARMUP if action == _WARMUP else StepAction.ACTIVE), window

    def next_window(self, step: int) -> Window | None:
        """Return the window that may begin at the next step; an open one ends."""
        self._window = None
        return Window(self._index + 1, step + 1, step + 1, sys.maxsize)

    def window(self, index: int) -> Window | None:
        """Return None: no window is known before it begins."""
        return None
