"""Reads traces: finds out from the content of a file which profiler wrote it, and picks the reader."""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from ...base.errors import TraceError
from ...base.imports import import_without_drawing
from ...base.printable import printable
from ...base.trace_marks import MACHINE, MERGE
from ..kineto.kineto import read_kineto_ranks
from ..kineto.text import file_blocks, read_head
from ..measures.region_steps import steps_from_regions, with_steps
from ..profilers.ascend import is_ascend, read_ascend
from ..profilers.database import is_database, open_database
from ..tables.intervals import clip, merge_overlaps, total_ns
from ..tables.lanes import map_unique
from ..tables.steps import span, whole_window
from ..tables.table import COLUMNS, KERNEL, TEXT, Array, Strings, Table, TooLargeError, table
from ..tables.trace import Trace
from ..tables.work_classes import Collectives, communication_mask
from .align import collective_kernels
from .formats import foreign_format, unpack
from .ranks import TraceSet, read_ranks
from .trace_files import Paths
from .transfers import Transfers, transfers_of

_DATABASES = (".sqlite", ".db")
_REPORTS = (".nsys-rep", ".qdrep")
_HEAD_BYTES = 1 << 16
_MOST_LAYERS = 3  # of archives and compression; an archive may hold itself


def read_trace(path: str | os.PathLike[str], *, steps_from: str | None = None) -> Trace:
    """Read the trace of one process.

    Kineto JSON of torch.profiler, plain or gzip, damaged files included; reports of Nsight Systems, ``.sqlite``
    or ``.nsys-rep``; JSON and databases of rocprofv3. `Trace.lost` says which parts of the file could not be
    read. `read_traces` reads the ranks of a job.

    Args:
        path: a file, or "-" for standard input.
        steps_from: a regular expression: the regions in whose names it is found are the steps, for programs that
            mark steps in their own way; None takes the steps that the profiler knows.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``steps_from`` is not a regular expression, or no region has such a name.
        TraceError: ``path`` is a folder or a pattern; or the file is not a trace, or no event can be read.
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be opened.
    """
    _check_path(path)
    if _is_file(path):
        trace = read_file(Path(path))
        return trace if steps_from is None else steps_from_regions(trace, steps_from)
    if not str(path):
        raise TraceError(Path(), '"path" must not be empty')
    if Path(path).is_dir():
        raise TraceError(Path(path), "this is a folder; read_traces reads the traces of the ranks in it")
    if glob.has_magic(str(path)):
        raise TraceError(Path(path), "this is a pattern; read_traces reads the files that match it")
    raise _not_found(path)


def read_traces(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    steps_from: str | None = None,
    executor: Executor | None = None,
) -> TraceSet:
    """Read the traces of the ranks of one job.

    Files that cannot be read are listed in `TraceSet.failed` and do not stop the others. Where a rank has several
    windows, the set holds the last window that most ranks have, and `TraceSet.left_out` lists the other files.

    Args:
        paths: a folder, a pattern such as ``"runs/*.json.gz"``, several files, or one file in which a program
            merged several ranks. `read_trace` reads a file of one rank.
        steps_from: as in `read_trace`, for each rank.
        executor: reads the files; by default processes of this machine, one for each core.

    Raises:
        ValueError: ``steps_from`` is not a regular expression, or a rank has no region with such a name.
        TypeError: ``paths`` is neither a path nor an iterable of paths.
        TraceError: ``paths`` is one file; or no file matches, or none of the files can be read.
        FileNotFoundError: the folder does not exist.
    """
    if not isinstance(paths, (str, os.PathLike, Iterable)):
        raise TypeError(f'"paths" must be a folder, a pattern or several paths: {paths!r:.200}')
    if isinstance(paths, (str, os.PathLike)) and _is_file(paths):
        contents = None if str(paths) == "-" else read_contents(Path(paths))
        if not isinstance(contents, Mapping):
            raise TraceError(Path(paths), "this is one file; read_trace reads it")
        traces = contents
    else:
        traces = _read_ranks(paths, executor)
    return traces if steps_from is None else traces.map(lambda trace: steps_from_regions(trace, steps_from))


def read_any(path: str | os.PathLike[str]) -> Trace | TraceSet:
    """Read one file as `read_trace` does, or several ranks as `read_traces` does; errors as theirs."""
    return read_contents(Path(path)) if _is_file(path) else _read_ranks(path, None)


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        several = "; read_traces reads several files" * isinstance(path, Iterable)
        raise TypeError(f'"path" must be the path of one file{several}: {path!r:.200}')


def _is_file(path: str | os.PathLike[str]) -> bool:
    file = Path(path)
    return str(path) == "-" or (bool(str(path)) and file.exists() and not file.is_dir())


def _read_ranks(paths: Paths, executor: Executor | None) -> TraceSet:
    if isinstance(paths, (str, os.PathLike)) and str(paths):
        check_ranks_path(paths)
    return read_ranks(paths, read_file, executor)


def check_ranks_path(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError if the path is neither a folder nor a pattern."""
    if not Path(path).is_dir() and not glob.has_magic(str(path)):
        raise _not_found(path)


def _not_found(path: str | os.PathLike[str]) -> FileNotFoundError:
    return FileNotFoundError(2, "No such file or folder", str(path))


def read_file(path: Path) -> Trace:
    """Read one file; errors as `read_trace`."""
    traces = read_contents(path)
    if not isinstance(traces, Trace):
        raise TraceError(path, f"it holds the traces of {len(traces)} ranks, which read_traces reads")
    return traces


def read_contents(path: Path, layers: int = _MOST_LAYERS) -> Trace | TraceSet:
    """Read one file, which may hold the traces of several ranks; errors as `read_trace`.

    Args:
        path: the file.
        layers: how many layers of archives and compression are unpacked.
    """
    try:
        return _read_file(path, layers)
    except TooLargeError as error:
        raise TraceError(path, str(error)) from None
    except MemoryError:
        raise TraceError(path, "its content does not fit into memory") from None


def _read_file(path: Path, layers: int) -> Trace | TraceSet:
    if str(path) == "-":
        return _read_copy(path, file_blocks(sys.stdin.buffer), "", layers)
    if not stat.S_ISREG(path.stat().st_mode):
        with path.open("rb") as source:
            return _read_copy(path, file_blocks(source), "", layers)
    head = read_head(path, _HEAD_BYTES)
    if is_database(path):
        return _read_database(path)
    if layers and (inside := unpack(path, head)):
        name, blocks = inside
        return _read_copy(path, blocks, name, layers - 1)
    if foreign := foreign_format(path, head):
        raise TraceError(path, foreign)
    if path.suffix in _DATABASES and not head.lstrip().startswith((b"{", b"[")):
        raise TraceError(path, "it is empty" if not head else "it is not an SQLite database")
    if path.suffix in _REPORTS:
        from ..profilers.nsight import read_nsight

        return read_nsight(path)
    if b'"rocprofiler-sdk-tool"' in head and b'"traceEvents"' not in head:
        from ..profilers.rocprof import read_rocprof

        return read_rocprof(path)
    if is_ascend(path, head):
        with suppress(TraceError):  # a damaged file is read below, without the work of the NPU
            return read_ascend(path)
    with progress_bar(path) as advance:
        traces = read_kineto_ranks(path, advance)
    return traces[0] if len(traces) == 1 else TraceSet({trace.rank or 0: trace for trace in traces})


def _read_database(path: Path) -> Trace:
    from ..profilers.nsight import read_nsight
    from ..profilers.rocpd import read_rocpd

    with open_database(path) as database:
        query = "SELECT count(*) FROM sqlite_master WHERE name LIKE 'rocpd%'"
        (rocpd_tables,) = database.execute(query).fetchone()
    return read_rocpd(path) if rocpd_tables else read_nsight(path)


def _read_copy(path: Path, blocks: Iterator[bytes], name: str, layers: int) -> Trace | TraceSet:
    """Read a copy of what is not a plain file; `Trace.args` needs the copy, which is removed with the traces.

    Args:
        path: where the content comes from.
        blocks: the content.
        name: a file name, whose suffix may say what the content is.
        layers: as in `read_contents`.
    """
    suffix = "".join(Path(name).suffixes[-2:]) or ".trace"
    with tempfile.NamedTemporaryFile(prefix="instrument-", suffix=suffix, delete=False) as copy:
        spool = Path(copy.name)
        try:
            copy.writelines(blocks)
            copy.close()
            contents = read_contents(spool, layers)
        except BaseException as error:
            spool.unlink(missing_ok=True)
            if isinstance(error, TraceError):
                raise TraceError(path, error.reason) from None
            raise
    traces = [contents] if isinstance(contents, Trace) else list(contents.values())
    for trace in traces:
        trace.path = path
    # Copies of the traces share what looks up their arguments, and so do the ranks in one file.
    weakref.finalize(traces[0].look_up, spool.unlink, missing_ok=True)
    return contents


_OF_GLOO = re.compile("^gloo:(?!send|recv)")
_MIN_BYTES = 100_000_000  # bytes; smaller files take about a second
watching: ContextVar[Callable[[int, int], None] | None] = ContextVar("watching", default=None)
"""What is called instead of a bar, with the bytes read and the size of the file; it may raise an error."""


@contextmanager
def progress_bar(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes read: it calls `watching`, or moves a bar at a terminal."""
    size = path.stat().st_size
    if watch := watching.get():
        yield lambda read: watch(read, size)
        return
    if size < _MIN_BYTES or sys.stderr is None or not sys.stderr.isatty():
        yield lambda read: None
        return
    try:
        import_without_drawing("rich.style")
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # a program may have a module of that name
        yield lambda read: None
        return
    columns = (
        TextColumn("reading {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(printable(path.name), total=size)
        yield lambda read: bar.advance(task, read)


@dataclass
class RankContent(Trace):
    """A trace with its steps and collectives only: kernels, and ranges of gloo.

    Attributes:
        window_ns: the time of its steps and of the work that they launched; without steps, that of `whole_window`.
        compute_ns: the part of it during which a kernel that does not communicate runs.
        transfers: what it sends to other ranks and receives from them; None if there is nothing.
    """

    window_ns: int = 0
    compute_ns: int = 0
    transfers: Transfers | None = None


def read_rank_content(path: Path, collectives: Collectives = "auto", steps_from: str | None = None) -> RankContent:
    """Read one file, and keep its steps (see `with_steps`) and collectives; errors as those of `read_trace`."""
    return content_of(with_steps(read_file(path), steps_from), collectives)


def rank_content_reader(collectives: Collectives, steps_from: str | None) -> partial[RankContent]:
    """Return a function that reads a file, and that other processes can import."""
    return partial(read_rank_content, collectives=collectives, steps_from=steps_from)


def content_of(trace: Trace, collectives: Collectives = "auto") -> RankContent:
    """Return what `RankContent` keeps of a trace."""
    gpu, steps = trace.gpu, trace.steps
    own = gpu.where(gpu.step >= 0) if steps else gpu
    start, end = (span(steps)[0], span(steps, own)[1]) if steps else whole_window(trace)
    counted = own or gpu  # not the work of earlier steps that still runs when the recording begins
    computes = ~communication_mask(counted, collectives) & (counted.category == KERNEL)
    compute = clip(merge_overlaps(counted.start_ns[computes], counted.end_ns[computes]), start, end)
    strings = Strings()
    of_gloo = trace.regions.where(trace.regions.matching("name", _OF_GLOO))
    kept = {
        "gpu": _copied(gpu.where(collective_kernels(trace)), strings),
        "regions": _copied(of_gloo, strings),
        "steps": _copied(steps, strings),
    }
    texts, nothing = list(strings), {"start_ns": np.empty(0, np.int64)}
    # what says which rank, or which ranks, the trace is of, and where they ran
    about = {key: trace.metadata[key] for key in ("distributedInfo", MACHINE, MERGE) if trace.metadata.get(key)}
    return RankContent(
        **{field.name: getattr(trace, field.name) for field in fields(Trace)}
        | {name: table(name, kept.get(name, nothing), texts) for name in COLUMNS}
        | {"strings": texts, "look_up": None, "metadata": about},
        window_ns=end - start,
        compute_ns=total_ns(compute),
        transfers=transfers_of(trace, collectives),
    )


def _copied(rows: Table, strings: Strings) -> dict[str, Array]:
    """Return the columns with strings renumbered, so that the strings of other rows can go."""
    return {
        name: map_unique(column, lambda code: strings[rows.strings[code]]) if name in TEXT else column.copy()
        for name, column in rows.items()
    }
