"""`steps`: the loop that people already have, with its windows, in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ..guard import guard
from .loop import FEATURE, Profile, profile, unmade
from .schedule import Schedule
from .schedule import schedule as make_schedule

T = TypeVar("T")
PLAN = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait", "at", "every")
"""The arguments of a plan that a loop takes itself."""


class Steps(Generic[T]):
    """The items of ``iterable``, each a step of ``profile``. Iterated again, as in epochs, it counts on."""

    def __init__(self, iterable: Iterable[T], profile: Profile) -> None:
        self._iterable = iterable
        self._begun = False
        self.profile = profile
        profile.keep_last = False  # nobody can ask for it

    def __iter__(self) -> Iterator[T]:
        profile = self.profile
        step = profile.step
        with profile:
            # A step lasts until the next item is there: only then there is a next step.
            for item in self._iterable:
                if self._begun:
                    step()
                self._begun = True
                yield item
            profile.end(begun=not self._begun, complete=self._begun)

    def __bool__(self) -> bool:
        return True  # not by the length, which a generator has not

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _unrecorded(iterable: Iterable[T], *_: Any, **__: Any) -> Steps[T]:
    made = Steps.__new__(Steps)
    made._iterable, made._begun, made.profile = iterable, False, unmade()
    return made


@guard.prepared(FEATURE, otherwise=_unrecorded)
def steps(
    iterable: Iterable[T],
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    schedule: Schedule | str | Callable[[int], Any] | None = None,
    wait: int | None = None,
    warmup: int | None = None,
    active: int | None = None,
    repeat: int | None = None,
    skip_first: int | None = None,
    skip_first_wait: bool | int | None = None,
    at: str | int | Iterable[int] | None = None,
    every: int | None = None,
    **arguments: Any,
) -> Steps[T]:
    """Iterate over ``iterable``, one step an item, and record the steps that are asked for.

    Args:
        iterable: what the loop iterates over, a DataLoader as a rule.
        out: the folder that windows land in, as for `profile`.
        schedule: a plan as `profile` takes it, instead of the arguments that follow.
        wait: as for `instrument.schedule`; so are the arguments up to ``every``. With none of them: wait=1,
            warmup=1, active=3.
        warmup: see there.
        active: see there.
        repeat: see there; here cycles are recorded once unless this says otherwise (0: for ever).
        skip_first: see there.
        skip_first_wait: see there.
        at: see there.
        every: see there.
        arguments: those of `profile`.

    Raises:
        TypeError, ValueError: as `instrument.schedule` and `profile`.

    Example:
        >>> for batch in steps(loader, "runs/bert", wait=1, warmup=1, active=3):
        ...     train_step(batch)
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise TypeError(f'"iterable" must be something to iterate over: {iterable!r}')
    named = {
        "wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "skip_first": skip_first,
        "skip_first_wait": skip_first_wait, "at": at, "every": every,
    }  # fmt: skip
    return Steps(iterable, profile(out, schedule=planned(schedule, named), **arguments))


def planned(
    schedule: Schedule | str | Callable[[int], Any] | None, named: Mapping[str, Any]
) -> Schedule | str | Callable[[int], Any]:
    """Return ``schedule``, or the plan that the arguments ``named`` make; one window unless they say otherwise.

    Raises:
        TypeError, ValueError: as `instrument.schedule`; or both are given.
    """
    plan = {name: value for name, value in named.items() if value is not None}
    if schedule is not None:
        if plan:
            raise ValueError(f'"schedule" was given, so these cannot be: {", ".join(plan)}')
        return schedule
    plan = plan or {"wait": 1, "warmup": 1, "active": 3}
    if "at" not in plan and "every" not in plan:
        plan.setdefault("repeat", 1)
    return make_schedule(**plan)
