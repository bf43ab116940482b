"""`PhaseBlock`: a block of a part of the program between training steps, such as an evaluation."""

from __future__ import annotations

import re
import threading
from typing import Any, Protocol

from ...base.guard import guard
from ..regions.annotation import annotate
from .window_recorder import FEATURE

_NAME = re.compile(r"[A-Za-z][\w.]*")


class PhaseProfile(Protocol):
    """The part of a `Profile` that a phase drives."""

    def start(self) -> None:
        """Begin, or go on."""

    def step(self) -> None:
        """Count a step."""

    def pause(self, *, begun: bool, cut: bool = ..., error: BaseException | None = ..., wait: bool = ...) -> None:
        """Close an open window until `start`."""

    def suspend_steps(self, thread: int) -> None:
        """Leave out calls of `step` on a thread."""

    def resume_steps(self, thread: int) -> None:
        """Count them again, if they were left out."""


def check_name(name: object) -> str:
    """Return ``name`` if it can be a part of the name of a folder.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "step":
        raise ValueError(f'"name" must be a word such as "eval", and not "step": {name!r}')
    return name


class PhaseBlock:
    """A context manager that counts its block as one step of ``profile``, within a region.

    Args:
        name: the name of the region.
        training: the profile of the training loop, whose steps do not count meanwhile.
        profile: the profile of these blocks.
    """

    def __init__(self, name: str, training: PhaseProfile, profile: PhaseProfile) -> None:
        self._training = training
        self._profile = profile
        self._region = annotate(name)
        self._thread: int | None = None  # whose steps are left out

    def __enter__(self) -> None:
        try:
            with guard.contained(FEATURE):
                self._thread = threading.get_ident()  # first, for an interrupt
                self._training.suspend_steps(self._thread)
                self._profile.start()
            self._region.__enter__()
        except BaseException:
            self._resume()
            raise

    @guard.contained(FEATURE)
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._region.__exit__(kind, error, traceback)
            if error is None:
                self._profile.step()
            self._profile.pause(begun=error is None, cut=error is not None, error=error, wait=False)
        finally:
            self._resume()

    def _resume(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._training.resume_steps(thread)
