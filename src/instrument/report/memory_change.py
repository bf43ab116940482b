"""Prints two peaks of the memory of a GPU side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from ..console import print_line, print_table, print_wrapped
from ..memory.categories import category_words
from ..memory.comparison import OLDER_MEMORY, ChangedPart, compare_categories, compare_peaks, compare_regions
from ..memory.snapshot import MemorySnapshot
from ..units import counted, signed_size, size
from .memory_report import print_rows


def print_memory_change(
    before: MemorySnapshot,
    after: MemorySnapshot,
    device: int,
    console: Console,
    estimate: Sequence[str] = (),
) -> None:
    """Print two peaks by category, line and region; the changes add up to the difference of the peaks.

    Args:
        before: the first snapshot.
        after: the second one.
        device: the GPU.
        console: where to.
        estimate: what another batch size would need, as of `fit_texts`.
    """
    first, second = before.break_down(device), after.break_down(device)
    print_line(console, f"GPU {device}: from {before.path.name} to {after.path.name}", bold=True)
    change = second.peak.bytes - first.peak.bytes
    print_wrapped(
        console,
        f"The peak went from {size(first.peak.bytes)} to {size(second.peak.bytes)}, {signed_size(change)}. The "
        "changes of the parts add up to this.",
    )
    for each in (before, after):
        if failed := each.failed(device):
            print_wrapped(console, f"Out of memory in {each.path.name}: {counted(failed, 'allocation')} failed.")
    categories = compare_categories(first, second)
    console.print()
    rows = [(0, category_words(part.category), _sizes(part)) for part in categories]
    print_table(["category", "before", "after", "change"], rows, console)
    if any(part.category == OLDER_MEMORY for part in categories):
        said = "Older memory is older than the history, and only its size suggests what it is for."
        print_wrapped(console, said)
    _print_passes(before.pass_peaks(device), after.pass_peaks(device), console)
    _print_parts("line, or evidence", compare_peaks(first, second), console)
    by_region = compare_regions(first, second)
    if any(part.name for part in by_region):
        _print_parts("region", by_region, console)
    if estimate:
        print_line(console, "Another batch size, as an estimate", bold=True, space=True)
    for text in estimate:
        print_wrapped(console, text)


def _print_passes(before: Mapping[str, int], after: Mapping[str, int], console: Console) -> None:
    """Print the highest memory of each kind of pass: the peak is in one of them."""
    rows = [
        (0, name, [size(before[name]), size(after[name]), signed_size(after[name] - before[name])])
        for name in before
        if name in after
    ]
    print_rows(["highest in the pass", "before", "after", "change"], rows, console)


def _sizes(part: ChangedPart) -> list[str]:
    return [size(part.before_bytes), size(part.after_bytes), signed_size(part.change_bytes)]


def _print_parts(heading: str, parts: Sequence[ChangedPart], console: Console) -> None:
    rows = [
        (
            0,
            part.name or "outside regions",
            [category_words(part.category), *_sizes(part)],
        )
        for part in parts
        if part.change_bytes
    ]
    print_rows([heading, "category", "before", "after", "change"], rows, console)
