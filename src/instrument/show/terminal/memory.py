"""Prints what the memory of a GPU was at its peak and what else a snapshot shows, and how two peaks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from ...base.units import count, counted, percent, signed_size, size
from ...read.memory.batch import batch_texts
from ...read.memory.breakdown import (
    NO_HISTORY,
    OLDER_MEMORY,
    Breakdown,
    ChangedPart,
    Place,
    compare_categories,
    compare_peaks,
    compare_regions,
)
from ...read.memory.categories import CATEGORIES, EVIDENCE, category_words
from ...read.memory.shortage import LEAST_STEPS, REASONS, traffic_texts
from ...read.memory.snapshot import MemorySnapshot
from .console import print_line, print_table, print_wrapped

_ROWS = 15  # of a table
_STRETCHES = 12
_LEAST = 0.01  # of the peak: categories that are never larger share a column
_WIDTH_LEFT, _WIDTH = 31, 13  # characters of a table: the columns that are always there, and another one
_CALLS = 2  # of modules around an allocation


def print_memory(
    snapshot: MemorySnapshot,
    device: int,
    console: Console,
    limit_bytes: int | None = None,
    batch: int | None = None,
) -> None:
    """Print the peak of a GPU by category, line, module and region, and what else the snapshot shows.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        console: where to.
        limit_bytes: the memory that the GPU has for the program; None takes `MemorySnapshot.known_limit`.
        batch: the batch size of the program; None if that is not known.
    """
    found = snapshot.break_down(device)
    when = "at the peak" if found.recorded else "when the snapshot was taken"
    print_line(console, f"GPU {device} of {snapshot.path.name}: {size(found.peak.bytes)} in use {when}", bold=True)
    if not found.recorded:
        print_wrapped(console, NO_HISTORY)
        _print_lines(found, console)
        _print_blocks(snapshot, device, console)
        _print_state(snapshot, device, console)
        return
    _print_failures(snapshot, device, console)
    print_wrapped(console, _age_text(snapshot, found))
    print_wrapped(console, _reserved_text(found))
    print_wrapped(console, _known_text(found))
    _print_categories(found, console)
    _print_lines(found, console)
    _print_evidence(found, console)
    modules = {_calls(calls): number for calls, number in found.by_module().items()}
    _print_places(found, "calls of modules", modules, console)
    _print_places(found, "region", found.by_region(), console)
    _print_blocks(snapshot, device, console)
    _print_timeline(snapshot, device, console)
    _print_growth(snapshot, device, console)
    _print_traffic(snapshot, device, console)
    _print_state(snapshot, device, console)
    _print_batch(snapshot, device, console, limit_bytes, batch)


def _age_text(snapshot: MemorySnapshot, found: Breakdown) -> str:
    events = counted(int((snapshot.events.device == found.peak.device).sum()), "recorded event")
    older = found.peak.before_bytes
    if not older:
        return f"{events}; nothing at the peak is older than these."
    return f"{events}; {_part(older, found)} of the peak is older than these."


def _reserved_text(found: Breakdown) -> str:
    if found.reserved_bytes < found.peak.bytes:
        known = size(found.reserved_bytes)
        return f"What was reserved then is not known: the segments of the snapshot hold only {known}."
    unused = size(found.cached_bytes)
    return f"{size(found.reserved_bytes)} was reserved then, of which {unused} was not in use."


def _known_text(found: Breakdown) -> str:
    unknown = f"; nothing is known of {_part(found.unknown_bytes, found)}" if found.unknown_bytes else ""
    return (
        f"The line is known for {_part(found.known_bytes, found)}, and the use inferred for "
        f"{_part(found.inferred_bytes, found)}{unknown}."
    )


def _calls(calls: Sequence[Place]) -> str:
    """Return the innermost calls of modules, which differ; the outer ones are often the same."""
    return "... > " * (len(calls) > _CALLS) + " > ".join(map(str, calls[-_CALLS:]))


def _part(part: int, found: Breakdown) -> str:
    return f"{size(part)} ({percent(part, found.peak.bytes)} %)"


def _print_categories(found: Breakdown, console: Console) -> None:
    rows = [
        (
            0,
            category_words(name),
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
            place.text,
            [category_words(category), size(number), percent(number, found.peak.bytes), count(blocks)],
        )
        for (place, category), (number, blocks) in found.by_line().items()
    ]
    share = "% peak" if found.recorded else "%"
    print_rows(["known: line", "category", "bytes", share, "blocks"], rows, console)


def _print_evidence(found: Breakdown, console: Console) -> None:
    inferred = found.by_evidence()
    rows = [
        (
            0,
            f"{category_words(category)} ({evidence})",
            [size(number), percent(number, found.peak.bytes), count(blocks)],
        )
        for (category, evidence), (number, blocks) in inferred.items()
    ]
    print_rows(["inferred: category (evidence)", "bytes", "% peak", "blocks"], rows, console)
    for evidence in dict.fromkeys(evidence for _, evidence in inferred):
        print_wrapped(console, f"{evidence}: {EVIDENCE[evidence]}.")


def _print_places(found: Breakdown, heading: str, places: Mapping[str, tuple[int, int]], console: Console) -> None:
    rows = [
        (0, name, [size(number), percent(number, found.peak.bytes), count(blocks)])
        for name, (number, blocks) in places.items()
    ]
    print_rows([heading, "bytes", "% peak", "blocks"], rows, console)


def print_rows(columns: list[str], rows: list[tuple[int, str, list[str]]], console: Console) -> None:
    """Print the first rows of a table; nothing without rows."""
    if not rows:
        return
    console.print()
    print_table(columns, rows[:_ROWS], console)
    if len(rows) > _ROWS:
        print_line(console, f"... and {counted(len(rows) - _ROWS, 'row')} more: --json has all")


def _print_blocks(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    rows = [
        (
            0,
            use.source,
            [category_words(use.category), size(use.bytes // use.blocks), count(use.blocks), size(use.bytes)],
        )
        for use in snapshot.largest_blocks(device)
    ]
    columns = ["largest blocks: line, or evidence", "category", "bytes each", "blocks", "bytes"]
    print_rows(columns, rows, console)


def _print_growth(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    rows = [
        (0, place.text, [count(growth.steps), size(growth.bytes), count(growth.blocks)])
        for place, growth in snapshot.growth(device)
    ]
    print_rows(["kept from several steps: line", "steps", "bytes", "blocks"], rows, console)
    steps = snapshot.complete_steps(device)
    if not rows:
        console.print()
    if steps < LEAST_STEPS:
        known = counted(steps, "complete step")
        print_wrapped(console, f"Whether memory grows from step to step is not known: the history has {known}.")
    elif not rows:
        print_wrapped(console, f"No line left memory behind in half of the {count(steps)} complete steps or more.")


def _print_state(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    state = snapshot.state(device)
    print_line(console, "When the snapshot was taken", bold=True, space=True)
    print_wrapped(
        console,
        f"{size(state.reserved_bytes)} reserved and {size(state.used_bytes)} in use. The largest piece of the "
        f"{size(state.unused_bytes)} that are free is {size(state.largest_hole_bytes)}.",
    )


def _print_failures(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    failures = snapshot.failures(device)
    if not failures:
        return
    number = snapshot.failed(device)
    last = f", of which the last {len(failures)} are these" if number > len(failures) else ""
    print_line(console, f"Out of memory: {counted(number, 'allocation')} failed{last}", bold=True)
    for failure in failures:
        at = f" at {failure.place.text}" if failure.place else ""
        known = failure.device_free_bytes >= 0
        left = f"{size(failure.device_free_bytes)} was left" if known else "what was left is not recorded"
        print_wrapped(
            console,
            f"An allocation of {size(failure.bytes)} failed{at}: {REASONS[failure.reason]}. "
            f"{size(failure.reserved_bytes)} was reserved, of which {size(failure.used_bytes)} was in use; the "
            f"largest free piece was {size(failure.largest_hole_bytes)}; of the driver's memory, {left}.",
        )
    console.print()


def _print_traffic(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    traffic = snapshot.driver_traffic(device)
    rows = [
        (
            0,
            each.place.text if each.place else "unknown",
            [each.reason, count(each.times), size(each.bytes)],
        )
        for each in traffic.returns
    ]
    print_rows(["given back to the driver: line", "why", "times", "bytes"], rows, console)
    texts = traffic_texts(traffic)
    if texts and not rows:
        console.print()
    for text in texts:
        print_wrapped(console, text)


def _print_timeline(snapshot: MemorySnapshot, device: int, console: Console) -> None:
    """Print the highest point of each twelfth of the events; nothing without events."""
    found = snapshot.timeline(device).highest(_STRETCHES)
    if len(found) < 2:
        return
    used = found.used_bytes
    most = max((console.width - _WIDTH_LEFT) // _WIDTH, 1)
    large = np.sort(np.argsort(-found.bytes.max(axis=1), kind="stable")[:most])
    large = large[found.bytes[large].max(axis=1) >= _LEAST * used.max()]
    rest = used - found.bytes[large].sum(axis=0)
    rows = [
        (0, count(number), [size(part) for part in sizes])
        for number, *sizes in zip(
            found.number.tolist(), used.tolist(), *found.bytes[large].tolist(), rest.tolist(), strict=True
        )
    ]
    names = [list(CATEGORIES)[row].partition("_")[0] for row in large]
    print_rows(["after event", "in use", *names, "rest"], rows, console)


def _print_batch(
    snapshot: MemorySnapshot, device: int, console: Console, limit_bytes: int | None, batch: int | None
) -> None:
    texts = batch_texts(snapshot.larger_batch(device, limit_bytes), batch)
    if texts:
        print_line(console, "A larger batch, as an estimate", bold=True, space=True)
    for text in texts:
        print_wrapped(console, text)


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
