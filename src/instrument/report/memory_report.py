"""Prints what the memory of a GPU was at its peak, and two peaks side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from ..console import print_line, print_table, print_wrapped
from ..memory.breakdown import Breakdown
from ..memory.categories import CATEGORIES, EVIDENCE
from ..memory.comparison import compare_peaks
from ..memory.snapshot import MemorySnapshot
from ..units import count, counted, percent, size

_ROWS = 15  # of a table


def print_memory(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    """Print the peak of a GPU by category, line, module and region, and the state of its allocator."""
    found = snapshot.break_down(device)
    print_line(
        console, f"GPU {device} of {snapshot.path.name}: {size(found.peak.bytes)} in use at the peak", bold=True
    )
    print_wrapped(console, _age_text(snapshot, found))
    unused = size(found.cached_bytes)
    print_wrapped(console, f"{size(found.reserved_bytes)} was reserved then, of which {unused} was not in use.")
    print_wrapped(console, _known_text(found))
    _print_categories(found, console)
    _print_lines(found, console)
    _print_evidence(found, console)
    modules = {" > ".join(map(str, calls)): number for calls, number in found.by_module().items()}
    _print_places(found, "calls of modules", modules, console)
    _print_places(found, "region", found.by_region(), console)
    _print_growth(snapshot, device, console)
    _print_state(snapshot, device, console)


def _age_text(snapshot: MemorySnapshot, found: Breakdown) -> str:
    events = counted(int((snapshot.events.device == found.peak.device).sum()), "recorded event")
    older = found.peak.before_bytes
    if not older:
        return f"{events}; nothing at the peak is older than these."
    return f"{events}; {_part(older, found)} of the peak is older than these."


def _known_text(found: Breakdown) -> str:
    return (
        f"The line is known for {_part(found.known_bytes, found)}, and the use inferred for "
        f"{_part(found.inferred_bytes, found)}; nothing is known of {_part(found.unknown_bytes, found)}."
    )


def _part(part: int, found: Breakdown) -> str:
    return f"{size(part)} ({percent(part, found.peak.bytes)} %)"


def _print_categories(found: Breakdown, console: Console) -> None:
    rows = [
        (
            0,
            name.replace("_", " "),
            [size(known + other), percent(known + other, found.peak.bytes), size(known), size(other)],
        )
        for name, (known, other) in found.by_category().items()
        if known + other
    ]
    console.print()
    print_table(["category", "bytes", "% peak", "with a line", "without"], rows, console)


def _print_lines(found: Breakdown, console: Console) -> None:
    rows = [
        (
            0,
            f"{place} {place.function}",
            [category.replace("_", " "), size(number), percent(number, found.peak.bytes), count(blocks)],
        )
        for (place, category), (number, blocks) in found.by_line().items()
    ]
    _print_rows(["known: line", "category", "bytes", "% peak", "blocks"], rows, console)


def _print_evidence(found: Breakdown, console: Console) -> None:
    inferred = found.by_evidence()
    rows = [
        (
            0,
            f"{category.replace('_', ' ')} ({evidence})",
            [size(number), percent(number, found.peak.bytes), count(blocks)],
        )
        for (category, evidence), (number, blocks) in inferred.items()
    ]
    _print_rows(["inferred: category (evidence)", "bytes", "% peak", "blocks"], rows, console)
    for evidence in dict.fromkeys(evidence for _, evidence in inferred):
        print_wrapped(console, f"{evidence}: {EVIDENCE[evidence]}.")


def _print_places(found: Breakdown, heading: str, places: Mapping[str, tuple[int, int]], console: Console) -> None:
    rows = [
        (0, name, [size(number), percent(number, found.peak.bytes), count(blocks)])
        for name, (number, blocks) in places.items()
    ]
    _print_rows([heading, "bytes", "% peak", "blocks"], rows, console)


def _print_rows(columns: list[str], rows: list[tuple[int, str, list[str]]], console: Console) -> None:
    """Print the first rows of a table; nothing without rows."""
    if not rows:
        return
    console.print()
    print_table(columns, rows[:_ROWS], console)
    if len(rows) > _ROWS:
        print_line(console, f"... and {counted(len(rows) - _ROWS, 'row')} more: --json has all")


def _print_growth(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    rows = [
        (0, f"{place} {place.function}", [count(growth.steps), size(growth.bytes), count(growth.blocks)])
        for place, growth in snapshot.growth(device)
    ]
    _print_rows(["kept from several steps: line", "steps", "bytes", "blocks"], rows, console)


def _print_state(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    state = snapshot.state(device)
    print_line(console, "When the snapshot was taken", bold=True, space=True)
    print_wrapped(
        console,
        f"{size(state.reserved_bytes)} reserved and {size(state.used_bytes)} in use. The largest piece of the "
        f"{size(state.unused_bytes)} that are free is {size(state.largest_hole_bytes)}.",
    )
    for failure in state.failures[-3:]:
        left = "an unknown size" if failure.device_free_bytes < 0 else size(failure.device_free_bytes)
        print_wrapped(
            console,
            f"An allocation of {size(failure.bytes)} failed: the driver had {left} left.",
        )
    if state.returned:
        print_wrapped(
            console,
            f"The allocator gave memory back to the driver {counted(state.returned, 'time')} in the recorded "
            "events, as it had none left or the program called torch.cuda.empty_cache. Both make the CPU wait.",
        )


def print_memory_change(before: tuple[Path, Breakdown], after: tuple[Path, Breakdown], console: Console) -> None:
    """Print two peaks by category and by line; the changes add up to the difference of the peaks."""
    (_, first), (_, second) = before, after
    print_line(console, f"GPU {first.peak.device}: from {before[0].name} to {after[0].name}", bold=True)
    change = second.peak.bytes - first.peak.bytes
    print_wrapped(
        console,
        f"The peak went from {size(first.peak.bytes)} to {size(second.peak.bytes)}, {_signed(change)}. The "
        "changes of the parts add up to this.",
    )
    one, other = first.by_category(), second.by_category()
    rows = [
        (
            0,
            name.replace("_", " "),
            [size(sum(one[name])), size(sum(other[name])), _signed(sum(other[name]) - sum(one[name]))],
        )
        for name in CATEGORIES
        if sum(one[name]) or sum(other[name])
    ]
    console.print()
    print_table(["category", "before", "after", "change"], rows, console)
    parts = [
        (
            0,
            part.name,
            [
                part.category.replace("_", " "),
                size(part.before_bytes),
                size(part.after_bytes),
                _signed(part.change_bytes),
            ],
        )
        for part in compare_peaks(first, second)
        if part.change_bytes
    ]
    _print_rows(["line, or evidence", "category", "before", "after", "change"], parts, console)


def _signed(number: int) -> str:
    return f"{'+' if number > 0 else ''}{size(number)}"
