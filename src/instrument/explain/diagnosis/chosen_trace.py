"""Chooses the trace to look at, of a file or of the ranks of a job, and the memory snapshot beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from ...base.errors import TraceError
from ...base.run_folder import entries_of, entry_of, existing, last_snapshots, last_window, snapshots_of
from ...base.units import counted
from ...read.jobs.kinds import IS_PICKLE
from ...read.jobs.ranks import TraceSet, set_of
from ...read.jobs.read import check_ranks_path, read_contents
from ...read.jobs.trace_files import FoundFiles, find_trace_files, rank_from_name
from ...read.memory.read import chosen_snapshot, is_snapshot, read_memory
from ...read.memory.snapshot import MemorySnapshot
from ...read.tables.links import assemble
from ...read.tables.table import Strings
from ...read.tables.trace import ReadLosses, Trace
from ...read.tables.work_classes import Collectives
from ..metrics.job import Job, job_of

FORMAT = "memory snapshot"


def empty_trace(path: Path) -> Trace:
    """Return a trace without events, for a snapshot that is diagnosed on its own."""
    rank, nothing = rank_from_name(path), Strings()
    return assemble(path, FORMAT, {}, nothing, [], devices=[], metadata={}, lost=ReadLosses(), rank=rank)


def reject_snapshot(trace: Trace) -> None:
    """Check that a trace has steps to look at.

    Raises:
        TraceError: it is that of `empty_trace`.
    """
    if trace.format == FORMAT:
        raise TraceError(trace.path, IS_PICKLE)


def snapshot_of(trace: Trace) -> tuple[MemorySnapshot | None, dict[Path, str]]:
    """Return the memory snapshot of the process of a trace; and the file that cannot be read, with the reason.

    It is that of the window of the trace or, as not each window has one, of the last window before it with one.

    Raises:
        TraceError, OSError: the trace is that of `empty_trace`, and its file cannot be read.
    """
    if trace.format == FORMAT:
        return read_memory(trace.path), {}
    path = _recorded(trace.path)
    if path is None:
        return None, {}
    try:
        return read_memory(path), {}
    except (TraceError, OSError) as error:  # the trace can be diagnosed without
        return None, {path: str(error)}


def _recorded(trace: Path) -> Path | None:
    """Return the snapshot that the run of a trace recorded on its rank until then; None if there is none."""
    own = entry_of(trace)
    if own is None:
        return None
    folder = trace.absolute().parent.parent
    snapshot = None
    for entry in entries_of(folder):
        if all(entry.get(key) == own.get(key) for key in ("run", "rank")):
            names = list(existing(folder, snapshots_of(entry)))
            snapshot = folder / names[-1] if names else snapshot
        if entry == own:
            break
    return snapshot


StrPath = str | os.PathLike[str]
Source = Trace | TraceSet | StrPath | Iterable[Trace | StrPath]
"""A trace or its path; or the ranks of a job, as traces, as paths, as a folder, or as a pattern."""


class ChosenTrace(NamedTuple):
    """The trace to look at.

    Attributes:
        trace: the trace.
        job: the ranks of its job; None if only this trace is known.
        left_out: the files and folders that are not part of the job, each with the reason.
        named: whether the caller named this trace or its file.
    """

    trace: Trace
    job: Job | None
    left_out: Mapping[Path, str]
    named: bool

    @property
    def text(self) -> str:
        """The file that was chosen, and of how many ranks; empty for a trace that the caller named."""
        if self.named:
            return ""
        if self.job is None or self.job.world_size < 2:
            return str(self.trace.path)
        own = [rank for rank, one in self.job.ranks.items() if one.path == self.trace.path]
        rank = next((each for each in own if self.job.whole.get(each) is self.trace), own[0] if own else 0)
        return f"{self.trace.path}, rank {rank} of the {counted(len(self.job.ranks), 'rank')} that were read"


def chosen_trace(
    source: Source, rank: int | None, collectives: Collectives, executor: Executor | None, steps_from: str | None
) -> ChosenTrace:
    """Return the trace to look at and, of several ranks, their job.

    Args:
        source: what to choose from.
        rank: the rank, of several; None chooses the one that the others wait for, else the one that takes longest.
        collectives: which kernels communicate.
        executor: reads the files of several ranks.
        steps_from: which regions are the steps, as in `with_steps`.

    Raises:
        TypeError: ``source`` is none of these.
        ValueError: the rank does not exist, or ``source`` is empty.
        TraceError, OSError: a file cannot be read.
    """
    one = _single(source, rank)
    if isinstance(one, ChosenTrace):
        if rank is not None and rank != (one.trace.rank or 0):
            raise ValueError(f'"rank" must be the rank of the trace, {one.trace.rank or 0}: {rank!r}')
        return one
    several = one or (source if isinstance(source, TraceSet) else _ranks(source))
    job = job_of(several, collectives, executor, steps_from)
    return ChosenTrace(job.trace(job.focus if rank is None else rank), job, job.left_out, named=False)


def _single(source: Source, rank: int | None) -> ChosenTrace | TraceSet | None:
    """Return the one trace that ``source`` has, or the ranks in its one file; None if it has several files.

    Of a folder that has memory snapshots alone, it is the one that `chosen_snapshot` chooses for ``rank``.
    """
    if isinstance(source, Trace):
        return ChosenTrace(source, None, {}, named=True)
    if isinstance(source, (str, os.PathLike)):
        path = last_window(os.fspath(source))
        several = path != "-" and (Path(path).is_dir() or not Path(path).exists())  # a pattern, or a mistake
        files = _files(path, rank) if several else FoundFiles([Path(path)])
        if len(files.files) == 1:
            file = files.files[0]
            trace = empty_trace(file) if is_snapshot(file) else read_contents(file)
            if isinstance(trace, TraceSet):
                return trace
            return ChosenTrace(trace, None, files.left_out, named=not several)
    return None


def _ranks(source: object) -> TraceSet | str | list[StrPath]:
    """Return the traces of several ranks, or what to read them from."""
    if isinstance(source, (str, os.PathLike)):
        return last_window(os.fspath(source))
    if isinstance(source, (bytes, Mapping)) or not isinstance(source, Iterable):
        raise TypeError(f'"trace" must be a trace or a path, or several of them: {source!r:.200}')
    members = list(source)
    traces = [each for each in members if isinstance(each, Trace)]
    paths: list[StrPath] = [each for each in members if isinstance(each, (str, os.PathLike))]
    if not members:
        raise ValueError('"trace" must not be empty')
    if len(members) not in (len(traces), len(paths)):
        raise TypeError(f'"trace" must hold traces, or paths, and nothing else: {members!r:.200}')
    return set_of(traces) if traces else paths


def _files(path: str, rank: int | None) -> FoundFiles:
    check_ranks_path(path)
    try:
        return find_trace_files(path)
    except TraceError:
        snapshots = last_snapshots(Path(path))
        if not snapshots:
            raise
    chosen = chosen_snapshot(Path(path), rank).path
    return FoundFiles([chosen], {file: held for file, held in _held(snapshots).items() if file != chosen})


def _held(snapshots: Iterable[Path]) -> dict[Path, str]:
    """Return what each file holds; of several of a rank, as of a program started again, the last one counts."""
    ranks = {file: rank_from_name(file) or 0 for file in snapshots}
    newest = {rank: file for file, rank in ranks.items()}
    return {
        file: f"rank {rank}, which rank={rank} or --rank {rank} diagnoses"
        if newest[rank] == file
        else f"an older snapshot of rank {rank}"
        for file, rank in ranks.items()
    }
