"""Finds the memory snapshot of a process: the file itself, or the one that its run recorded beside the trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..errors import TraceError
from ..memory.read import read_memory
from ..memory.snapshot import MemorySnapshot
from ..run_folder import entries_of, entry_of, existing, snapshots_of
from ..traces.formats import IS_PICKLE
from ..traces.links import assemble
from ..traces.table import Strings
from ..traces.trace import ReadLosses, Trace
from ..traces.trace_files import rank_from_name

FORMAT = "memory snapshot"


class FoundSnapshot(NamedTuple):
    """The memory snapshot of a process; or the file that cannot be read, with the reason."""

    snapshot: MemorySnapshot | None = None
    failed: Mapping[Path, str] = MappingProxyType({})


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


def snapshot_of(trace: Trace) -> FoundSnapshot:
    """Return the memory snapshot of the process of a trace.

    It is that of the window of the trace or, as not each window has one, of the last window before it with one.

    Raises:
        TraceError, OSError: the trace is that of `empty_trace`, and its file cannot be read.
    """
    if trace.format == FORMAT:
        return FoundSnapshot(read_memory(trace.path))
    path = _recorded(trace.path)
    if path is None:
        return FoundSnapshot()
    try:
        return FoundSnapshot(read_memory(path))
    except (TraceError, OSError) as error:  # the trace can be diagnosed without
        return FoundSnapshot(None, {path: str(error)})


def _recorded(trace: Path) -> Path | None:
    """Return the snapshot that the run of a trace recorded on its rank until then; None if there is none."""
    own = entry_of(trace)
    if own is None:
        return None
    folder = trace.absolute().parent.parent
    found = None
    for entry in entries_of(folder):
        if all(entry.get(key) == own.get(key) for key in ("run", "rank")):
            names = list(existing(folder, snapshots_of(entry)))
            found = folder / names[-1] if names else found
        if entry == own:
            break
    return found
