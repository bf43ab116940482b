"""`summarize`: where the time of the recorded steps went; and the windows of a recorded run that it adds up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import TimeSumsError
from ...base.printable import printable, shell_line
from ...base.run_folder import Phase, entry_of, last_window, phase_of, phases_beside, traces_in, training_of
from ...base.units import count, counted, duration, percent, steps_text
from ...read.jobs.ranks import TraceSet
from ...read.jobs.read import read_any, read_file
from ...read.measures.region_steps import with_steps
from ...read.measures.summary import Summary, merge
from ...read.measures.summary import summarize as summarize_trace
from ...read.measures.timing import Timing
from ...read.tables.table import PIP
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, compile_collectives
from ..text.lines import line
from .console import Block, Table, more
from .summary import summary_text

_SUMS = 30  # rows shown


@dataclass(frozen=True)
class RecordedRun:
    """The windows of one rank in the last run in a folder.

    Attributes:
        folder: the folder.
        rank: the rank.
        windows: the trace of each window with its line of the manifest, in order: of steps, or of one phase.
        others: the same of what else the rank recorded in that run: of its phases, or of the training.
    """

    folder: Path
    rank: int
    windows: list[tuple[Path, Mapping[str, Any]]]
    others: list[tuple[Path, Mapping[str, Any]]]

    @property
    def hidden(self) -> list[str]:
        """Regions that were not recorded because they are inside compiled code."""
        names = self.windows[-1][1].get("hidden_regions")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def title(self) -> str:
        """A title for the windows."""
        entries = [entry for _, entry in self.windows]
        number, phase = len({entry.get("window") for entry in entries}), phase_of(entries[-1])
        windows = f"the {f'{number} windows' if number > 1 else 'window'}{f' of {phase}' if phase else ''}"
        return f"{windows} of the last run in {self.folder}"

    @property
    def phases(self) -> list[Phase]:
        """The phases that were recorded beside the windows."""
        return phases_beside(self.folder, self.windows[-1][1])


def find_recorded_run(path: str, traces: TraceSet, rank: int | None = None) -> RecordedRun | None:
    """Return the windows of a rank's run, by default the lowest's; None if ``path`` is not the folder of a run.

    Traces of that rank's other runs are added to `TraceSet.left_out`.
    """
    rank = next(iter(traces)) if rank is None else rank
    trace = traces[rank]
    files = dict(traces_in(Path(path)))
    own = files.get(trace.path)
    if own is None:
        return None
    run = RecordedRun(Path(path), rank, [], [])
    for file, entry in files.items():
        if training_of(entry) == training_of(own):
            (run.windows if phase_of(entry) == phase_of(own) else run.others).append((file, entry))
            traces.left_out.pop(file, None)
        elif entry.get("rank") == own.get("rank"):
            traces.left_out[file] = f"rank {rank}, {_steps(entry)}, another run"
    return run


def phase_table(run: RecordedRun) -> Iterator[Block]:
    """Yield the phases that were recorded beside the windows of a run, each with the command that shows it."""
    if run.phases:
        show = ["instrument", "summarize", str(run.folder), "--phase"]
        rows = [
            [
                phase.name,
                count(phase.blocks),
                "-" if phase.median_ns is None else duration(phase.median_ns),
                shell_line([*show, phase.name]),
            ]
            for phase in run.phases
        ]
        yield line()
        yield Table(["phase, beside the steps above", "blocks", "median", "shown by"], rows)


def time_sums(error: TimeSumsError) -> Iterator[Block]:
    """Yield what a profile without a timeline has: the GPU time of each kernel or layer."""
    yield f"{printable(str(error.path))}: {error.reason}."
    whole = sum(each.time_ns for each in error.sums)
    shown = error.sums[:_SUMS]
    rows = [[each.name, count(each.calls), duration(each.time_ns), percent(each.time_ns, whole)] for each in shown]
    yield line()
    yield Table(["name", "calls", "GPU", "% GPU"], rows)
    yield from more(len(error.sums) - _SUMS, "more name")


def _steps(entry: Mapping[str, Any]) -> str:
    steps = entry["steps"]
    return steps_text(*steps) if isinstance(steps, list) and len(steps) == 2 else "steps"


_COLUMNS = {
    "regions": ("calls", "cpu_ns", "self_ns", "gpu_ns", "steps"),
    "operators": ("calls", "self_ns", "gpu_ns", "steps"),
}


class TraceSummary(Summary):
    """Where the time of the recorded steps went; print it, or read the attributes of `Summary`."""

    def to_pandas(self) -> dict[str, Any]:
        """Return "regions" and "operators" as ``pandas.DataFrame``, with a row for each.

        The index has the names of a region and of those around it as "outer > inner", or the name of the operator.
        The columns are the attributes of `RegionStat` and `OperatorStat`: sums over all steps, in ns.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"data frames need pandas: {PIP}") from error
        frames = {}
        for kind, columns in _COLUMNS.items():
            rows = getattr(self, kind)
            names = [" > ".join(row.path) if kind == "regions" else row.name for row in rows]
            values = {column: [getattr(row, column) for row in rows] for column in columns}
            frames[kind] = pandas.DataFrame(values, index=pandas.Index(names, name=kind[:-1]))
        return frames

    def __str__(self) -> str:
        return summary_text(self, files=[], folder=Path()).rstrip("\n")

    def __repr__(self) -> str:
        rows = f"{counted(len(self.regions), 'region')}, {counted(len(self.operators), 'operator')}"
        mean = f", {duration(self.step_ns / self.steps)} each" if self.steps else ""
        return f"<summary of {counted(self.steps, 'step')}{mean}: {rows}>"


def summarize(
    trace: Trace | TraceSet | str | os.PathLike[str],
    *,
    collectives: Collectives = "auto",
    steps_from: str | None = None,
    rank: int | None = None,
    phase: str | None = None,
) -> TraceSummary:
    """Return where the time of the recorded steps went, by region and by operator.

    Args:
        trace: a trace, the traces of the ranks of a job, or a path, as of the command; of the folder of a run, all
            windows of the last run are added up: those of its steps, if it recorded any, else of its last phase.
        collectives: which kernels communicate, as in `instrument.metrics`.
        steps_from: a regular expression for the names of the regions that are the steps, as in
            `instrument.diagnose`.
        rank: the rank, of several; by default the lowest.
        phase: the phase of the run, such as "eval", whose blocks are the steps.

    Raises:
        TypeError: ``trace`` is none of these.
        ValueError: ``rank`` has no trace; or no region has such a name; or the run has no such phase.
        TraceError, OSError: a file cannot be read.
    """
    if not isinstance(trace, (Trace, TraceSet, str, os.PathLike)):
        raise TypeError(f'"trace" must be a trace, the traces of several ranks or a path: {trace!r:.200}')
    pattern = compile_collectives(collectives)
    read = trace if isinstance(trace, (Trace, TraceSet)) else read_any(last_window(os.fspath(trace), phase=phase))
    one = _of_rank(read, rank)
    files = [one.path]
    if isinstance(read, TraceSet) and not isinstance(trace, (Trace, TraceSet)):
        run = find_recorded_run(os.fspath(trace), read, rank)
        files = [file for file, _ in run.windows] if run else files
    windows = (one if file == one.path else read_file(file) for file in files)
    summaries = [
        summarize_trace(with_steps(each, steps_from), Timing.from_manifest(entry_of(each.path)), pattern)
        for each in windows
    ]
    return TraceSummary(**vars(merge(summaries) if len(summaries) > 1 else summaries[0]))


def _of_rank(read: Trace | TraceSet, rank: int | None) -> Trace:
    ranks = read.ranks if isinstance(read, TraceSet) else [read.rank or 0]
    if rank is not None and rank not in ranks:
        raise ValueError(f'"rank" must be one of {", ".join(map(str, ranks))}: {rank!r}')
    return read if isinstance(read, Trace) else read[ranks[0] if rank is None else rank]
