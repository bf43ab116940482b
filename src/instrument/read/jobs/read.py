"""Reads traces: of one process, of the ranks of a job, of archives and streams, and what is kept of each rank."""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from ...base.errors import TraceError
from ...base.trace_marks import MACHINE, MERGE
from ..kineto.text import file_blocks, read_head
from ..measures.region_steps import steps_from_regions, with_steps
from ..profilers.sums import refuse_with_sums
from ..tables.intervals import clip, merge_overlaps, total_ns
from ..tables.lanes import map_unique
from ..tables.steps import span, whole_window
from ..tables.table import COLUMNS, KERNEL, TEXT, Array, Strings, Table, TooLargeError, table
from ..tables.trace import Trace
from ..tables.work_classes import Collectives, communication_mask
from .align import collective_kernels
from .archives import Allowance, is_packed, unpack
from .kinds import kind_of
from .ranks import TraceSet, read_ranks
from .trace_files import Paths, find_trace_files
from .transfers import Transfers, transfers_of

_HEAD_BYTES = 1 << 16


def read_trace(path: str | os.PathLike[str], *, steps_from: str | None = None) -> Trace:
    """Read the trace of one process.

    `kinds.READ` lists what is read, damaged files included; a file may be packed. `Trace.lost` says which parts of
    the file could not be read. `read_traces` reads the ranks of a job.

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
    annex = Path(path).is_symlink() and "/annex/objects/" in str(Path(path).readlink())
    return FileNotFoundError(2, "No such file or folder" + "; git annex get fetches it" * annex, str(path))


def read_file(path: Path, allowance: Allowance | None = None) -> Trace:
    """Read one file; arguments as `read_contents`, errors as `read_trace`."""
    traces = read_contents(path, allowance)
    if not isinstance(traces, Trace):
        raise TraceError(path, f"it holds the traces of {len(traces)} ranks, which read_traces reads")
    return traces


def read_contents(path: Path, allowance: Allowance | None = None) -> Trace | TraceSet:
    """Read one file, which may hold the traces of several ranks; errors as `read_trace`.

    Args:
        path: the file.
        allowance: limits how much it may unpack to; None for a file that did not come out of an archive.
    """
    try:
        return _read_file(path, allowance or Allowance(0 if str(path) == "-" else path.stat().st_size))
    except TooLargeError as error:
        raise TraceError(path, str(error)) from None
    except MemoryError:
        raise TraceError(path, "its content does not fit into memory") from None


def _read_file(path: Path, allowance: Allowance) -> Trace | TraceSet:
    if str(path) == "-":
        return _read_copies(path, partial(_copied_stream, sys.stdin.buffer), None)
    if not stat.S_ISREG(path.stat().st_mode):
        with path.open("rb") as source:
            return _read_copies(path, partial(_copied_stream, source), None)
    head = read_head(path, _HEAD_BYTES)
    if allowance.layers and is_packed(head):
        allowance.layers -= 1
        return _read_copies(path, partial(unpack, path, head, allowance), allowance)
    kind = kind_of(path, head)
    if kind.sums:
        refuse_with_sums(path, kind.text)
    if kind.read is None:
        raise TraceError(path, kind.text)
    traces = kind.read(path)
    return traces[0] if len(traces) == 1 else TraceSet({trace.rank or 0: trace for trace in traces})


def _copied_stream(source: IO[bytes], folder: Path) -> list[Path]:
    file = folder / "copy.trace"
    with file.open("wb") as copy:
        copy.writelines(file_blocks(source))
    return [file]


def _read_copies(path: Path, copy: Callable[[Path], list[Path]], allowance: Allowance | None) -> Trace | TraceSet:
    """Read copies of what a file holds; `Trace.args` needs a copy, which is removed with its trace.

    Args:
        path: where the content comes from.
        copy: writes the files into a folder, and returns them.
        allowance: as in `read_contents`.
    """
    folder = Path(tempfile.mkdtemp(prefix="instrument-"))
    try:
        files = copy(folder)
        if len(files) > 1:
            files = find_trace_files(folder).files
        if len(files) == 1:
            contents = read_contents(files[0], allowance)
        else:  # in processes, which share no total
            contents = read_ranks(folder, partial(read_file, allowance=Allowance(0, layers=0)))
    except BaseException as error:
        _remove_below(folder)
        if isinstance(error, TraceError):
            error.path = path
        raise
    base, needed = files[0] if len(files) == 1 else folder, set()
    for trace in [contents] if isinstance(contents, Trace) else contents.values():
        if trace.look_up is not None:  # copies of a trace share it, and so do the ranks in one file
            weakref.finalize(trace.look_up, _remove, trace.path, folder)
            needed.add(trace.path)
        trace.path = path / trace.path.relative_to(base)
    _remove_below(folder, needed)
    if isinstance(contents, TraceSet):
        for reasons in (contents.failed, contents.left_out):
            named = {path / file.relative_to(base): reason for file, reason in reasons.items()}
            reasons.clear()
            reasons.update(named)
    return contents


def _remove_below(folder: Path, needed: Collection[Path] = ()) -> None:
    """Remove a folder but for the files that are needed.

    `shutil.rmtree` opens names relative to open folders, which no guard of the opening of files can resolve.
    """
    for file in [file for file in folder.rglob("*") if file.is_file() and file not in needed]:
        _remove(file, folder)
    with suppress(OSError):
        folder.rmdir()


def _remove(file: Path, folder: Path) -> None:
    """Remove a file below a folder, and the folders that are then empty."""
    with suppress(OSError):
        file.unlink(missing_ok=True)
        for parent in file.parents:
            if parent.is_relative_to(folder):
                parent.rmdir()


_OF_GLOO = re.compile("^gloo:(?!send|recv)")


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
