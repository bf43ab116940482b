"""Finds the reports of a run by their names, and prints what they contain."""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..units import counted

_MAX_WINDOWS = 10  # that are read: nsys exports each to a database first


def matching(report: Path, suffix: str) -> list[Path]:
    """Return the files whose names begin like ``report`` and end with ``suffix``, in numeric order."""
    found = report.parent.glob(f"{glob.escape(report.name)}[!0-9]*")  # rank 1 is not rank 10
    found = (path for path in found if path.name.endswith(suffix))
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in _parts(path.name)])


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)  # text and numbers alternate, so that each is compared with its like


def show_traces(reports: Sequence[Path], console: Console) -> None:
    """Print the sum of the windows of one process, or the last window of each rank side by side."""
    # Not at the top: a program starts under the tool 0.2 s earlier.
    from ..console import print_line
    from ..report.trace_report import print_trace_set, print_windows
    from ..traces.read import read_file, read_traces
    from ..traces.trace_files import rank_from_name

    by_rank: dict[int | None, list[Path]] = defaultdict(list)
    for path in reports:
        by_rank[rank_from_name(path)].append(path)
    if len(by_rank) > 1:
        traces = read_traces([paths[-1] for paths in by_rank.values()])
        print_trace_set(traces, "auto", console=console)
        return
    read = [read_file(path) for path in reports[:_MAX_WINDOWS]]
    windows = [trace for trace in read if trace.regions or trace.gpu or trace.runtime]
    if not windows:
        print_line(console, f"Nothing was recorded in {', '.join(map(str, reports))}")
        return
    print_windows([(trace, None) for trace in windows], "auto", console=console)
    if len(reports) > _MAX_WINDOWS:
        more = counted(len(reports) - _MAX_WINDOWS, "more window")
        print_line(console, f"... and {more}: instrument summarize {reports[-1]}")
    processes = {trace.threads[thread].process for trace in windows for thread in trace.steps.thread.tolist()}
    if len(processes) > 1:
        print_line(console, f"The steps of {len(processes)} processes are in one report, and are added up.")
