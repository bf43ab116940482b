"""The columnar trace that everything else stands on, whichever profiler wrote the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .table import KERNEL, MEMCPY, MEMSET, Table


@dataclass(frozen=True)
class Thread:
    """A thread of the program.

    Attributes:
        process: its process id, or the word that the file has in its place.
        thread: its id.
        name: what the operating system calls it; empty where the file does not say.
        autograd: whether it is one of autograd's own, which run the backward pass of a GPU's operators.
    """

    process: int | str
    thread: int | str
    name: str = ""
    autograd: bool = False


@dataclass(frozen=True)
class Device:
    """A GPU; 0 or "" is what the file does not say."""

    id: int
    name: str = ""
    sms: int = 0
    threads_per_sm: int = 0
    memory_bytes: int = 0


@dataclass
class ReadLosses:
    """What of the file could not be read.

    Attributes:
        events: how many events, as far as they can be told apart.
        bytes: how much text.
        repaired: events that were read after an error in their text was mended.
        reasons: why, each with how often.
    """

    events: int = 0
    bytes: int = 0
    repaired: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, events: int = 0, size: int = 0) -> None:
        """Count one more loss."""
        self.events += events
        self.bytes += size
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __bool__(self) -> bool:
        return bool(self.reasons)


@dataclass(frozen=True)
class Coverage:
    """How much of the GPU work is linked to something; ``_ns`` are durations, added up."""

    linked: int
    of: int
    linked_ns: int
    of_ns: int


@dataclass
class Trace:
    """What a profiler wrote.

    Times are integer ns on one clock; where the file says since when, `epoch_ns` added to them is the time
    since 1970. Each table is sorted by start; where starts are equal, the longest is first. The columns of
    each are in `instrument.traces.table.COLUMNS`.

    Attributes:
        path: the file; "-" is standard input.
        format: "kineto", "nsight systems" or "rocprof".
        operators: PyTorch's operators on the CPU. `parent` is a row of the same table.
        regions: ranges that somebody named: record_function, NVTX, rocTX. Those of autograd's threads that are
            in no other there have as `parent` the one open on the thread that called the backward pass.
        frames: Python functions and, named ``nn.Module: ...``, modules.
        runtime: calls of the CUDA or HIP runtime and driver.
        gpu: kernels, copies and fills. `launch`, `operator`, `region`, `module` and `step` are rows of
            `runtime`, `operators`, `regions`, `frames` and `steps`, or -1.
        gpu_regions: where the work of a region ran on the GPU, as the profiler saw it.
        syncs: synchronisations as the GPU saw them.
        memory: what was allocated (`bytes` > 0) and freed (< 0), by PyTorch's allocators.
        counters: values over time.
        steps: each step of the training loop, as the program marked it.
        others: complete events and instants of any other category.
        words: what the numbers in columns of `TEXT` stand for.
        threads: what the numbers in `thread` stand for.
        devices: the GPUs.
        metadata: everything else the file says of itself.
        rank: of the process in a distributed job; None where it is not one, or not said.
        world_size: the number of ranks.
        epoch_ns: what to add to times to get those since 1970.
        lost: what could not be read.
        unplaced: how many regions of autograd's threads are in no other although one is open, since several
            threads of the program may have called that backward pass.
        coverage: of "launch", "operator", "region", "module" and "step": how much GPU work has one.
        look_up: returns the args of the event of a number; see `args`.
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
    unplaced: int = 0
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    look_up: Callable[[int], dict[str, Any]] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<trace {self.path}: {len(self.gpu):,} on the GPU, {len(self.operators):,} operators>"

    @property
    def kernels(self) -> Table:
        """The rows of `gpu` that are kernels."""
        return self.gpu.where(self.gpu.category == KERNEL)

    @property
    def memcpys(self) -> Table:
        """The rows of `gpu` that copy memory."""
        return self.gpu.where(self.gpu.category == MEMCPY)

    @property
    def memsets(self) -> Table:
        """The rows of `gpu` that fill memory."""
        return self.gpu.where(self.gpu.category == MEMSET)

    def args(self, table: Table, row: int) -> dict[str, Any]:
        """Return all that the file says of one event, read from it again; slow, meant for a look at a few.

        Raises:
            OSError: if the file is gone.
            TraceError: if it is damaged there.
        """
        if self.look_up is None:
            return {}
        return self.look_up(int(table.event[row]))

    def to_arrow(self) -> dict[str, Any]:
        """Return the tables as ``pyarrow.Table``, by name; see `instrument.traces.export`."""
        from .export import to_arrow

        return to_arrow(self)

    def to_pandas(self) -> dict[str, Any]:
        """Return the tables as ``pandas.DataFrame``, by name."""
        from .export import to_pandas

        return to_pandas(self)

    def to_parquet(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write a file for each table into ``folder``, for DuckDB and the like, and return their paths."""
        from .export import to_parquet

        return to_parquet(self, folder)
