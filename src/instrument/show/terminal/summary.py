"""Prints the summary of a trace: its steps, regions, operators and files; `RunSummary`, that of a whole run."""

from __future__ import annotations

import codecs
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ...base.numbered_names import joined_paths
from ...base.run_folder import how_to_show_snapshots
from ...base.units import count, counted, duration, percent
from ...read.kineto.salvage import OTHER_TYPES
from ...read.measures.summary import OperatorStat, RegionStat, Summary
from ...read.tables.trace import ReadLosses, UnreadDevice
from ..text.lines import line
from .console import Block, Table, heading, more, new_console, show
from .steps import describe_steps, headline

if TYPE_CHECKING:  # importing it takes a tenth of a second, at the end of every run
    from ...explain.diagnosis.diagnose import Diagnosis

_Path = tuple[str, ...]


def join_numbered(regions: Sequence[RegionStat]) -> tuple[RegionStat, ...]:
    """Return the regions with one row for more than eight beside each other that differ only in numbers.

    The row is named "layer_*" and holds their sums, and so do the rows of the regions inside them.

    Args:
        regions: A tree, each region after the one around it.
    """
    joined = joined_paths(region.path for region in regions)
    rows: dict[_Path, RegionStat] = {}
    for region in regions:
        path = joined[region.path]
        rows[path] = _sum(path, rows.get(path), region)
    return tuple(rows.values())


def _sum(path: _Path, row: RegionStat | None, region: RegionStat) -> RegionStat:
    if row is None:
        return replace(region, path=path)
    return RegionStat(
        path,
        row.calls + region.calls,
        row.cpu_ns + region.cpu_ns,
        row.self_ns + region.self_ns,
        None if row.gpu_ns is None else row.gpu_ns + (region.gpu_ns or 0),
        row.in_steps | region.in_steps,
        row.partial or region.partial,
    )


_WIDTH = 100  # columns, without a terminal
_MAX_REGIONS = 30  # rows
_MAX_HIDDEN = 10  # names
MAX_OPERATORS = 10
_MAX_FILES = 10
_MAX_UNRECORDED = 3  # names
_BAR = 8
_LAYERS = (
    " To see the layers of a model, pass modules=model to instrument.steps or instrument.profile, or start the "
    'program with "instrument run".'
)
_NO_REGIONS = f"No regions: name parts of the step with instrument.annotate to see them here.{_LAYERS}"


def print_summary(
    summary: Summary,
    *,
    files: Sequence[Path],
    folder: Path,
    removed_files: int = 0,
    ranks: Sequence[str] = (),
    hidden: Sequence[str] = (),
    expand: bool = False,
    below_verdict: bool = False,
    console: Console,
) -> None:
    """Print the steps, regions and operators, then the files and how to open them.

    Times and calls are means over all steps; a column "steps" says of rows that are not in every step in how many
    they are: "2 of 3". Without marked steps, all rows show totals over the trace.

    Args:
        summary: What to print.
        files: The traces that the summary was computed from; may be empty.
        folder: The folder to open in TensorBoard.
        removed_files: How many traces it was computed from that are no longer there.
        ranks: Sentences on the ranks of the job.
        hidden: Regions that were not recorded because they are inside compiled code.
        expand: Print regions that differ only in the numbers in their names as one row each.
        below_verdict: Whether a verdict above says what bounds the step, and how long it is.
        console: Where to print. Long names are cut to its width.
    """
    regions = summary.regions if expand else join_numbered(summary.regions)
    show(console, [line(headline(summary), "bold"), *describe_steps(summary, below_verdict=below_verdict), *ranks])
    show(console, _regions(replace(summary, regions=regions)) if regions else [_NO_REGIONS])
    if joined := len(summary.regions) - len(regions):
        others = counted(joined, "more region")
        show(console, [f'"*" stands for numbers: instrument summarize --expand shows {others}.'])
    if hidden:
        others = f" and {len(hidden) - _MAX_HIDDEN} more, see manifest.jsonl" if len(hidden) > _MAX_HIDDEN else ""
        names = ", ".join(hidden[:_MAX_HIDDEN])
        show(console, [line(f"Not shown, because they are inside compiled code: {names}{others}")])
    if summary.operators:
        show(console, _operators(summary))
    if files:
        print_files(files, folder, removed=removed_files, console=console)


def summary_text(summary: Summary, *, files: Sequence[Path], folder: Path) -> str:
    """Return what `print_summary` prints without a terminal."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None)
    print_summary(summary, files=files, folder=folder, console=console)
    return text.getvalue()


def losses(lost: ReadLosses) -> Iterator[Block]:
    """Yield what no table holds, and what could not be read of the file or was repaired."""
    if lost.left_out:
        yield line()
        yield f"Left out: {', '.join(f'{n:,} {what}' for what, n in lost.left_out.items())}."
    if not lost:
        return
    parts = "; ".join(reason + f" ({times:,} times)" * (times > 1) for reason, times in lost.reasons.items())
    yield line()
    if lost.reasons.keys() == {OTHER_TYPES}:
        yield line(f"The file differs from what torch.profiler writes, but all of it was read: {parts}")
        return
    yield line(f"The file is damaged: {parts}")
    events = f"{lost.events:,} ({lost.bytes:,} bytes)"
    yield line(f"Events known to be lost: {events}; repaired: {lost.repaired:,}")


def unread(devices: Mapping[str, UnreadDevice]) -> Iterator[Block]:
    """Yield whose events are in no table, because this library does not know their categories."""
    if devices:
        yield line()
    for name, left in devices.items():
        work = f"{counted(left.events, 'event')} of {name}, {duration(left.busy_ns)}"
        yield f"Left out: {work}, as their categories are unknown."


def _regions(summary: Summary) -> Iterator[Block]:
    shown = largest_regions(summary.regions)
    steps, ordered = _steps_column(summary, shown), list(_sort_by_time(shown))
    rows = [
        [
            region.path[-1] + " (partial)" * region.partial,
            *_means(summary, region, steps, region.cpu_ns, region.self_ns),
            *_shares(summary, region.cpu_ns, region.gpu_ns),
        ]
        for region in ordered
    ]
    indents = [2 * len(region.path) - 2 for region in ordered]
    in_no_region = summary.no_region_ns * 2000 >= summary.step_ns > 0  # the table would show more than 0.0 %
    if in_no_region or summary.gpu_unattributed_ns:
        cpu = duration(summary.no_region_ns / max(summary.steps, 1))
        shares = _shares(summary, summary.no_region_ns, summary.gpu_unattributed_ns)
        rows.append(["(in no region)", "", *[""] * len(steps), cpu, "", *shares])
        indents.append(0)
    yield Table(["region", "calls", *steps, "CPU", "CPU self", *_share_columns(summary)], rows, indents)
    yield from more(len(summary.regions) - len(shown), "smaller region")
    yield from _notes(summary, shown)


def _notes(summary: Summary, shown: Sequence[RegionStat]) -> Iterator[str]:
    """Yield explanations of what is unusual in the table of regions."""
    if summary.steps and (summary.outside_ns * 100 > summary.step_ns > 0 or summary.outside_gpu_ns):
        gpu = f", and {duration(summary.outside_gpu_ns)} of GPU work" if summary.gpu_total_ns is not None else ""
        yield f"Outside the steps: {duration(summary.outside_ns)} in all{gpu}."
    example = next((region for region in shown if _occurs_in_some_steps(summary, region)), None)
    if example is not None:
        part = _step_count(summary, example)
        in_words = part.replace("of", "of the")
        yield f'"{part}": the region ran in {in_words} steps. All figures are means over all steps.'
    if summary.steps and 2 * summary.no_region_ns > summary.step_ns:
        has_layers = any(region.path[-1].endswith("(backward)") for region in summary.regions)
        how = "" if has_layers else _LAYERS
        yield f"Most of the step is in no region: name parts of it with instrument.annotate.{how}"
    if any(region.partial for region in shown):
        yield (
            "(partial): some calls are missing, because their forward ran before the modules had hooks; "
            "a longer warm-up or a later window includes them."
        )
    if summary.overlap_ns * 100 > summary.step_ns > 0:
        yield (
            "Regions of one thread overlap, as the regions of asyncio tasks do: every open region counts, so "
            "shares may add up to more than 100 %."
        )
    elif summary.parallel_ns * 100 > summary.step_ns > 0:
        yield (
            "Regions of several threads run at the same time: every open region counts, so shares may add up to "
            "more than 100 %."
        )
    if summary.unrecorded:
        names = sorted(summary.unrecorded, key=summary.unrecorded.__getitem__, reverse=True)
        others = f", and {len(names) - _MAX_UNRECORDED} more" if len(names) > _MAX_UNRECORDED else ""
        yield (
            f"Not in the trace: {counted(sum(summary.unrecorded.values()), 'call')} of regions on threads that "
            f"torch.profiler does not record ({', '.join(names[:_MAX_UNRECORDED])}{others})."
        )
    if summary.unplaced:
        yield (
            f"Not in the region of their backward pass: {counted(summary.unplaced, 'call')} on autograd's "
            "threads, because several threads had a region open and may have started the pass."
        )


def _operators(summary: Summary) -> Iterator[Block]:
    whole_ns, gpu_ns = summary.step_ns or 1, summary.gpu_total_ns or 1
    ranked = sorted(
        summary.operators, key=lambda item: max(item.self_ns / whole_ns, (item.gpu_ns or 0) / gpu_ns), reverse=True
    )
    shown = ranked[:MAX_OPERATORS]
    steps = _steps_column(summary, shown)
    rows = [
        [each.name, *_means(summary, each, steps, each.self_ns), *_shares(summary, each.self_ns, each.gpu_ns)]
        for each in shown
    ]
    nowhere_ns = (summary.gpu_total_ns or 0) - sum(operator.gpu_ns or 0 for operator in summary.operators)
    if nowhere_ns:
        rows.append(["(in no operator)", "", *[""] * len(steps), "", *_shares(summary, None, nowhere_ns)])
    yield line()
    yield Table(["operator", "calls", *steps, "CPU self", *_share_columns(summary)], rows)
    yield from more(len(ranked) - MAX_OPERATORS, "more operator")


def _occurs_in_some_steps(summary: Summary, row: RegionStat | OperatorStat) -> bool:
    return 0 < row.steps < summary.steps


def _steps_column(summary: Summary, rows: Sequence[RegionStat | OperatorStat]) -> list[str]:
    """Return the heading of the column with the steps that have the row, if some step lacks one of ``rows``."""
    return ["steps"] * any(_occurs_in_some_steps(summary, row) for row in rows)


def _step_count(summary: Summary, row: RegionStat | OperatorStat) -> str:
    return f"{count(row.steps)} of {count(summary.steps)}"


def _means(summary: Summary, row: RegionStat | OperatorStat, steps_column: list[str], *times_ns: int) -> list[str]:
    whole = max(summary.steps, 1)
    some = _step_count(summary, row) if _occurs_in_some_steps(summary, row) else ""
    return [count(row.calls / whole), *[some] * len(steps_column), *(duration(ns / whole) for ns in times_ns)]


def _share_columns(summary: Summary) -> list[str]:
    share = "% step" if summary.steps else "% time"
    return [share, ""] if summary.gpu_total_ns is None else [share, "GPU", "% GPU"]


def _shares(summary: Summary, cpu_ns: int | None, gpu_ns: int | None) -> list[str]:
    """Return the share of the step, then the GPU time and its share or, without a GPU, a bar."""
    share = "" if cpu_ns is None else percent(cpu_ns, summary.step_ns)
    if summary.gpu_total_ns is None:
        return [share, "#" * round(_BAR * min((cpu_ns or 0) / summary.step_ns, 1)) if summary.step_ns else ""]
    return [share, duration((gpu_ns or 0) / max(summary.steps, 1)), percent(gpu_ns or 0, summary.gpu_total_ns)]


def print_files(files: Sequence[Path], folder: Path, *, removed: int = 0, console: Console) -> None:
    """Print files and how to open them.

    Args:
        files: The files.
        folder: The folder to open in TensorBoard.
        removed: How many more there were, which were removed.
        console: Where to print.
    """
    shown = list(map(str, files[:_MAX_FILES]))
    if len(files) > _MAX_FILES:
        shown.append(f"... and {len(files) - _MAX_FILES} more in {folder}")
    if removed:
        were = "which was removed" if removed == 1 else "which were removed"
        shown.append(f"... and {counted(removed, 'more file')}, {were}")
    how = (
        "Open one with",
        '  Perfetto     https://ui.perfetto.dev, "Open trace file"',
        "  Chrome       chrome://tracing, Load",
        f"  TensorBoard  tensorboard --logdir {shlex.quote(str(folder))}",
        "               (pip install torch-tb-profiler)",
    )
    show(console, [*heading("Files"), *(line(f"  {each}") for each in shown), *map(line, how)])


def largest_regions(regions: Sequence[RegionStat]) -> list[RegionStat]:
    """Return the regions that took the most time on the CPU or the GPU, and the regions around them."""
    ranked = sorted(regions, key=lambda region: max(region.cpu_ns, region.gpu_ns or 0), reverse=True)
    kept = {region.path[:depth] for region in ranked[:_MAX_REGIONS] for depth in range(len(region.path) + 1)}
    return [region for region in regions if region.path in kept]


def _sort_by_time(regions: Iterable[RegionStat]) -> Iterator[RegionStat]:
    """Yield the tree depth first, the largest child of each parent first."""
    children: dict[tuple[str, ...], list[RegionStat]] = {}
    for region in regions:
        children.setdefault(region.path[:-1], []).append(region)
    for siblings in children.values():
        siblings.sort(key=lambda region: (region.gpu_ns or 0, region.cpu_ns))
    open_ = children.get((), [])
    while open_:
        region = open_.pop()
        yield region
        open_.extend(children.get(region.path, []))


_FIELDS = (
    "steps", "step_ns", "step_numbers", "step_times_ns", "no_region_ns", "outside_ns", "gpu_total_ns",
)  # fmt: skip
_REGION_FIELDS = ("path", "calls", "steps", "cpu_ns", "self_ns", "gpu_ns")


@dataclass(frozen=True)
class RunSummary:
    """The summary of the windows of a run.

    Attributes:
        summary: The summary.
        windows: The number of windows.
        phase: The phase of the program that these are windows of; empty for training steps.
        files: The traces that it was computed from.
        folder: The folder of the run.
        removed_files: How many traces it was computed from that are no longer there.
        snapshots: The memory snapshots of the run.
        ranks: Sentences on the ranks of the job.
        hidden: Regions that were not recorded because they are inside compiled code.
        worst_steps: The slow steps that a black box found with the largest delays, in words.
        diagnosis: The diagnosis of the last window; None for none.
    """

    summary: Summary
    windows: int
    phase: str
    files: Sequence[Path]
    folder: Path
    removed_files: int
    snapshots: Sequence[Path]
    ranks: Sequence[str]
    hidden: Sequence[str]
    worst_steps: Sequence[str]
    diagnosis: Diagnosis | None

    def as_text(self, terminal: Mapping[str, Any]) -> str:
        """Return it as text.

        Args:
            terminal: ``columns``, ``colors`` and ``encoding`` of the terminal; None for unknown ones.
        """
        encoding = _supported_encoding(terminal["encoding"])
        file = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", newline="")
        console = new_console(file=file, force_terminal=terminal["colors"], width=terminal["columns"])
        if self.phase:
            windows = counted(self.windows, "window")
            text = f"{self.phase}: {windows} in {self.folder}; a step is one block of this phase"
            show(console, [line(text, "bold")])
        print_summary(
            self.summary,
            files=self.files,
            folder=self.folder,
            removed_files=self.removed_files,
            ranks=self.ranks,
            hidden=self.hidden,
            console=console,
        )
        if self.snapshots:
            show(console, [line(how_to_show_snapshots(len(self.snapshots), self.folder))])
        if self.worst_steps:
            title = heading("The slowest steps (the first 32 are not judged)")
            show(console, [*title, *(line(f"  {step}") for step in self.worst_steps)])
        if self.diagnosis is not None:
            show(console, heading("What is slow in the last window"))
            console.print(self.diagnosis, soft_wrap=True)
        file.flush()
        file.seek(0)
        return file.read()

    def as_fields(self) -> dict[str, Any]:
        """Return it as JSON values; times are sums over the steps."""
        summary = self.summary
        return {
            "phase": self.phase,
            "windows": self.windows,
            "folder": str(self.folder),
            "files": [str(path) for path in self.files],
            "removed_files": self.removed_files,
            "memory_snapshots": [str(path) for path in self.snapshots],
            **{name: getattr(summary, name) for name in _FIELDS},
            "regions": [
                {name: getattr(region, name) for name in _REGION_FIELDS}
                for region in largest_regions(summary.regions)
            ],
            "operators": [vars(operator) for operator in summary.operators[:MAX_OPERATORS]],
            "ranks": list(self.ranks),
            "hidden_regions": list(self.hidden),
            "slowest_steps": list(self.worst_steps),
            "diagnosis": self.diagnosis and self.diagnosis.verdict,
        }


def _supported_encoding(encoding: str) -> str:
    with suppress(LookupError):
        return codecs.lookup(encoding).name
    return "utf-8"
