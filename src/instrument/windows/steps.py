"""`steps`: the loop that people already have, with its windows, in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from .loop import Profile, profile
from .schedule import schedule as make_schedule

T = TypeVar("T")

_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait", "at", "every")


class Steps(Generic[T]):
    """The items of ``iterable``, each a step of ``profile``. Iterated again, as in epochs, it counts on."""

    def __init__(self, iterable: Iterable[T], profile: Profile) -> None:
        self._iterable = iterable
        self.profile = profile

    def __iter__(self) -> Iterator[T]:
        profile = self.profile
        step = profile.step
        with profile:
            for item in self._iterable:
                yield item
                step()

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def steps(iterable: Iterable[T], out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> Steps[T]:
    """Iterate over ``iterable``, one step an item, and record the steps that are asked for.

    Args:
        iterable: what the loop iterates over, a DataLoader as a rule.
        out: the folder that windows land in, as for `profile`.
        arguments: those of `schedule` (``wait``, ``warmup``, ``active``, ``repeat``, ``skip_first``, ``at``,
            ``every``) or one ready-made ``schedule``, and those of `profile`. With no schedule at all:
            wait=1, warmup=1, active=3, repeat=1.

    Raises:
        TypeError, ValueError: as `schedule` and `profile`.

    Example:
        >>> for batch in steps(loader, "runs/bert", wait=1, warmup=1, active=3):
        ...     train_step(batch)
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise TypeError(f'"iterable" must be something to iterate over: {iterable!r}')
    plan = {name: arguments.pop(name) for name in _SCHEDULE if name in arguments}
    if "schedule" in arguments:
        if plan:
            raise ValueError(f'"schedule" was given, so these cannot be: {", ".join(plan)}')
    else:
        arguments["schedule"] = make_schedule(**plan or {"wait": 1, "warmup": 1, "active": 3, "repeat": 1})
    return Steps(iterable, profile(out, **arguments))
