"""The steps that the program itself marks, with `instrument.steps` or ``prof.step()``, for whoever counts them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import SyncError
from ..guard import guard


class ProgramSteps:
    """Passes the end of each step that the program marks on to listeners.

    Attributes:
        listeners: called at the end of each step. While there are none, a profile calls `ended` only at the steps
            that its plan names, so that the others cost nothing.
        followed: whether the program started a profile of its own.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.followed = False
        self._profiles: weakref.WeakSet[Any] = weakref.WeakSet()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at the end of each step from now on, until `remove`."""
        self.listeners.append(listener)
        for profile in list(self._profiles):
            profile.report_steps()

    def remove(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``; it may have been removed already."""
        self.listeners = [other for other in self.listeners if other != listener]

    def follow(self, profile: Any) -> None:
        """Take ``profile`` as a source of steps: its ``report_steps()`` is called when a listener comes."""
        self.followed = True
        self._profiles.add(profile)

    def ended(self) -> None:
        """Pass on that a step of the program ended.

        Raises:
            SyncError: from a detector of level "error".
        """
        for listener in self.listeners:
            try:
                listener()
            except SyncError:
                raise
            except Exception as error:
                try:
                    guard.failed("following the steps of the program", error)
                except Exception as raised:
                    if raised is error:
                        raise


program_steps = ProgramSteps()
