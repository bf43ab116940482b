"""`Win`: a time that a fix can win, with the change of the steps that shows it in a replay."""

from __future__ import annotations

from collections.abc import Callable

from ..replay.changes import Change


class Win(int):
    """The most time per step in ns that removing a cause can win.

    Attributes:
        change: returns the removal, for a replay.
    """

    change: Callable[[], Change]

    def __new__(cls, ns: int, change: Callable[[], Change]) -> Win:
        """Return a saving of ``ns``."""
        win = super().__new__(cls, ns)
        win.change = change
        return win

    def at_most(self, ns: int) -> Win:
        """Return a win of the same change that is no larger than this."""
        return Win(min(self, ns), self.change)


def both(one: Win, other: Win) -> Win:
    """Return the win of both changes at once."""
    return Win(one + other, lambda: one.change() | other.change())
