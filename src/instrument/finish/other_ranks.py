"""In the finishing process, exchanges the times of a window with other ranks, through its folder.

Each rank leaves a small file beside its trace, and the rank that prints the summary looks for those of the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..base.files import part_file
from ..explain.metrics.collectives import RankTimes, format_rank_times, merge_rank_times, parse_rank_times
from ..read.tables.trace import Trace

_POLL_S = 0.2
_SKEW_NS = 2_000_000_000  # between clocks of machines; two runs of a program are further apart
_MAX_WINDOWS = 10  # in a summary: the last ones
_NAME = re.compile(r"rank(\d+)(?:-pid\d+)?\.\d+\.times\.jsonl")


def write_times(trace: Trace, raw: Path, rank: int) -> Path:
    """Write the times of this rank beside its trace, and return the path.

    Args:
        trace: the trace of the window.
        raw: its file.
        rank: this rank.

    Raises:
        OSError: the file cannot be written.
    """
    path = raw.with_name(f"{raw.name.partition('.pt.trace')[0]}.times.jsonl")
    with part_file(path) as part:
        part.write_text(format_rank_times(trace, rank), "utf-8")
        part.replace(path)
    return path


def gather_times(
    windows: Sequence[tuple[Path, Sequence[int]]], deadline: float
) -> tuple[dict[int, RankTimes], list[int]]:
    """Return the times of each rank over the last windows, and the ranks without a file.

    Args:
        windows: the file of this rank for each window, and the ranks that record the window.
        deadline: how long to wait for files, on the clock of `time.monotonic`; a window in which this rank had no
            collectives waits for none.
    """
    by_rank: dict[int, list[RankTimes]] = {}
    expected = set[int]()
    for path, ranks in windows[-_MAX_WINDOWS:]:
        own = _read(path)
        if own is None or not any(len(each.step) for each in own.collectives.values()):
            continue
        window = {own.rank: own}
        window |= _others(path, own, set(ranks) - window.keys())
        while not window.keys() >= set(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            window |= _others(path, own, set(ranks) - window.keys())
        for rank, times in window.items():
            by_rank.setdefault(rank, []).append(times)
        expected.update(ranks)
    merged = {rank: merge_rank_times(windows) for rank, windows in sorted(by_rank.items())}
    return merged, sorted(expected - merged.keys())


def _others(path: Path, own: RankTimes, ranks: set[int]) -> dict[int, RankTimes]:
    """Return the times of ``ranks`` in the window of ``own``, as far as their files are there."""
    times_of = {}
    for other in path.parent.iterdir():
        named = _NAME.fullmatch(other.name)
        if named is None or int(named[1]) not in ranks:
            continue
        times = _read(other)
        if times is not None and times.steps.keys() == own.steps.keys() and _meet(times, own):
            times_of[int(named[1])] = times
    return times_of


def _meet(one: RankTimes, other: RankTimes) -> bool:
    """Return whether two windows overlap, which those of another run into the same folder do not."""
    return one.start_ns <= other.end_ns + _SKEW_NS and other.start_ns <= one.end_ns + _SKEW_NS


def _read(path: Path) -> RankTimes | None:
    """Return the content of a file; None if it is damaged, or was removed."""
    with suppress(OSError, ValueError):
        return parse_rank_times(path.read_text("utf-8"))
    return None
