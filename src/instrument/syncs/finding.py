"""One finding for every way to find synchronisations: live on a GPU, in a dry run without one, in a trace."""

from __future__ import annotations

import hashlib
import linecache
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .roots import portable
from .stopped import Stopped

Direction = Literal["H2D", "D2H"]
Severity = Literal["high", "medium", "low"]
Source = Literal["live", "dry run", "trace"]


@dataclass(frozen=True)
class Site:
    """A line of Python.

    Attributes:
        file: its absolute path, or what Python calls it ("<stdin>").
        line: its number, from 1; 0 where only the function is known.
        function: the qualified name of the function, as far as Python knows it.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.shown}:{self.line}" if self.line else self.shown

    @property
    def shown(self) -> str:
        """The file as seen from the current folder, if it lies below."""
        try:
            inside = os.path.relpath(self.file)
        except (OSError, ValueError):  # the folder is gone, or on another drive
            return self.file
        return self.file if inside.startswith("..") or not self.file.startswith(os.sep) else inside

    @property
    def code(self) -> str:
        """The line itself, without its indentation; empty where it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


@dataclass
class Event:
    """One wait, as a source saw it.

    Attributes:
        op: the outermost public call: the name of a function or method without its module ("item", "to",
            "synchronize", "unique"), or of what the line does ("bool", "getitem", "setitem", "format",
            "print"); "not covered" for what a dry run could not carry out.
        cause: why it waits, in a few words.
        site: the user's line; None where no Python frame is known.
        via: the line of a library that did it; None where that is the user's own.
        direction: of a copy.
        bytes: of a copy; None where it is not one, or not known.
        blocked_ns: how long the CPU waited; None where that is not known.
        idle_ns: for how long it left the GPU without work; None where that is not known.
        region: the names of the regions around it, outermost first.
        step: the number of the step; None outside of steps.
        thread: the name of the thread.
        backward: the autograd node that ran.
        allowed: why it is allowed; None where it is not.
        forbidden: it is inside `no_syncs`, or, where it is not covered, would not run on a GPU.
    """

    op: str
    cause: str
    site: Site | None = None
    via: Site | None = None
    direction: Direction | None = None
    bytes: int | None = None
    blocked_ns: int | None = None
    idle_ns: int | None = None
    region: tuple[str, ...] = ()
    step: int | None = None
    thread: str = ""
    backward: str | None = None
    allowed: str | None = None
    forbidden: bool = False


NOT_COVERED = "not covered"
CHOSEN = "the device was chosen before the dry run began"
_LONGEST = 500  # characters of an error's message


@dataclass
class Finding:
    """All waits of one operation at one line.

    What is not described here is the attribute of `Event` of that name, of the first wait seen.

    Attributes:
        count: how many waits.
        steps: how many waits in each step, by its number; None for those outside of steps.
        bytes: of all copies.
        blocked_ns: of all that were timed; None where none was.
        timed: how many waits were timed.
        idle_ns: of all for which it is known; None where there are none.
        regions: how many waits in each region.
        vias: how many waits at each line of a library; `via` is the one with most.
    """

    op: str
    cause: str
    site: Site | None
    via: Site | None
    direction: Direction | None
    thread: str
    backward: str | None
    allowed: str | None
    forbidden: bool = False
    count: int = 0
    bytes: int | None = None
    blocked_ns: int | None = None
    timed: int = 0
    idle_ns: int | None = None
    regions: Counter[tuple[str, ...]] = field(default_factory=Counter)
    steps: Counter[int | None] = field(default_factory=Counter)
    vias: Counter[Site] = field(default_factory=Counter)

    @classmethod
    def of(cls, event: Event) -> Finding:
        """Return the finding of ``event`` alone."""
        found = cls(
            event.op, event.cause, event.site, event.via, event.direction, event.thread, event.backward,
            event.allowed,
        )  # fmt: skip
        found.add(event)
        return found

    def add(self, event: Event) -> None:
        """Count one more wait."""
        self.count += 1
        self.forbidden = self.forbidden or event.forbidden
        self.regions[event.region] += 1
        self.steps[event.step] += 1
        if event.via is not None:
            self.vias[event.via] += 1
            self.via = self.vias.most_common(1)[0][0]
        self.bytes = _sum(self.bytes, event.bytes)
        self.idle_ns = _sum(self.idle_ns, event.idle_ns)
        if event.blocked_ns is not None:
            self.blocked_ns = _sum(self.blocked_ns, event.blocked_ns)
            self.timed += 1

    @property
    def covered(self) -> bool:
        """Whether this is a wait, and not something that could not be looked at."""
        return self.op != NOT_COVERED

    @property
    def region(self) -> tuple[str, ...]:
        """The regions around most of the waits, outermost first."""
        return self.regions.most_common(1)[0][0] if self.regions else ()

    @property
    def step(self) -> int | None:
        """The first step with a wait; None where all were outside of steps."""
        return min((step for step in self.steps if step is not None), default=None)

    @property
    def fingerprint(self) -> str:
        """What stays the same when lines are added above, in another folder and on another machine.

        File, function, operation and the line's text; equal lines of one function have the same.
        """
        site = self.site or self.via
        if site:  # Python 3.10 knows functions by their last name only
            parts = (portable(site.file), site.function.rpartition(".")[2], site.code)
        else:
            parts = (self.thread, self.backward or "", "")
        return hashlib.sha256("\0".join((*parts, self.op)).encode()).hexdigest()[:16]


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else one + other


def error_text(error: BaseException) -> str:
    """Return the class and the message of ``error`` in one line; of a `Stopped`, what ended the run."""
    if isinstance(error, Stopped):
        return error.why
    try:
        message = " ".join(str(error).split())
    except Exception:  # of the program's own class
        message = "(no message)"
    cut = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
    return f"{type(error).__name__}: {cut}".strip(": ")
