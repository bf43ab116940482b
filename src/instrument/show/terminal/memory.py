"""Prints what the memory of a GPU was at its peak and what else a snapshot shows, and how two peaks differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

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
from ..text.lines import line
from .console import Block, Table, heading, more

_ROWS = 15  # of a table
_STRETCHES = 12
_LEAST = 0.01  # of the peak: categories that are never larger share a column
_WIDTH_LEFT, _WIDTH = 31, 13  # characters of a table: the columns that are always there, and another one
_CALLS = 2  # of modules around an allocation


def memory_report(
    snapshot: MemorySnapshot, device: int, width: int, limit_bytes: int | None = None, batch: int | None = None
) -> Iterator[Block]:
    """Yield the peak of a GPU by category, line, module and region, and what else the snapshot shows.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        width: the columns of the terminal, which limit the columns of the memory over time.
        limit_bytes: the memory that the GPU has for the program; None takes `MemorySnapshot.known_limit`.
        batch: the batch size of the program; None if that is not known.
    """
    breakdown = snapshot.break_down(device)
    when = "at the peak" if breakdown.recorded else "when the snapshot was taken"
    yield line(f"GPU {device} of {snapshot.path.name}: {size(breakdown.peak.bytes)} in use {when}", "bold")
    if not breakdown.recorded:
        yield NO_HISTORY
        yield from _lines(breakdown)
        yield from _largest(snapshot, device)
        yield from _state(snapshot, device)
        return
    yield from _failures(snapshot, device)
    yield _age_text(snapshot, breakdown)
    yield _reserved_text(breakdown)
    yield _known_text(breakdown)
    yield from _categories(breakdown)
    yield from _lines(breakdown)
    yield from _evidence(breakdown)
    modules = {_calls(calls): number for calls, number in breakdown.by_module().items()}
    yield from _places(breakdown, "calls of modules", modules)
    yield from _places(breakdown, "region", breakdown.by_region())
    yield from _largest(snapshot, device)
    yield from _timeline(snapshot, device, width)
    yield from _growth(snapshot, device)
    yield from _traffic(snapshot, device)
    yield from _state(snapshot, device)
    texts = batch_texts(snapshot.larger_batch(device, limit_bytes), batch)
    if texts:
        yield from heading("A larger batch, as an estimate")
    yield from texts


def _age_text(snapshot: MemorySnapshot, breakdown: Breakdown) -> str:
    events = counted(int((snapshot.events.device == breakdown.peak.device).sum()), "recorded event")
    older = breakdown.peak.before_bytes
    if not older:
        return f"{events}; nothing at the peak is older than these."
    return f"{events}; {_part(older, breakdown)} of the peak is older than these."


def _reserved_text(breakdown: Breakdown) -> str:
    if breakdown.reserved_bytes < breakdown.peak.bytes:
        held = size(breakdown.reserved_bytes)
        return f"What was reserved then is not known: the segments of the snapshot hold only {held}."
    unused = size(breakdown.cached_bytes)
    return f"{size(breakdown.reserved_bytes)} was reserved then, of which {unused} was not in use."


def _known_text(breakdown: Breakdown) -> str:
    by_line, inferred = _part(breakdown.known_bytes, breakdown), _part(breakdown.inferred_bytes, breakdown)
    unknown = f"; nothing is known of {_part(breakdown.unknown_bytes, breakdown)}" * bool(breakdown.unknown_bytes)
    return f"The line is known for {by_line}, and the use inferred for {inferred}{unknown}."


def _calls(calls: Sequence[Place]) -> str:
    """Return the innermost calls of modules, which differ; the outer ones are often the same."""
    return "... > " * (len(calls) > _CALLS) + " > ".join(map(str, calls[-_CALLS:]))


def _part(part: int, breakdown: Breakdown) -> str:
    return f"{size(part)} ({percent(part, breakdown.peak.bytes)} %)"


def _categories(breakdown: Breakdown) -> Iterator[Block]:
    rows = [
        [category_words(name), *_amount(sum(both), breakdown), *map(size, both)]
        for name, both in breakdown.by_category().items()  # with a line, and without
        if sum(both)
    ]
    yield line()
    yield Table(["category", "bytes", "% peak", "with a line", "without"], rows)


def _lines(breakdown: Breakdown) -> Iterator[Block]:
    rows = [
        [place.text, category_words(category), *_amount(number, breakdown), count(blocks)]
        for (place, category), (number, blocks) in breakdown.by_line().items()
    ]
    return _table(["known: line", "category", "bytes", "% peak" if breakdown.recorded else "%", "blocks"], rows)


def _evidence(breakdown: Breakdown) -> Iterator[Block]:
    inferred = breakdown.by_evidence()
    names = {f"{category_words(category)} ({evidence})": each for (category, evidence), each in inferred.items()}
    yield from _places(breakdown, "inferred: category (evidence)", names)
    yield from (f"{each}: {EVIDENCE[each]}." for each in dict.fromkeys(evidence for _, evidence in inferred))


def _places(breakdown: Breakdown, title: str, places: Mapping[str, tuple[int, int]]) -> Iterator[Block]:
    rows = [[name, *_amount(number, breakdown), count(blocks)] for name, (number, blocks) in places.items()]
    return _table([title, "bytes", "% peak", "blocks"], rows)


def _amount(number: int, breakdown: Breakdown) -> tuple[str, str]:
    return size(number), percent(number, breakdown.peak.bytes)


def _table(columns: list[str], rows: list[list[str]]) -> Iterator[Block]:
    """Yield the first rows of a table; nothing without rows."""
    if rows:
        yield line()
        yield Table(columns, rows[:_ROWS])
    yield from more(len(rows) - _ROWS, "row", " more: --json has all")


def _largest(snapshot: MemorySnapshot, device: int) -> Iterator[Block]:
    rows = [
        [
            use.source,
            category_words(use.category),
            size(use.bytes // use.blocks),
            count(use.blocks),
            size(use.bytes),
        ]
        for use in snapshot.largest_blocks(device)
    ]
    return _table(["largest blocks: line, or evidence", "category", "bytes each", "blocks", "bytes"], rows)


def _growth(snapshot: MemorySnapshot, device: int) -> Iterator[Block]:
    rows = [
        [place.text, count(growth.steps), size(growth.bytes), count(growth.blocks)]
        for place, growth in snapshot.growth(device)
    ]
    yield from _table(["kept from several steps: line", "steps", "bytes", "blocks"], rows)
    steps = snapshot.complete_steps(device)
    if not rows:
        yield line()
    if steps < LEAST_STEPS:
        recorded = counted(steps, "complete step")
        yield f"Whether memory grows from step to step is not known: the history has {recorded}."
    elif not rows:
        yield f"No line left memory behind in half of the {count(steps)} complete steps or more."


def _state(snapshot: MemorySnapshot, device: int) -> Iterator[Block]:
    state = snapshot.state(device)
    yield from heading("When the snapshot was taken")
    yield (
        f"{size(state.reserved_bytes)} reserved and {size(state.used_bytes)} in use. The largest piece of the "
        f"{size(state.unused_bytes)} that are free is {size(state.largest_hole_bytes)}."
    )


def _failures(snapshot: MemorySnapshot, device: int) -> Iterator[Block]:
    failures = snapshot.failures(device)
    if not failures:
        return
    number = snapshot.failed(device)
    last = f", of which the last {len(failures)} are these" if number > len(failures) else ""
    yield line(f"Out of memory: {counted(number, 'allocation')} failed{last}", "bold")
    for failure in failures:
        at = f" at {failure.place.text}" if failure.place else ""
        free = failure.device_free_bytes
        left = f"{size(free)} was left" if free >= 0 else "what was left is not recorded"
        yield (
            f"An allocation of {size(failure.bytes)} failed{at}: {REASONS[failure.reason]}. "
            f"{size(failure.reserved_bytes)} was reserved, of which {size(failure.used_bytes)} was in use; the "
            f"largest free piece was {size(failure.largest_hole_bytes)}; of the driver's memory, {left}."
        )
    yield line()


def _traffic(snapshot: MemorySnapshot, device: int) -> Iterator[Block]:
    traffic = snapshot.driver_traffic(device)
    rows = [
        [each.place.text if each.place else "unknown", each.reason, count(each.times), size(each.bytes)]
        for each in traffic.returns
    ]
    yield from _table(["given back to the driver: line", "why", "times", "bytes"], rows)
    texts = traffic_texts(traffic)
    if texts and not rows:
        yield line()
    yield from texts


def _timeline(snapshot: MemorySnapshot, device: int, width: int) -> Iterator[Block]:
    """Yield the highest point of each twelfth of the events; nothing without events."""
    highest = snapshot.timeline(device).highest(_STRETCHES)
    if len(highest) < 2:
        return
    used = highest.used_bytes
    most = max((width - _WIDTH_LEFT) // _WIDTH, 1)
    large = np.sort(np.argsort(-highest.bytes.max(axis=1), kind="stable")[:most])
    large = large[highest.bytes[large].max(axis=1) >= _LEAST * used.max()]
    rest = used - highest.bytes[large].sum(axis=0)
    points = np.stack([used, *highest.bytes[large], rest], axis=1).tolist()
    rows = [
        [count(number), *map(size, sizes)] for number, sizes in zip(highest.number.tolist(), points, strict=True)
    ]
    names = [list(CATEGORIES)[row].partition("_")[0] for row in large]
    yield from _table(["after event", "in use", *names, "rest"], rows)


def memory_change(
    before: MemorySnapshot, after: MemorySnapshot, device: int, estimate: Sequence[str] = ()
) -> Iterator[Block]:
    """Yield two peaks by category, line and region; the changes add up to the difference of the peaks.

    Args:
        before: the first snapshot.
        after: the second one.
        device: the GPU.
        estimate: what another batch size would need, as of `fit_texts`.
    """
    first, second = before.break_down(device), after.break_down(device)
    yield line(f"GPU {device}: from {before.path.name} to {after.path.name}", "bold")
    change = second.peak.bytes - first.peak.bytes
    yield (
        f"The peak went from {size(first.peak.bytes)} to {size(second.peak.bytes)}, {signed_size(change)}. The "
        "changes of the parts add up to this."
    )
    for each in (before, after):
        if failed := each.failed(device):
            yield f"Out of memory in {each.path.name}: {counted(failed, 'allocation')} failed."
    categories = compare_categories(first, second)
    yield line()
    rows = [[category_words(part.category), *_sizes(part.before_bytes, part.after_bytes)] for part in categories]
    yield Table(["category", "before", "after", "change"], rows)
    if any(part.category == OLDER_MEMORY for part in categories):
        yield "Older memory is older than the history, and only its size suggests what it is for."
    old, new = before.pass_peaks(device), after.pass_peaks(device)  # the peak is in one of the passes
    passes = [[name, *_sizes(old[name], new[name])] for name in old if name in new]
    yield from _table(["highest in the pass", "before", "after", "change"], passes)
    yield from _parts("line, or evidence", compare_peaks(first, second))
    by_region = compare_regions(first, second)
    if any(part.name for part in by_region):
        yield from _parts("region", by_region)
    if estimate:
        yield from heading("Another batch size, as an estimate")
    yield from estimate


def _sizes(before: int, after: int) -> list[str]:
    return [size(before), size(after), signed_size(after - before)]


def _parts(title: str, parts: Sequence[ChangedPart]) -> Iterator[Block]:
    rows = [
        [
            part.name or "outside regions",
            category_words(part.category),
            *_sizes(part.before_bytes, part.after_bytes),
        ]
        for part in parts
        if part.change_bytes
    ]
    return _table([title, "category", "before", "after", "change"], rows)
