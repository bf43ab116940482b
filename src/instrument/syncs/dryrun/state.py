"""The state of a dry run: tags on the tensors that pretend to be on the GPU, what it recorded, and its threads.

The tag is an attribute of the storage, so that views, detached tensors and `.data` share it. A look-up takes
80 ns.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...base.compat.distributed import Group
from ...base.findings import NOT_COVERED, Direction, Site
from ...base.guard import guard
from ...explain.waits import sites
from ...explain.waits.operations import VALUE, name_of_operator, operation
from ...record import gpu_wait
from ..budget import Budget
from ..counting.allocator import CachingAllocator
from ..counting.calls import Memory, TensorInfo
from ..counting.memory import MemoryRecorder
from ..counting.memory_use import LiveMemory
from ..counting.places import ThreadPlaces
from ..counting.recorder import FEATURE, CallRecorder, stride_of
from ..counting.streams import StreamNote
from ..listener import LiveRecorder

PINNED = "pinned"
_TENSOR = torch.Tensor
_storage = torch.Tensor.untyped_storage


_RUN_NUMBERS = count()
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Tags:
    """The tags of one run; tags of an earlier run are ignored.

    Args:
        note_memory: is told of each storage whether it is on the GPU.

    Attributes:
        any_on_device: whether any tensor was on a pretended device.
    """

    def __init__(self, note_memory: Callable[[Any, bool], None]) -> None:
        self._key = f"_instrument_{next(_RUN_NUMBERS)}"
        self.any_on_device = False
        self._note_memory = note_memory

    def get(self, tensor: Any) -> Any:
        """Return the device that ``tensor`` pretends to be on, `PINNED`, or None for plain memory."""
        try:
            return getattr(_storage(_tensor_with_memory(tensor)), self._key, None)
        except (NotImplementedError, RuntimeError):
            return getattr(_tag_holder(tensor), self._key, None)

    def device(self, tensor: Any) -> Any:
        """Return the device that ``tensor`` pretends to be on, or None."""
        tag = self.get(tensor)
        return None if tag is PINNED else tag

    def is_on_host(self, tensor: Any) -> bool:
        """Return whether ``tensor`` is in plain or pinned memory."""
        return self.device(tensor) is None and in_memory(tensor)

    def put(self, value: Any, tag: Any) -> None:
        """Tag every tensor in ``value`` that has memory, also in lists, tuples and dictionaries.

        None removes tags.
        """
        for tensor in tensors(value):
            if tag is not None and not in_memory(tensor):
                continue
            self.any_on_device = self.any_on_device or tag not in (None, PINNED)
            if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
                self.put([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]], tag)
                continue
            try:
                storage = _storage(tensor)
                setattr(storage, self._key, tag)
                self._note_memory(storage, tag is not None and tag is not PINNED)
            except (NotImplementedError, RuntimeError):
                setattr(_tag_holder(tensor), self._key, tag)

    def storage_tag(self, storage: Any) -> Any:
        """Return the device that a storage pretends to be on, `PINNED`, or None for plain memory."""
        return getattr(getattr(storage, "_untyped_storage", storage), self._key, None)

    def storage_device(self, storage: Any) -> Any:
        """Return the device that a storage pretends to be on, or None."""
        tag = self.storage_tag(storage)
        return None if tag is PINNED else tag

    def put_storage(self, storage: Any, tag: Any) -> None:
        """Tag a storage of bytes."""
        self.any_on_device = True
        storage = getattr(storage, "_untyped_storage", storage)
        setattr(storage, self._key, tag)
        self._note_memory(storage, True)

    def first_device(self, values: Iterable[Any]) -> Any:
        """Return the device of the first tensor among ``values`` that pretends to be on one, or None."""
        for value in values:
            if isinstance(value, _TENSOR):
                device = self.device(value)
            else:
                device = self.first_device(value) if isinstance(value, (list, tuple)) else None
            if device is not None:
                return device
        return None


def in_memory(tensor: Any) -> bool:
    """Return whether ``tensor`` is on the CPU or a pretended GPU, as opposed to devices such as "meta"."""
    return tensor.device.type in ("cpu", "cuda")


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in ``value``."""
    if isinstance(value, _TENSOR):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def _tensor_with_memory(tensor: Any) -> Any:
    """Return a tensor with memory: ``tensor``, or its first component."""
    while type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def _tag_holder(tensor: Any) -> Any:
    """Return the tag holder of a tensor without a storage: itself if sparse, or the one that torch.func wraps."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    try:
        return _storage(tensor)
    except (NotImplementedError, RuntimeError):
        return tensor


_LITERAL = re.compile(r"""["']cpu["']|\.cpu\(""")
_PROFILER = (
    profile.__exit__.__code__,
    torch.profiler.profile.stop_trace.__code__,
    gpu_wait._synchronize_all.__code__,  # at the end of a window
)


@dataclass(slots=True)
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
        stream: the number of the current stream of the GPU, as it was selected last.
        places: where the thread calls operators.
        created_on: the GPU on which the running function creates tensors, if the program says so.
        uncounted_depth: greater than 0 while operators stand for others, or for none, on a GPU.
        in_check: whether an operator that is about to run is checked for synchronizations.
    """

    call: str = ""
    synchronized: bool = False
    inputs: Any = None
    last_device: torch.device | None = None
    quiet_depth: int = 0
    functions: Any = None
    foreign_depth: int = 0
    depth: int = 0
    created_on: torch.device | None = None
    uncounted_depth: int = 0
    stream: int = 0
    in_check: bool = False
    places: ThreadPlaces = field(default_factory=ThreadPlaces)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


class RunState:
    """One dry run: its tags, its findings, and the state of each thread."""

    def __init__(self, recorder: LiveRecorder, fake: Any, budget: Budget, ranks: int = 1) -> None:
        self.recorder = recorder
        self.ranks = ranks  # the run is rank 0 of so many
        self.works: set[int] = set()  # the identities of collectives, as one of several ranks
        self.last_work: Any = None
        self.budget = budget
        self.fake = fake  # the FakeTensorMode, or None
        self.calls: CallRecorder | None = None
        self.allocations = MemoryRecorder(lambda: 0 if self.calls is None else len(self.calls.record))
        self._live_memory = LiveMemory(self.allocations.record)
        self.tags = Tags(self.note_memory)
        self.cast: Callable[[Any, torch.dtype], Any] = lambda value, dtype: value  # as autocast on CUDA does
        self._threads = _Threads()
        self.code_ran_before = False  # code that may have chosen a device ran before the run
        self.cpu_by_name: Site | None = None
        self.early_choice_reported = False  # a finding already says that this may be the cause of an error
        self._examined_lines: set[tuple[CodeType, int]] = set()

    @property
    def thread(self) -> ThreadState:
        """The state of the calling thread."""
        return self._threads.state

    def allocator(self) -> CachingAllocator | None:
        """Return the allocator of the GPU as it is now; None if nothing is counted."""
        return None if self.calls is None else self._live_memory.allocator()

    def memory(self, tensor: Any) -> Memory:
        """Return where ``tensor`` is on a machine with a GPU."""
        tag = self.tags.get(tensor)
        return "cpu" if tag is None else "pinned" if tag is PINNED else "gpu"

    def note_memory(self, storage: Any, on_gpu: bool) -> None:
        """Note that a storage is on the GPU now, or no longer, unless what runs stands for something else."""
        if not on_gpu:
            self.allocations.off_gpu(storage)
        elif self.calls is not None and not self.thread.uncounted_depth:
            self.allocations.on_gpu(storage)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run the block on the CPU in place of something that is counted by itself."""
        thread = self.thread
        thread.uncounted_depth += 1
        thread.quiet_depth += 1
        try:
            yield
        finally:
            thread.uncounted_depth -= 1
            thread.quiet_depth -= 1

    @guard.contained(FEATURE)
    def count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Count an operator that stands for what the calling thread ran."""
        if self.calls is None or self.thread.uncounted_depth:
            return
        for tensor in tensors(out):
            self.allocations.on_gpu(_storage(tensor))
        self.allocations.on_operator(func, args, kwargs, out, self.thread.call)
        self.calls.add(self.thread.places, func, args, kwargs, out, mixed=True)

    def note_node(self) -> None:
        """Note that the autograd node that was just made belongs to the operator that is counted next."""
        if self.calls is not None:
            self.calls.note_node(self.thread.places)

    def note_stream(self, kind: Literal["select", "record", "wait"], stream: int | None, event: int = 0) -> None:
        """Note what orders the work of streams; see `StreamNote`. None is the current stream."""
        if kind == "select":
            self.thread.stream = stream or 0
        if self.calls is not None and not self.thread.uncounted_depth:
            stream = self.thread.stream if stream is None else stream
            record = self.calls.record
            record.notes.append(StreamNote(len(record), kind, stream, event))

    def note_group(self, group: Group) -> None:
        """Note the process group of a collective."""
        if self.calls is not None:
            self.calls.record.groups[group.name] = group

    def count_copy(
        self, tensor: Any, target: Memory, *, dtype: torch.dtype | None = None, non_blocking: bool = False,
        source: Memory | None = None,
    ) -> None:  # fmt: skip
        """Count a copy of ``tensor`` to or from the GPU that no counted operator makes.

        Args:
            tensor: what is copied; a storage, or a tensor.
            target: where to.
            dtype: the type of the copy; None for that of ``tensor``.
            non_blocking: whether the CPU goes on meanwhile.
            source: where ``tensor`` is; None if it is itself there.
        """
        if self.calls is None or self.thread.uncounted_depth:
            return
        if target == "gpu":
            self.allocations.belongs_to_last = True
        if isinstance(tensor, _TENSOR):
            about = tuple(map(int, tensor.shape)), stride_of(tensor), tensor.dtype
            source = source or self.memory(tensor)
        else:
            about = (tensor.nbytes(),), (1,), torch.uint8
        info = TensorInfo(*about, 0, source or "cpu")
        self.calls.add_copy(self.thread.places, info, target, dtype, non_blocking)

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
        self, op: str, cause: str = "", direction: Direction | None = None, size: int | None = None, *,
        stream: int | None = None, event: int = 0,
    ) -> None:  # fmt: skip
        """Record a synchronization of the calling thread, at most once for each call of a torch function.

        Args:
            op: the operation, or the ATen operator.
            cause: why it synchronizes; if empty, the cause in the table of operations.
            direction: the direction of its copy.
            size: the size of its copy in bytes.
            stream: the number of the stream that the CPU waits for, or `ALL`; None is the current one.
            event: the event that it waits for; 0 if it waits for a stream.
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
        if self.calls is not None:
            stream = thread.stream if stream is None else stream
            self.calls.note_wait(stream, event, in_next=thread.in_check)
        found = self.recorder.make_event(name_of_operator(op), cause, frame, direction=direction, bytes=size)
        self.recorder.add(found)
        if found.allowed is None:
            self.budget.count_sync(found)

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


def _is_profiler_stop(frame: FrameType) -> bool:
    """Return whether this is a profiler's own synchronization as it stops."""
    return any(caller.f_code in _PROFILER for caller, _ in islice(walk_stack(frame), 8))


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
