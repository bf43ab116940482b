"""Chooses the snapshot to read: a file or, of the folder of a run, one of the newest window that has any."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...base.errors import TraceError
from ...base.run_folder import entries_of, last_snapshots
from ...base.units import listed
from ..jobs.trace_files import but_pickles, rank_from_name

_HOW = 'profile(memory="snapshot") or instrument run --memory snapshot records one'


class ChosenSnapshot(NamedTuple):
    """The snapshot to read.

    Attributes:
        path: the file.
        text: which one it is; empty if the caller named the file.
    """

    path: Path
    text: str


def chosen_snapshot(path: Path, rank: int | None = None) -> ChosenSnapshot:
    """Return the snapshot to read.

    Args:
        path: a file, or the folder of a run or of a window.
        rank: the rank, of several; None takes the lowest one. A file without a rank in its name is that of rank 0.

    Raises:
        ValueError: the rank has no snapshot there.
        TraceError: the folder has no memory snapshot.
    """
    if not path.is_dir():
        own = rank_from_name(path)
        if rank is not None and rank != (own or 0):
            accepted = (
                f"0 or left out, as the name of {path} has no rank"
                if own is None
                else f"{own}, as {path} is of this rank, or left out"
            )
            raise ValueError(f'"rank" must be {accepted}: {rank}')
        return ChosenSnapshot(path, "")
    files = {rank_from_name(file) or 0: file for file in last_snapshots(path)}
    if not files:
        reason, others = _last_reason(path), but_pickles(path)
        why = f" of a run{others}" if others and not reason else f": {reason or _HOW}"
        raise TraceError(path, f"the folder has no memory snapshot{why}")
    ranks = sorted(files)
    if rank is not None and rank not in files:
        raise ValueError(f'"rank" must be one of {listed(ranks)}, which have a snapshot in {path}: {rank}')
    found = files[ranks[0] if rank is None else rank]
    if rank is not None or len(ranks) == 1:
        return ChosenSnapshot(found, f"{found} is shown")
    return ChosenSnapshot(found, f"{found} is shown; --rank takes another one of ranks {listed(ranks)}")


def _last_reason(folder: Path) -> str | None:
    """Return why the last window of a run has no snapshot; None if it does not say so."""
    outcomes = [entry["memory"] for entry in entries_of(folder) if isinstance(entry.get("memory"), dict)]
    reason = outcomes[-1].get("reason") if outcomes else None
    return reason if isinstance(reason, str) else None
