"""`SyncEvent`: one synchronization, as live detection, a dry run or the audit of a trace saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..findings import Direction, Site

Source = Literal["live", "dry run", "trace"]
CHOSEN = "the device was chosen before the dry run began"


@dataclass
class SyncEvent:
    """One synchronization: a call that makes the CPU wait for the GPU.

    Attributes:
        op: the outermost public call: the name of a function or method without its module ("item", "to",
            "synchronize", "unique"), or what the line does ("bool", "getitem", "setitem", "format", "print");
            `NOT_COVERED` for what a dry run could not run.
        cause: why it synchronizes, in a few words.
        site: the user's line; None if no Python frame is known.
        via: the line of the library that made the call; None if the user's line did.
        direction: direction of the copy; None if it is not a copy.
        bytes: bytes of the copy; None if it is not a copy, or unknown.
        blocked_ns: how long the CPU was blocked; None if unknown.
        idle_ns: how long the GPU was left idle; None if unknown.
        region: the names of the regions around the call, outermost first.
        step: the number of the step; None outside steps.
        thread: the name of the thread.
        backward: the autograd node that ran.
        allowed: the reason why it is allowed; None if it is not.
        forbidden: it happened inside `no_syncs`, or code that is not covered would fail on a GPU.
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
