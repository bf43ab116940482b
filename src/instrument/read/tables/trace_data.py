"""`TraceData`: the columnar tables that all readers fill, whichever profiler wrote the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .table import Table

MODULE_PREFIX = "nn.Module: "
"""How the names of frames that are modules begin."""

MODULE = re.compile(f"^{re.escape(MODULE_PREFIX)}")


@dataclass(frozen=True)
class Thread:
    """A thread of the program.

    Attributes:
        process: the process id, or the text that the file gives instead.
        thread: the thread id, or the text that the file gives instead.
        name: the name that the operating system shows; empty if the file does not say.
        autograd: whether this is an autograd thread, which runs the backward pass of a GPU's operators.
    """

    process: int | str
    thread: int | str
    name: str = ""
    autograd: bool = False


@dataclass(frozen=True)
class Device:
    """A GPU; numbers that the file does not say are 0.

    Attributes:
        id: the number of the GPU.
        name: its product name, or "".
        sms: its multiprocessors.
        threads_per_sm: how many threads a multiprocessor holds.
        memory_bytes: the size of its memory.
    """

    id: int
    name: str = ""
    sms: int = 0
    threads_per_sm: int = 0
    memory_bytes: int = 0


@dataclass
class ReadLosses:
    """The parts of a file that could not be read; false if there are none.

    Attributes:
        events: the number of events known to be lost.
        bytes: the number of lost bytes.
        repaired: the number of events that were read after an error in their text was repaired.
        reasons: the causes, each with its number of occurrences.
        left_out: events that are intact and that no table holds, in words, each with their number: no loss.
    """

    events: int = 0
    bytes: int = 0
    repaired: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, events: int = 0, size: int = 0) -> None:
        """Count one more loss of so many events and bytes."""
        self.events += events
        self.bytes += size
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __bool__(self) -> bool:
        return bool(self.reasons)


@dataclass(frozen=True)
class Coverage:
    """How much of the GPU work is linked to rows of a table, such as the operators that launched it.

    Attributes:
        linked: the number of linked kernels, memcpys and memsets.
        of: the number of all of them.
        linked_ns: the sum of the durations of the linked ones.
        of_ns: the sum of all durations.
    """

    linked: int
    of: int
    linked_ns: int
    of_ns: int


@dataclass(frozen=True)
class UnreadDevice:
    """Events of a device, or of a profiler, that this library does not know.

    Attributes:
        events: the number of its events.
        busy_ns: the time during which any of them lasted.
    """

    events: int
    busy_ns: int


@dataclass
class TraceData:
    """The recording of one process, as tables of events.

    Each table is a `Table` of numpy columns of equal length, one row per event, in order of start; of events that
    start together, the longest comes first. Times are integer nanoseconds on one clock (columns ``start_ns`` and
    ``duration_ns``). `instrument.read.tables.table.COLUMNS` lists the columns of each table with their types.

    Attributes:
        path: the file; "-" is standard input.
        format: "kineto", "jax", "nsight systems", "rocprof" or "ascend".
        operators: PyTorch operators on the CPU; ``parent`` is a row of this table, or -1.
        regions: named ranges: record_function, NVTX and rocTX. ``parent`` is a row of this table, or -1; the
            outermost regions of autograd threads have the region that was open on the thread that called the
            backward pass as their parent.
        frames: Python functions and, named ``nn.Module: ...``, modules.
        runtime: calls of the CUDA or HIP runtime and driver.
        gpu: kernels, memcpys and memsets. ``launch``, ``operator``, ``region``, ``module`` and ``step`` are rows
            of `runtime`, `operators`, `regions`, `frames` and `steps`, or -1.
        gpu_regions: the ranges of regions on the GPU that the profiler itself recorded.
        syncs: synchronizations that the GPU's driver recorded.
        memory: allocations (``bytes`` > 0) and frees (``bytes`` < 0) of PyTorch's allocators.
        counters: values over time.
        steps: the steps of the training loop, as the program marked them, or the calls of `steps_from`.
        others: complete events and instants of all other categories.
        strings: the texts that the numbers in text columns stand for: ``strings[number]``.
        threads: the threads that the numbers in ``thread`` columns stand for.
        devices: the GPUs.
        metadata: all other information in the file.
        rank: the rank of the process in a distributed job; None if there is no job, or the file does not say.
        world_size: the number of ranks; None like `rank`.
        epoch_ns: the offset from times to nanoseconds since 1970; 0 if the file does not say.
        lost: what could not be read.
        steps_from: the names of the regions whose calls are the steps, with "*" for numbers; "" for marked steps.
        unread_devices: the devices whose work is not in `gpu`, because this library does not know its categories.
        unplaced: the number of regions on autograd threads without a parent, because several threads of the
            program may have called their backward pass.
        coverage: how much GPU work has a "launch", "operator", "region", "module" or "step".
        look_up: returns the args of the event with a number; `args` is the public way.
    """

    path: Path
    format: str
    operators: Table
    regions: Table
    frames: Table
    runtime: Table
    gpu: Table
    gpu_regions: Table
    syncs: Table
    memory: Table
    counters: Table
    steps: Table
    others: Table
    strings: list[str]
    threads: list[Thread]
    devices: list[Device] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    world_size: int | None = None
    epoch_ns: int = 0
    lost: ReadLosses = field(default_factory=ReadLosses)
    steps_from: str = ""
    unread_devices: Mapping[str, UnreadDevice] = field(default_factory=dict)
    unplaced: int = 0
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    look_up: Callable[[int], dict[str, Any]] | None = field(default=None, repr=False)
