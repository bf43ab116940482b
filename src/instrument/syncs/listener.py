"""One who is told of waits as they happen, and may complain of them."""

from __future__ import annotations

import warnings
from collections import deque
from typing import NamedTuple

from ..errors import SyncError
from .finding import Event, Site
from .recorder import Recorder


class _Complaint(NamedTuple):
    thread: int
    text: str
    site: Site | None
    error: bool


class Listener:
    """Gathers waits; what is wrong with one is known in places where nothing can be raised, and said in others.

    Attributes:
        recorder: the findings.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._due: deque[_Complaint] = deque()

    def judge(self, event: Event, thread: int) -> None:
        """Take note of what is wrong with ``event`` on ``thread``."""
        raise NotImplementedError

    def complain(self, text: str, event: Event, thread: int, *, error: bool) -> None:
        """Have `speak` warn of ``event``, or raise."""
        self._due.append(_Complaint(thread, text, event.site, error))

    def speak(self, thread: int | None = None) -> None:
        """Warn of what is due on ``thread``, or on any, and raise the first error.

        Raises:
            SyncError: for a wait that must not be.
        """
        errors = []
        for _ in range(len(self._due)):
            due = self._due.popleft()
            if thread is not None and due.thread != thread:
                self._due.append(due)
            elif due.error:
                errors.append(due)
            else:
                file, line = (due.site.file, due.site.line) if due.site else ("<unknown>", 1)
                warnings.warn_explicit(due.text, UserWarning, file, line)
        if errors:
            raise SyncError(errors[0].text)

    def forgive(self) -> None:
        """Drop what is due."""
        self._due.clear()


def described(event: Event) -> str:
    """Say in a sentence where ``event`` waits."""
    where = event.site or event.via or f"thread {event.thread}"
    code = f" `{event.site.code}`" if event.site is not None and event.site.code else ""
    backward = f", in the backward of {event.backward}" if event.backward else ""
    return f"{where}:{code} makes the CPU wait for the GPU ({event.op}: {event.cause}{backward})"
