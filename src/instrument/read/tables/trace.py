"""`Trace`: the tables that all readers fill, whichever profiler wrote the file, and their export."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...base.files import make_folder
from ...base.page_file import InNotebook
from .table import COLUMNS, KERNEL, MEMCPY, MEMSET, PIP, TEXT, Array, Table

if TYPE_CHECKING:
    import pyarrow

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
class Trace(InNotebook):
    """The recording of one process, as tables of events.

    Each table is a `Table` of numpy columns of equal length, one row per event, in order of start; of events that
    start together, the longest comes first. Times are integer nanoseconds on one clock (columns ``start_ns`` and
    ``duration_ns``). `instrument.read.tables.table.COLUMNS` lists the columns of each table with their types.

    Attributes:
        path: the file; "-" is standard input.
        format: "kineto", "jax", "xplane", "perfetto", "nsight systems", "rocprof" or "ascend".
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
        rank: the rank of the process in a distributed job; None without a job, or if the file does not say.
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

    def __repr__(self) -> str:
        return f"<trace {self.path}: {len(self.gpu):,} on the GPU, {len(self.operators):,} operators>"

    @property
    def kernels(self) -> Table:
        """The kernels: rows of `gpu`, renumbered from 0."""
        return self.gpu.where(self.gpu.category == KERNEL)

    @property
    def memcpys(self) -> Table:
        """The memcpys: rows of `gpu`, renumbered from 0."""
        return self.gpu.where(self.gpu.category == MEMCPY)

    @property
    def memsets(self) -> Table:
        """The memsets: rows of `gpu`, renumbered from 0."""
        return self.gpu.where(self.gpu.category == MEMSET)

    def read_only(self) -> Trace:
        """Return a copy whose tables share their memory with this trace, and cannot be written."""
        copied = copy(self)
        tables = {name: value for name, value in vars(self).items() if isinstance(value, Table)}
        vars(copied).update({name: table.read_only() for name, table in tables.items()})
        return copied

    def args(self, table: Table, row: int) -> dict[str, Any]:
        """Return everything that the file says about one event.

        The file is read again, which is slow: meant for a few events.

        Args:
            table: a table of this trace, or a selection of its rows.
            row: the row in that table.

        Raises:
            OSError: the file cannot be opened any more.
            TraceError: the file is damaged at this event.
        """
        if self.look_up is None:
            return {}
        return self.look_up(int(table.event[row]))

    def to_arrow(self) -> dict[str, Any]:
        """Return the tables as ``pyarrow.Table``, by name; see `instrument.to_arrow`.

        Raises:
            ImportError: pyarrow is not installed.
        """
        about = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_EXPORTED}
        metadata = {b"instrument": json.dumps(about, default=_plain).encode()}
        return {kind: _arrow_table(self, kind).replace_schema_metadata(metadata) for kind in COLUMNS}

    def to_pandas(self) -> dict[str, Any]:
        """Return the tables as ``pandas.DataFrame``, by name, with text as categories.

        The columns are those of `to_arrow`, except ``row``, which is the index.

        Raises:
            ImportError: pandas or pyarrow is not installed.
        """
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise ImportError(f"data frames need pandas: {PIP}") from error
        return {kind: rows.drop_columns("row").to_pandas() for kind, rows in self.to_arrow().items()}

    def to_parquet(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table, with the columns of `to_arrow`, and return their paths.

        Existing files are replaced once all tables are written; if writing fails, no file is replaced.

        Args:
            folder: the folder for the files, created if missing.

        Raises:
            ImportError: pyarrow is not installed.
            NotADirectoryError: ``folder`` is a file.
            OSError: ``folder`` cannot be written to.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f'"folder" must be a folder: {str(folder)!r} is a file')
        tables = self.to_arrow()
        import pyarrow.parquet

        make_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as parts:
            for kind, rows in tables.items():
                pyarrow.parquet.write_table(rows, Path(parts, f"{kind}.parquet"))
            return [Path(parts, f"{kind}.parquet").replace(folder / f"{kind}.parquet") for kind in tables]

    def _page(self) -> str:
        from ...show.sections.trace import page_of

        return page_of(self)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name != "look_up"]


_NOT_EXPORTED = {*COLUMNS, "strings", "threads", "look_up"}


@overload
def to_arrow(source: Trace) -> dict[str, pyarrow.Table]: ...
@overload
def to_arrow(source: Table) -> pyarrow.Table: ...
def to_arrow(source: Trace | Table) -> dict[str, pyarrow.Table] | pyarrow.Table:
    """Return the tables of a trace by name, or a single table, as ``pyarrow.Table``.

    Text columns become dictionary columns with the strings in use. The tables of a trace have more columns:
    ``row``, to which links such as ``gpu.region`` refer; and in tables with a ``thread``, its ``process``,
    ``thread_id`` and ``thread_name``, null if unknown. The metadata of each schema has the other attributes of the
    trace as JSON, under the key ``instrument``.

    Raises:
        ImportError: pyarrow is not installed.
    """
    if isinstance(source, Table):
        return _arrow(dict(source), source.strings)
    return source.to_arrow()


def _arrow_table(trace: Trace, kind: str) -> pyarrow.Table:
    rows: Table = getattr(trace, kind)
    columns: dict[str, Any] = {"row": np.arange(len(rows), dtype=np.int32)} | dict(rows)
    result = _arrow(columns, rows.strings)
    if "thread" in rows:
        unknown = rows.thread < 0
        places = {
            "process": [str(thread.process) for thread in trace.threads],
            "thread_id": [str(thread.thread) for thread in trace.threads],
            "thread_name": [thread.name for thread in trace.threads],
        }
        for name, texts in places.items():
            column = _dictionary(np.where(unknown, 0, rows.thread), texts or [""], unknown)
            result = result.append_column(name, column)
    return result


def _arrow(columns: dict[str, Array], strings: list[str]) -> pyarrow.Table:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"Arrow and Parquet need pyarrow: {PIP}") from error
    return pyarrow.table(
        {
            name: _dictionary(column, strings) if name in TEXT else pyarrow.array(column)
            for name, column in columns.items()
        }
    )


def _dictionary(codes: Array, strings: list[str], unknown: Array | None = None) -> pyarrow.DictionaryArray:
    """Return a dictionary column of the strings in use."""
    import pyarrow

    used, numbers = np.unique(codes, return_inverse=True)
    # JSON may escape half a surrogate pair, which cannot be encoded.
    texts = [strings[code].encode(errors="backslashreplace").decode() for code in used.tolist()]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}  # threads share names
    indices = np.array([places[text] for text in texts], np.int32)[numbers]
    dictionary = pyarrow.array(list(places), pyarrow.string())
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(indices, mask=unknown), dictionary)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)
