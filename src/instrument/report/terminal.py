"""Prints a summary for a person at a terminal, or for the file that the output is piped to."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..traces.summary import RegionStat, Summary

_REGIONS = 30  # rows of a tree that a person still reads
_HIDDEN = 10  # names in one sentence
_OPERATORS = 10
_FILES = 10
_BAR = 8
_NAME = 12
_GAP = 2


def render(
    summary: Summary, *, files: Sequence[Path], folder: Path, hidden: Sequence[str] = (), console: Console
) -> None:
    """Print where the step went: regions, operators, then the files and how to open them.

    Times and calls are the mean of a step; of the whole trace where it marks no steps.

    Args:
        summary: What to print.
        files: The traces it was computed from; may be empty.
        folder: The folder that TensorBoard is to be pointed at.
        hidden: Regions that were not recorded because they are inside compiled code.
        console: Where to print. Its width decides how much of long names is left.
    """
    _line(console, _headline(summary), bold=True)
    if summary.regions:
        _print_regions(summary, console)
    else:
        _line(console, "No regions: name parts of the step with instrument.annotate to see them here.")
    if hidden:
        more = f" and {len(hidden) - _HIDDEN} more, see manifest.jsonl" if len(hidden) > _HIDDEN else ""
        _line(console, f"Not shown, since inside compiled code: {', '.join(hidden[:_HIDDEN])}{more}")
    if summary.operators:
        _print_operators(summary, console)
    if files:
        _print_files(files, folder, console)


def _headline(summary: Summary) -> str:
    steps = max(summary.steps, 1)
    time = _time(summary.step_ns / steps)
    if summary.gpu_total_ns is not None:
        time += f", GPU work {_time(summary.gpu_total_ns / steps)}"
    if not summary.steps:
        return f"Where the time went: {time} (no steps marked)"
    return f"Where the step went: {time} ({f'mean of {steps} steps' if steps > 1 else '1 step'})"


def _print_regions(summary: Summary, console: Console) -> None:
    steps, shown = max(summary.steps, 1), _largest(summary.regions)
    rows = []
    for region in _by_time(shown):
        cells = [_count(region.calls / steps), _time(region.cpu_ns / steps), _time(region.self_ns / steps)]
        cells += _shares(summary, region.cpu_ns, region.gpu_ns)
        rows.append((2 * len(region.path) - 2, region.path[-1], cells))
    if summary.gpu_unattributed_ns:
        rows.append((0, "(in no region)", ["", "", "", *_shares(summary, None, summary.gpu_unattributed_ns)]))
    _print_table(["region", "calls", "CPU", "CPU self", *_share_columns(summary)], rows, console)
    if hidden := len(summary.regions) - len(shown):
        _line(console, f"... and {hidden} smaller region{'s' * (hidden > 1)}")


def _print_operators(summary: Summary, console: Console) -> None:
    steps = max(summary.steps, 1)
    rows = []
    for operator in summary.operators[:_OPERATORS]:
        cells = [_count(operator.calls / steps), _time(operator.self_ns / steps)]
        cells += _shares(summary, operator.self_ns, operator.gpu_ns)
        rows.append((0, operator.name, cells))
    _line(console, "")
    _print_table(["operator", "calls", "CPU self", *_share_columns(summary)], rows, console)
    if hidden := len(summary.operators) - len(rows):
        _line(console, f"... and {hidden} more operator{'s' * (hidden > 1)}")


def _share_columns(summary: Summary) -> list[str]:
    return ["% step", ""] if summary.gpu_total_ns is None else ["% step", "GPU", "% GPU"]


def _shares(summary: Summary, cpu_ns: int | None, gpu_ns: int | None) -> list[str]:
    """The share of the step, then the GPU time and its share or, without a GPU, a bar."""
    share = "" if cpu_ns is None else _percent(cpu_ns, summary.step_ns)
    if gpu_ns is None:
        return [share, _bar(cpu_ns or 0, summary.step_ns)]
    return [share, _time(gpu_ns / max(summary.steps, 1)), _percent(gpu_ns, summary.gpu_total_ns)]


def _print_files(files: Sequence[Path], folder: Path, console: Console) -> None:
    _line(console, "")
    _line(console, "Files", bold=True)
    for path in files[:_FILES]:
        _line(console, f"  {path}")
    if len(files) > _FILES:
        _line(console, f"  ... and {len(files) - _FILES} more in {folder}")
    _line(console, "Open one with")
    _line(console, '  Perfetto     https://ui.perfetto.dev, "Open trace file"')
    _line(console, "  Chrome       chrome://tracing, Load")
    _line(console, f"  TensorBoard  tensorboard --logdir {shlex.quote(str(folder))}")
    _line(console, "               (pip install torch-tb-profiler)")


def _largest(regions: Sequence[RegionStat]) -> list[RegionStat]:
    """The regions that took the most time on either side, and those around them."""
    ranked = sorted(regions, key=lambda region: max(region.cpu_ns, region.gpu_ns or 0), reverse=True)
    kept = {region.path[:depth] for region in ranked[:_REGIONS] for depth in range(len(region.path) + 1)}
    return [region for region in regions if region.path in kept]


def _by_time(regions: Iterable[RegionStat]) -> Iterator[RegionStat]:
    """The tree depth first, the largest of each parent's children first."""
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


def _print_table(columns: list[str], rows: list[tuple[int, str, list[str]]], console: Console) -> None:
    """A table whose first column, indented names, takes no more than the width that the numbers leave."""
    by_column = zip(columns[1:], *(cells for *_, cells in rows), strict=True)
    numbers = sum(max(map(cell_len, column)) + _GAP for column in by_column)
    room = max(console.width - numbers, _NAME)
    dots = "..." if console.options.ascii_only else "…"
    names = [" " * min(indent, room // 2) + name for indent, name, _ in rows]
    names = [_cut(name, room, dots) for name in names]
    # With its width given, rich leaves the numbers whole where the terminal is too narrow for them.
    width = max(map(cell_len, [columns[0], *names])) + numbers
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), width=width)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="right" if index and column else "left")
    for name, (_, _, cells) in zip(names, rows, strict=True):
        table.add_row(Text(name), *map(Text, cells))
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def _line(console: Console, text: str, *, bold: bool = False) -> None:
    """Print text as it is: no markup, no colours of rich's choice, paths in one piece."""
    console.print(Text(text, style="bold" if bold else ""), soft_wrap=True)


def _cut(name: str, width: int, dots: str) -> str:
    """The name on one line, without its middle where it is too long: both ends tell more."""
    name = "".join(char if char.isprintable() else " " for char in name)
    if cell_len(name) <= width:
        return name
    room = width - len(dots)
    head, tail = set_cell_size(name, room - room // 3), set_cell_size(name[::-1], room // 3)[::-1]
    return head + dots + tail


def _time(ns: float) -> str:
    """Three digits and the unit that suits: ``1.20 ms``."""
    if not ns:
        return "0"
    for limit, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if ns < limit * 0.9995:
            return _digits(ns * 1e3 / limit, unit)
    return _digits(ns / 1e9, "s")


def _digits(value: float, unit: str) -> str:
    if unit == "ns" or value >= 99.95:
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}" if value >= 9.995 else f"{value:.2f} {unit}"


def _count(calls: float) -> str:
    return f"{calls:,.0f}" if calls == int(calls) else f"{calls:,.1f}"


def _percent(part: int, whole: int | None) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _bar(part: int, whole: int) -> str:
    return "#" * round(_BAR * min(part / whole, 1)) if whole else ""
