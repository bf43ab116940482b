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

from .. import gpu_wait
from ..findings import NOT_COVERED, Direction, Site
from ..syncs import sites
from ..syncs.budget import Budget
from ..syncs.listener import LiveRecorder
from ..syncs.operations import VALUE, name_of_operator, operation
from .tags import Tags

_LITERAL = re.compile(r"""["']cpu["']|\.cpu\(""")
_PROFILER = (
    profile.__exit__.__code__,
    torch.profiler.profile.stop_trace.__code__,
    gpu_wait._synchronize_all.__code__,  # at the end of a window
)


class SyncLog(Protocol):
    """Receives the synchronizations of the pretended GPU, and the calls that it cannot carry out."""

    def record_sync(self, op: str, cause: str = "") -> None:
        """Record a synchronization of the caller; an empty ``cause`` means the cause of ``operation``."""

    def record_not_covered(self, why: str) -> None:
        """Record a call that a dry run cannot carry out."""


class ThreadState:
    """The state of one thread.

    Attributes:
        call: the name of the running outermost torch function; empty outside torch functions.
        synchronized: whether that call already synchronized; it counts once.
        inputs: the arguments of the innermost torch function, which determine the device of its results.
        last_device: the device of the previous operator that takes tensors; None is the CPU.
        quiet_depth: greater than 0 while reads are of the CPU's memory.
        functions: the thread's function mode.
        foreign_depth: greater than 0 while the program's own FakeTensorMode handles tensors.
        depth: greater than 0 inside torch, where devices are the real ones.
    """

    __slots__ = (
        "call",
        "depth",
        "foreign_depth",
        "functions",
        "inputs",
        "last_device",
        "quiet_depth",
        "synchronized",
    )

    def __init__(self) -> None:
        self.call = ""
        self.synchronized = False
        self.inputs: Any = None
        self.last_device: torch.device | None = None
        self.quiet_depth = 0
        self.depth = 0
        self.functions: Any = None
        self.foreign_depth = 0


class RunState:
    """One dry run: its tags, its findings, and the state of each thread."""

    def __init__(self, recorder: LiveRecorder, fake: Any = None, budget: Budget | None = None) -> None:
        self.recorder = recorder
        self.budget = budget
        self.fake = fake  # the FakeTensorMode, or None
        self.tags = Tags()
        self._threads = threading.local()
        self.code_ran_before = False  # code that may have chosen a device ran before the run
        self.cpu_by_name: Site | None = None
        self.early_choice_reported = False  # a finding already says that this may be the cause of an error
        self._examined_lines: set[tuple[CodeType, int]] = set()

    @property
    def thread(self) -> ThreadState:
        """The state of the calling thread."""
        try:
            thread: ThreadState = self._threads.state
        except AttributeError:
            thread = self._threads.state = ThreadState()
        return thread

    @contextmanager
    def named_call(self, call: str) -> Iterator[None]:
        """Run the block as ``call``, a public function that is not one of torch's overridable functions."""
        thread = self.thread
        outer = thread.call
        if not outer:
            thread.call, thread.synchronized = call, False
        try:
            yield
        finally:
            thread.call = outer

    def record_sync(
        self, op: str, cause: str = "", direction: Direction | None = None, size: int | None = None
    ) -> None:
        """Record a synchronization of the calling thread, at most once for each call of a torch function.

        Args:
            op: the operation, or the ATen operator.
            cause: why it synchronizes; if empty, the cause in the table of operations.
            direction: the direction of its copy.
            size: the size of its copy in bytes.
        """
        thread = self.thread
        if thread.quiet_depth:
            return
        if not cause:
            row = operation(name_of_operator(op))
            cause = row.cause if row else VALUE
        if thread.call:
            if thread.synchronized:
                return
            thread.synchronized, op = True, thread.call
        frame = sys._getframe(1)
        if _is_profiler_stop(frame):
            return
        event = self.recorder.make_event(name_of_operator(op), cause, frame, direction=direction, bytes=size)
        self.recorder.add(event)
        if self.budget is not None and event.allowed is None:
            self.budget.count_sync(event)

    def note_cpu_selection(self) -> None:
        """Record the first user line that selects the CPU by a variable, which may hold an earlier choice."""
        if not self.code_ran_before or self.cpu_by_name is not None or self.thread.quiet_depth:
            return
        place = sites.locate(sys._getframe(1))
        if place.frame is None or place.site is None or place.via is not None:
            return
        key = place.frame.f_code, place.site.line
        if key not in self._examined_lines:
            self._examined_lines.add(key)
            if place.site.code and not _LITERAL.search(place.site.code):
                self.cpu_by_name = place.site

    def record_not_covered(self, why: str, *, fails: bool = False) -> None:
        """Record a call that a dry run cannot carry out; with ``fails``, it fails on a GPU as well."""
        event = self.recorder.make_event(NOT_COVERED, why, sys._getframe(1))
        event.forbidden = fails
        self.recorder.add(event)


def _is_profiler_stop(frame: FrameType | None) -> bool:
    """Return whether this is a profiler's own synchronization as it stops."""
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code in _PROFILER:
            return True
        frame = frame.f_back
    return False


def as_cuda(device: Any) -> torch.device | None:
    """Return ``device`` with an index if it is a GPU, or None if it is not."""
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
