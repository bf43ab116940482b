"""`ProgramSteps`: steps that the program itself marks, with `instrument.steps` or ``prof.step()``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..guard import guard


class ProgramSteps:
    """Notifies listeners of the end of each step that the program marks.

    Attributes:
        listeners: called at the end of each step. Without any, a profile calls `end_step` only at steps in its
            schedule, so the other steps cost nothing.
        profile_started: whether the program started a profile of its own.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.profile_started = False
        self._profiles: weakref.WeakSet[Any] = weakref.WeakSet()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at the end of each step, until `remove`."""
        self.listeners.append(listener)
        for profile in list(self._profiles):
            profile.report_steps()

    def remove(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``, which may have been removed already."""
        self.listeners = [other for other in self.listeners if other != listener]

    def follow(self, profile: Any) -> None:
        """Add ``profile`` as a source of steps; `listen` calls its ``report_steps()``."""
        self.profile_started = True
        self._profiles.add(profile)

    def end_step(self) -> None:
        """Notify the listeners that a step of the program ended.

        Raises:
            SyncError: from a detector at level "error".
        """
        for listener in self.listeners:
            with guard.contained("following the steps of the program"):  # a SyncError passes
                listener()


program_steps = ProgramSteps()
