"""Whether a step of a loop is recorded: a pure function of its number, so a resumed run loses nothing."""

from __future__ import annotations

import enum
import operator
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction

NEVER = sys.maxsize  # a step that no loop reaches


class Phase(enum.Enum):
    """What the profiler does during one step."""

    WAIT = "wait"
    """Nothing is on."""
    WARMUP = "warmup"
    """The profiler is on, and what it sees is discarded."""
    ACTIVE = "active"
    """The step is recorded."""


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of recorded steps with its warm-up; steps are numbered from 0.

    Attributes:
        index: Its number in the schedule, from 1.
        warmup: The first warm-up step; equal to ``active`` where there is no warm-up.
        active: The first recorded step.
        stop: The first step after it.
    """

    index: int
    warmup: int
    active: int
    stop: int

    def __str__(self) -> str:
        return span(self.active, self.stop)


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(ABC):
    """The windows of a run, in order and never overlapping. Made by `schedule`; immutable and hashable.

    Called with a step's number it returns what torch's own schedules do.

    Attributes:
        count: How many windows there are; None where they go on for ever.
        foreseen: Whether `next_window` knows the next window before it begins.
    """

    foreseen: ClassVar[bool] = True

    count: int | None

    @property
    def finite(self) -> bool:
        """Whether there is a last window."""
        return self.count is not None

    def window(self, index: int) -> Window | None:
        """The window of that number, counted from 1; None beyond the last.

        Raises:
            ValueError: If ``index`` is below 1.
        """
        if index < 1:
            raise ValueError(f"index must be an integer >= 1, got {index!r}")
        return self._window(index) if self.count is None or index <= self.count else None

    def next_window(self, step: int) -> Window | None:
        """The window that ``step`` is in or, outside of one, the next to come; None after the last.

        Raises:
            ValueError: If ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step must be an integer >= 0, got {step!r}")
        return self.window(self._index(step))

    def at(self, step: int) -> tuple[Phase, Window | None]:
        """The phase that ``step`` is in, and the window it belongs to (None in `Phase.WAIT`).

        Raises:
            ValueError: If ``step`` is negative.
        """
        window = self.next_window(step)
        if window is None or step < window.warmup:
            return Phase.WAIT, None
        return (Phase.WARMUP if step < window.active else Phase.ACTIVE), window

    def __call__(self, step: int) -> ProfilerAction:
        """The `torch.profiler.ProfilerAction` of ``step``, for ``torch.profiler.profile(schedule=...)``.

        Raises:
            ValueError: If ``step`` is negative.
        """
        from torch.profiler import ProfilerAction

        phase, window = self.at(step)
        if phase is Phase.ACTIVE:
            last = window is not None and step == window.stop - 1
            return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if phase is Phase.WARMUP else ProfilerAction.NONE

    def starting(self, step: int) -> Schedule:
        """The schedule of a loop whose first step is ``step``: cycles count from there, named steps do not."""
        return self

    def windows(self) -> Iterator[Window]:
        """Every window in order; endless unless `finite`."""
        for index in count(1):
            window = self.window(index)
            if window is None:
                return
            yield window

    def __repr__(self) -> str:
        # The steps as `schedule` would read them back: Schedule('2-4,7-9', warmup=1)
        head = list(islice(self.windows(), 4))
        shown = [str(window) for window in head]
        if self.count is None or self.count > 4:
            shown[3:] = ["..."] if self.count is None else ["...", str(self.window(self.count))]
        warmup = max(window.active - window.warmup for window in head)
        return f"Schedule({','.join(shown)!r}, {warmup=})"

    @abstractmethod
    def _window(self, index: int) -> Window:
        """The window of that number, which exists."""

    @abstractmethod
    def _index(self, step: int) -> int:
        """The number of the first window that stops after ``step``."""


@dataclass(frozen=True, slots=True, repr=False)
class _Periodic(Schedule):
    """Equal windows at equal distances: the recorded part starts at ``first``, ``first + period``, ..."""

    first: int
    period: int
    warmup: int
    active: int
    relative: bool

    def starting(self, step: int) -> Schedule:
        return replace(self, first=self.first + step) if self.relative else self

    def _window(self, index: int) -> Window:
        start = self.first + (index - 1) * self.period
        return Window(index, start - self.warmup, start, start + self.active)

    def _index(self, step: int) -> int:
        return max((step - self.first - self.active) // self.period + 2, 1)


@dataclass(frozen=True, slots=True, repr=False)
class _Explicit(Schedule):
    """Windows listed one by one."""

    listed: tuple[Window, ...]

    def _window(self, index: int) -> Window:
        return self.listed[index - 1]

    def _index(self, step: int) -> int:
        return bisect_right(self.listed, step, key=lambda window: window.stop) + 1


def schedule(
    steps: str | int | Iterable[int] | None = None,
    *,
    wait: int = 0,
    warmup: int = 0,
    active: int | None = None,
    repeat: int = 0,
    skip_first: int = 0,
    skip_first_wait: bool | int = 0,
    at: str | int | Iterable[int] | None = None,
    every: int | None = None,
) -> Schedule:
    """Plan which steps are recorded, in one of three ways. Steps are numbered from 0.

    Cycles, as `torch.profiler.schedule` has them: ``schedule(wait=1, warmup=1, active=3, repeat=2)``.

    Named steps: ``schedule("10-12,100")``, ``schedule(at=[100, 1100], active=2)``. A number starts a window
    of ``active`` steps; a range, which only a string can hold, includes both ends and is one window.

    A period: ``schedule(every=1000, warmup=1, active=3)`` records 1000-1002, 2000-2002, ...

    Args:
        steps: The same as ``at``, for short.
        wait: Steps with nothing on, at the start of each cycle. Cycles only.
        warmup: Steps before each window with the profiler on, discarded; before named steps, as many as fit
            after step 0 and the window before. 0 by default: no step is touched that was not asked for; 1
            keeps the cost of the profiler's own start out of the first recorded step.
        active: Recorded steps of each window. Cycles need it, elsewhere 1 is the default. Not with ranges.
        repeat: How many windows at most; 0 goes on for ever. Not with named steps.
        skip_first: The steps before the first cycle or, with a period, the lowest step that recording may
            start at. Not with named steps.
        skip_first_wait: Whether the first cycle goes without its ``wait``; a number other than 0 is true.
            Cycles only.
        at: The steps by number, in any order: one, several, or a string such as ``"10-12,100"``.
        every: Steps from the start of one recorded part to the next, at least ``warmup + active``.

    Raises:
        TypeError: If a number is not an integer; True and False are not numbers here.
        ValueError: If an argument is out of range or does not go with the others, or if windows overlap.
    """
    name, named = ("steps", steps) if at is None else ("at", at)
    if steps is not None and at is not None:
        raise ValueError(f"steps and at mean the same, give one of them: got {steps=} and {at=}")
    if named is not None and every is not None:
        raise ValueError(f"{name} and every are two plans, give one of them: got {name}={named!r} and {every=}")
    wait, warmup, repeat = _integer("wait", wait), _integer("warmup", warmup), _integer("repeat", repeat)
    skip_first = _integer("skip_first", skip_first)
    if not isinstance(skip_first_wait, bool):
        _integer("skip_first_wait", skip_first_wait)
    if active is not None:
        active = _integer("active", active, least=1)

    if named is not None:
        _refuse(name, wait=wait, repeat=repeat, skip_first=skip_first, skip_first_wait=skip_first_wait)
        return _explicit(name, named, warmup, active)
    if every is not None:
        _refuse("every", wait=wait, skip_first_wait=skip_first_wait)
        return _every(every, warmup, active or 1, repeat, skip_first)
    if active is None:
        raise ValueError(
            "active must be an integer >= 1, got None: give the steps to record in each cycle, "
            "or name steps with at, or a period with every"
        )
    first = skip_first + (0 if skip_first_wait else wait) + warmup
    return _Periodic(repeat or None, first, wait + warmup + active, warmup, active, relative=True)


def _every(every: int, warmup: int, active: int, repeat: int, skip_first: int) -> Schedule:
    period = _integer("every", every, least=warmup + active, because=f" ({warmup=} + {active=})")
    first = max(-(-skip_first // period), 1) * period
    return _Periodic(repeat or None, first, period, warmup, active, relative=False)


def _explicit(name: str, steps: str | int | Iterable[int], warmup: int, active: int | None) -> Schedule:
    spans = sorted(_parse(name, steps, active))
    if not spans:
        raise ValueError(f"{name} must name at least one step, got {steps!r}")
    for before, after in pairwise(spans):
        if before == after:
            raise ValueError(f"{name} must name each window once, got {span(*after)} twice in {steps!r}")
        if before[1] > after[0]:
            raise ValueError(
                f"{name} must name windows that do not overlap, got {span(*before)} and {span(*after)} "
                f"from {steps!r}{f' with {active=}' if active else ''}"
            )
    stops = [0, *(stop for _, stop in spans)]
    windows = (
        Window(index, max(start - warmup, floor), start, stop)
        for index, ((start, stop), floor) in enumerate(zip(spans, stops, strict=False), start=1)
    )
    return _Explicit(len(spans), tuple(windows))


def _parse(name: str, steps: str | int | Iterable[int], active: int | None) -> Iterator[tuple[int, int]]:
    """The recorded part of each window, as (first step, first step after)."""
    if isinstance(steps, (bytes, bytearray, Mapping)):
        raise TypeError(f"{name} must be steps by number or a string such as '10-12,100', got {steps!r}")
    if not isinstance(steps, str):
        label, numbers = (f"each step of {name}", steps) if isinstance(steps, Iterable) else (name, [steps])
        for start in (_integer(label, number) for number in numbers):
            yield start, start + (active or 1)
        return
    for part in steps.split(","):
        low, dash, high = (text.strip() for text in part.partition("-"))
        where = repr(steps) if part == steps else f"{part!r} in {steps!r}"
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f'{name} must be steps such as "10-12,100": {where}')
        if dash and int(high) < int(low):
            raise ValueError(f"{name} must have the lower step of a range first: {where}")
        if dash and active is not None:
            raise ValueError(
                f"active does not go with a range, which has its own length: got {active=}, {name}={steps!r}"
            )
        yield int(low), (int(high) + 1 if dash else int(low) + (active or 1))


def _integer(name: str, value: object, least: int = 0, because: str = "") -> int:
    """The value as an int, or an error that names it."""
    wrong = f"{name} must be an integer >= {least}{because}, got {value!r}"
    if isinstance(value, bool):
        raise TypeError(wrong)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(wrong) from None
    if number < least:
        raise ValueError(wrong)
    return number


def _refuse(kind: str, **others: int) -> None:
    for name, value in others.items():
        if value:
            raise ValueError(f"{name} must be left out where {kind} is given, got {name}={value!r}")


def span(start: int, stop: int) -> str:
    """The steps from ``start`` to before ``stop``, as people write them."""
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
