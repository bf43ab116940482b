"""Whose recording it is: torch records for one profiler at a time in a process, on whichever thread.

A profiler that begins ends the recording of the one before. To stop, discard or export what was ended so is a
segmentation fault in torch 2.13, so nothing may be touched any more that is not one's own.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import compat
from ..guard import guard

FEATURE = "following torch's profilers"


class Sessions:
    """Follows all torch profilers of the process."""

    def __init__(self) -> None:
        self._owner: weakref.ref[Any] | None = None
        self._watches = False

    @property
    def owner(self) -> Any:
        """The `torch.autograd.profiler.profile` that prepared or records last; None once it stopped or is gone."""
        return self._owner and self._owner()

    def watch(self) -> None:
        """Follow them from now on."""
        if not self._watches:
            self._watches = True
            compat.on_session(self._prepared, self._stopped)

    @guard.contained(FEATURE)
    def _prepared(self, profiler: Any) -> None:
        self._owner = weakref.ref(profiler)

    @guard.contained(FEATURE)
    def _stopped(self) -> None:
        if not compat.profiler_running():  # a KeyboardInterrupt may have come before it stopped
            self.left()

    def left(self) -> None:
        """Take note that the recording is over."""
        self._owner = None


sessions = Sessions()
