"""The state that the parts of one dry run share."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch.autograd.profiler import profile

from .. import gpu
from ..findings import NOT_COVERED, Direction, Site
from ..syncs import sites
from ..syncs.budget import Budget
from ..syncs.operations import name_of_operator
from ..syncs.recorder import Recorder
from .tags import Tags

_LITERAL = re.compile(r"""["']cpu["']|\.cpu\(""")
_PROFILER = (
    profile.__exit__.__code__,
    torch.profiler.profile.stop_trace.__code__,
    gpu.synchronize.__code__,  # at the end of a window
)


class Observer(Protocol):
    """Notes what the pretended GPU does at the user's line that runs now on this thread."""

    def note_sync(self, op: str, cause: str) -> None:
        """Note that the caller synchronizes; ``op`` and ``cause`` are as in `SyncEvent`."""

    def note_uncovered(self, reason: str) -> None:
        """Note something that a dry run cannot carry out."""


class ThreadState:
    """What one thread is doing.

    Attributes:
        call: the name of the outermost torch function that runs; empty outside of any.
        synchronized: whether that call has synchronized: all synchronizations of one call are one event.
        inputs: the arguments of the innermost torch function; tensors that it creates are placed where they are.
        last: the device of the previous operator that takes tensors; None is the CPU.
        quiet: greater than 0 while reads of values synchronize nothing, as they are on the CPU.
        functions: the function mode of the thread.
        foreign: greater than 0 while a FakeTensorMode of the program inspects tensors.
        depth: greater than 0 inside torch, where devices are the real ones.
    """

    __slots__ = ("call", "depth", "foreign", "functions", "inputs", "last", "quiet", "synchronized")

    def __init__(self) -> None:
        self.call = ""
        self.synchronized = False
        self.inputs: Any = None
        self.last: torch.device | None = None
        self.quiet = 0
        self.depth = 0
        self.functions: Any = None
        self.foreign = 0


class State:
    """The tags and findings of one dry run, and the state of each of its threads."""

    def __init__(self, recorder: Recorder, fake: Any = None, budget: Budget | None = None) -> None:
        self.recorder = recorder
        self.budget = budget
        self.fake = fake  # the FakeTensorMode, or None
        self.tags = Tags()
        self._local = threading.local()
        self.code_before = False  # code that may have chosen a device ran before the dry run
        self.cpu_by_name: Site | None = None
        self.early = False  # whether an early choice of the device was reported as the cause of an error
        self._asked: set[tuple[CodeType, int]] = set()

    @property
    def thread(self) -> ThreadState:
        """The state of the calling thread."""
        try:
            thread: ThreadState = self._local.thread
        except AttributeError:
            thread = self._local.thread = ThreadState()
        return thread

    @contextmanager
    def named(self, call: str) -> Iterator[None]:
        """Run the body as ``call``, a public function that is not one of torch's overridable functions."""
        thread = self.thread
        outer = thread.call
        if not outer:
            thread.call, thread.synchronized = call, False
        try:
            yield
        finally:
            thread.call = outer

    def note_sync(self, op: str, cause: str, direction: Direction | None = None, size: int | None = None) -> None:
        """Note that the calling thread synchronizes, once in each call of a torch function."""
        thread = self.thread
        if thread.quiet:
            return
        if thread.call:
            if thread.synchronized:
                return
            thread.synchronized, op = True, thread.call
        frame = sys._getframe(1)
        if _flushes(frame):
            return
        event = self.recorder.note(name_of_operator(op), cause, frame, direction=direction, bytes=size)
        self.recorder.add(event)
        if self.budget is not None and event.allowed is None:
            self.budget.spend(event)

    def note_cpu_choice(self) -> None:
        """Note the user's first line that uses the CPU by a variable, which may hold an earlier choice."""
        if not self.code_before or self.cpu_by_name is not None or self.thread.quiet:
            return
        place = sites.locate(sys._getframe(1))
        if place.frame is None or place.site is None or place.via is not None:
            return
        key = place.frame.f_code, place.site.line
        if key not in self._asked:
            self._asked.add(key)
            if place.site.code and not _LITERAL.search(place.site.code):
                self.cpu_by_name = place.site

    def note_uncovered(self, reason: str, *, fails: bool = False) -> None:
        """Note something that a dry run cannot carry out; with ``fails``, it fails on a GPU too."""
        event = self.recorder.note(NOT_COVERED, reason, sys._getframe(1))
        event.forbidden = fails
        self.recorder.add(event)


def _flushes(frame: FrameType | None) -> bool:
    """Return whether a profiler that stops synchronizes, which is not a synchronization of the program."""
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code in _PROFILER:
            return True
        frame = frame.f_back
    return False


def as_cuda(device: Any) -> torch.device | None:
    """Return the GPU, with an index, that ``device`` means as users write it; None if it is not a GPU."""
    if device is None or isinstance(device, bool):
        return None
    if isinstance(device, int):
        return torch.device("cuda", device)
    if isinstance(device, str):
        if not device.startswith("cuda"):
            return None
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def size_of(tensor: torch.Tensor) -> int:
    """Return the size of the elements of ``tensor``, in bytes."""
    size: int = tensor.numel() * tensor.element_size()
    return size
