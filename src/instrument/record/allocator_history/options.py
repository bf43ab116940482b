"""`memory_history` and `MemoryHistory`: how much of the GPU allocator's history a window records."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...base.guard import guard
from ...base.units import integer, parse_duration, parse_size

STACKS = ("python", "all")


@dataclass(frozen=True)
class MemoryHistory:
    """How much of the allocator's history a window records, as `memory_history` returns it."""

    stacks: str = "python"
    entries: int = 100_000
    size: str = "500MB"
    every: str | None = None

    def __post_init__(self) -> None:
        if self.stacks not in STACKS:
            raise ValueError(f'"stacks" must be "python" or "all": {self.stacks!r}')
        object.__setattr__(self, "entries", integer("entries", self.entries, 1))
        if self.entries > sys.maxsize:  # what torch takes
            raise ValueError(f'"entries" must be an integer from 1 to {sys.maxsize}: {self.entries}')
        _ = self.size_bytes, self.every_s  # check them

    @cached_property
    def size_bytes(self) -> int:
        """The largest size of a file in bytes."""
        return parse_size(self.size, "size")

    @cached_property
    def every_s(self) -> float | None:
        """The least time between two snapshots in s; None if it follows from their cost."""
        return None if self.every is None else parse_duration(self.every, "every")


@guard.prepared("recording GPU memory", otherwise=lambda **_: None)
def memory_history(
    *, stacks: str = "python", entries: int = 100_000, size: str = "500MB", every: str | None = None
) -> MemoryHistory:
    """Return what a window records of the GPU's memory, for ``profile(memory=...)``.

    Args:
        stacks: "python" for the stacks of Python, or "all" for those of C++ too. Their description takes a hundred
            times as long, and blocks the loop: 461 s instead of 4 in a training job.
        entries: how many events of each GPU are kept, the newest ones. An allocation and its free are three.
        size: the largest size of a snapshot, as `instrument.keep` takes sizes; the oldest events are left out of
            a larger one.
        every: the least time between two snapshots of a run, such as "10m"; "1s" for one in each window. None is
            100 times what the last one blocked the loop for, so that they take at most 1 % of the time.

    Raises:
        TypeError, ValueError: a value is not accepted.

    Example:
        >>> profile("runs/bert", schedule="100-102,200-202", memory=memory_history(entries=20_000, every="1s"))
    """
    return MemoryHistory(stacks, entries, size, every)


def chosen_history(given: Any) -> MemoryHistory | None:
    """Return what ``memory=`` of a profile stands for.

    Raises:
        ValueError, TypeError: it is not accepted.
    """
    if given is None or isinstance(given, MemoryHistory):
        return given
    if given == "snapshot":
        return MemoryHistory()
    kind = ValueError if isinstance(given, str) else TypeError
    raise kind(f'"memory" must be "snapshot", instrument.memory_history(...) or None: {given!r}')
