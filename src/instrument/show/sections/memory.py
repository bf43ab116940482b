"""The page of a memory snapshot, and that of two: the memory over time, tables, and what changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...base.printable import shown_name
from ...base.units import count, counted, percentage, signed_size, size
from ...read.charts.flame import Tree, packed_tree, tree_of
from ...read.memory.batch import batch_texts
from ...read.memory.breakdown import NO_HISTORY, OLDER_MEMORY, Breakdown, Place, Use, comparable
from ...read.memory.categories import CATEGORIES, EVIDENCE, category_words, page_class
from ...read.memory.shortage import REASONS, DriverTraffic, FailedAllocation, Growth, traffic_texts
from ...read.memory.snapshot import MemorySnapshot
from ...read.memory.timeline import Timeline
from ...read.tables.table import Array
from ..page.document import WaterfallWords, document, summary_section, table_section, waterfall_section

_MAX_POINTS = 20_000


def timeline_section(snapshot: MemorySnapshot, device: int, side: str = "") -> dict[str, Any] | None:
    """Return the section; None without recorded events, and for a GPU whose memory was never in use.

    Numbers are changes from point to point: most are 0.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        side: which of two snapshots it is, such as "before".
    """
    events = int((snapshot.events.device == device).sum())
    shown = snapshot.timeline(device).thinned(_MAX_POINTS)
    categories = np.flatnonzero(shown.bytes.any(axis=1)).tolist()
    if not events or not categories:
        return None
    reserved = bool((shown.reserved_bytes >= shown.used_bytes).all())
    return {
        "id": f"memory-{side}" if side else "memory",
        "type": "memory",
        "title": f"Memory over time, {side}" if side else "Memory over time",
        "notes": list(_notes(shown, events, reserved)),
        "categories": [page_class(list(CATEGORIES)[row]) for row in categories],
        "event": _changes(shown.number - 1),
        "time_ns": _times(shown.time_ns),
        "bytes": [_changes(shown.bytes[row]) for row in categories],
        "reserved_bytes": _changes(shown.reserved_bytes) if reserved else None,
        "peak": int(np.searchsorted(shown.event, snapshot.peak(device).event)),
        "top_bytes": int(max(shown.used_bytes.max(), shown.reserved_bytes.max())),
    }


def _notes(shown: Timeline, events: int, reserved: bool) -> Iterator[str]:
    if len(shown) <= events:
        yield (
            f"Of {counted(events, 'event')}, the highest and the lowest point of each stretch are shown: "
            f"{counted(len(shown), 'point')}."
        )
    if not reserved:
        yield "What was reserved is not shown: more was in use than the recorded segments have."


def _times(time_ns: Array) -> list[int] | None:
    """Return the times after the first event, which also stands for what is before it.

    None if one is unknown, or all are the same.
    """
    times = np.maximum.accumulate(time_ns[1:])
    if time_ns[1:].min() < 0 or times[-1] == times[0]:
        return None
    return _changes(np.append(0, times - times[0]))


def _changes(column: Array) -> list[int]:
    changes: list[int] = np.diff(column, prepend=0).tolist()
    return changes


def failures_section(failures: Sequence[FailedAllocation]) -> dict[str, Any] | None:
    """Return the table of the allocations that failed; None if none did."""
    columns = {
        "Line": "text", "Why": "text", "Asked for": "bytes", "In use": "bytes", "Reserved": "bytes",
        "Largest free piece": "bytes", "Left at the driver": "bytes",
    }  # fmt: skip
    rows = [
        [
            _text(each.place),
            REASONS[each.reason],
            each.bytes,
            each.used_bytes,
            each.reserved_bytes,
            each.largest_hole_bytes,
            None if each.device_free_bytes < 0 else each.device_free_bytes,
        ]
        for each in failures
    ]
    return table_section("failures", "Out of memory", "Allocations that failed", columns, rows)


def inferred_section(peaks: Mapping[str, Breakdown]) -> dict[str, Any] | None:
    """Return the table of what is inferred at one peak, or at two, and from what; None if nothing is.

    Args:
        peaks: what was in use, by the words that tell it apart, such as "before".
    """
    inferred = {side: breakdown.by_evidence() for side, breakdown in peaks.items()}
    columns = {"Category": "text", "Evidence": "text"}
    for side in peaks:
        columns |= {side.capitalize() or "Memory": "bytes", f"Blocks {side}".strip(): "count"}
    rows = [
        [
            category_words(category),
            evidence,
            *(amount for parts in inferred.values() for amount in parts.get((category, evidence), (0, 0))),
            EVIDENCE[evidence],
        ]
        for category, evidence in dict.fromkeys(chain.from_iterable(inferred.values()))
    ]
    columns["The evidence is"] = "long"
    note = "Where no line is known, the category follows from other evidence."
    return table_section("inferred", "What is inferred", "Inferred uses at the peak", columns, rows, note)


def largest_section(blocks: Sequence[Use], when: str) -> dict[str, Any] | None:
    """Return the table of the largest blocks, such as those "at the peak"; None if nothing was in use."""
    columns = {"Line": "text", "Category": "text", "Bytes each": "bytes", "Blocks": "count", "Memory": "bytes"}
    rows = [
        [shown_name(use.source), category_words(use.category), use.bytes // use.blocks, use.blocks, use.bytes]
        for use in blocks
    ]
    caption = f"The largest blocks {when}; those alike are one row"
    return table_section("largest", "Largest blocks", caption, columns, rows)


def growth_section(growth: Sequence[tuple[Place, Growth]]) -> dict[str, Any] | None:
    """Return the table of the lines whose memory several steps left behind; None if there is none."""
    columns = {"Line": "text", "Steps": "count", "Memory": "bytes", "Blocks": "count"}
    rows = [[_text(place), each.steps, each.bytes, each.blocks] for place, each in growth]
    note = "What a line allocated in each of several steps is still in use: a leak, unless it is meant."
    caption = "Lines whose memory several steps left behind"
    return table_section("growth", "Kept from several steps", caption, columns, rows, note)


def traffic_section(traffic: DriverTraffic) -> dict[str, Any] | None:
    """Return the lines at which memory went back to the driver, and what was taken later; None without either."""
    columns = {"Line": "text", "Why": "text", "Times": "count", "Memory": "bytes"}
    rows = [[_text(each.place), each.reason, each.times, each.bytes] for each in traffic.returns]
    caption = "Lines at which memory went back to the driver"
    note = " ".join(traffic_texts(traffic))
    return table_section("driver", "Memory from the driver", caption, columns, rows, note, shows_empty=bool(note))


def _text(place: Place | None) -> str:
    return shown_name(place.text) if place else "unknown"


_WORDS = WaterfallWords(
    "bytes",
    "blocks",
    "The parts of the two peaks; the differences add up",
    {"Category": "", "Region": "outside regions", "Line": ""},
    [[0, 1, 2], [1, 0, 2], [2, 0, 1]],
    {
        name: {
            "class": page_class(name),
            "words": category_words(name),
            "definition": f"{text[:1].upper()}{text[1:]}.",
        }
        for name, text in CATEGORIES.items()
    }
    | {
        OLDER_MEMORY: {
            "class": page_class("other"),
            "words": category_words(OLDER_MEMORY),
            "definition": "Older than the history; only its size suggests what it is for.",
        }
    },
)


def change_section(before: Breakdown, after: Breakdown) -> dict[str, Any] | None:
    """Return the parts by category, region, and line or evidence, which add up to the difference.

    None if nothing was in use at either peak.
    """
    sums = defaultdict[tuple[str, str, str], list[int]](lambda: [0, 0, 0, 0])
    for side, uses in enumerate(comparable(before, after)):
        for use in uses:
            each = sums[use.category, shown_name(use.region), shown_name(use.source)]
            each[side] += use.bytes
            each[2 + side] += use.blocks
    parts = sorted(sums.items(), key=lambda part: (-abs(part[1][1] - part[1][0]), part[0]))
    return waterfall_section(_WORDS, [[*names, *amounts] for names, amounts in parts]) if parts else None


def page_of(
    snapshot: MemorySnapshot, device: int, limit_bytes: int | None = None, batch: int | None = None
) -> str:
    """Return the text of the page of a snapshot; arguments as of `sections_of`."""
    failed = [f"{each.text}." for each in snapshot.failures(device, 1)]
    lead = " ".join((*failed, snapshot.break_down(device).text))
    return document(shown_name(snapshot.path.name), lead, sections_of(snapshot, device, limit_bytes, batch))


def sections_of(
    snapshot: MemorySnapshot, device: int, limit_bytes: int | None = None, batch: int | None = None
) -> list[dict[str, Any]]:
    """Return what a page shows of a snapshot: what failed, figures, the memory over time, and the peak.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        limit_bytes: as of `MemorySnapshot.larger_batch`.
        batch: the batch size of the program; None if it is not known.
    """
    breakdown = snapshot.break_down(device)
    notes = [str(snapshot.path), *batch_texts(snapshot.larger_batch(device, limit_bytes), batch)]
    if not breakdown.recorded:
        notes = [str(snapshot.path), NO_HISTORY]
    sections = (
        failures_section(snapshot.failures(device)),
        summary_section(f"Memory of GPU {device}", _figures(snapshot, breakdown), notes),
        timeline_section(snapshot, device),
        peak_section(breakdown) if breakdown.recorded else None,
        inferred_section({"": breakdown}),
        largest_section(snapshot.largest_blocks(device), "at the peak" if breakdown.recorded else "in use"),
        growth_section(snapshot.growth(device)),
        traffic_section(snapshot.driver_traffic(device)),
    )
    return [section for section in sections if section is not None]


def page_of_change(
    before: MemorySnapshot, after: MemorySnapshot, device: int, estimate: Sequence[str] = ()
) -> str:
    """Return the text of the page that compares two snapshots: the changes, and both beside each other.

    Args:
        before: the first snapshot.
        after: the second one.
        device: the GPU.
        estimate: what another batch size would need, as of `fit_texts`.
    """
    sides = {"before": before, "after": after}
    peaks = {side: snapshot.break_down(device) for side, snapshot in sides.items()}
    old, new = (breakdown.peak.bytes for breakdown in peaks.values())
    change = signed_size(new - old)
    figures = [("peak before", size(old)), ("peak after", size(new)), ("difference", change)]
    notes = [f"{side.capitalize()}: {snapshot.path}" for side, snapshot in sides.items()]
    sections = (
        summary_section(f"Memory of GPU {device}", figures, [*notes, *estimate]),
        change_section(*peaks.values()),
        *_on_one_scale([timeline_section(snapshot, device, side) for side, snapshot in sides.items()]),
        *(peak_section(breakdown, side) for side, breakdown in peaks.items()),
        inferred_section(peaks),
    )
    return document(
        shown_name(f"{before.path.name} → {after.path.name}"),
        f"GPU {device}: the peak went from {size(old)} to {size(new)}, {change}.",
        sections,
    )


def _on_one_scale(timelines: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    there = [timeline for timeline in timelines if timeline is not None]
    top = max((timeline["top_bytes"] for timeline in there), default=0)
    notes = ["Both charts have the same scale of bytes, and each its own length."] * (len(there) > 1)
    return [timeline | {"top_bytes": top, "notes": notes + timeline["notes"]} for timeline in there]


def _figures(snapshot: MemorySnapshot, breakdown: Breakdown) -> list[tuple[str, str]]:
    peak = breakdown.peak
    state = snapshot.state(peak.device)
    shares = {
        "older than the recorded events": peak.before_bytes,
        "with a known line": breakdown.known_bytes,
        "of inferred use": breakdown.inferred_bytes,
        "of unknown use": breakdown.unknown_bytes,
    }
    return [
        *[("in use at the peak", size(peak.bytes))] * breakdown.recorded,
        *[("reserved then", size(breakdown.reserved_bytes))] * (breakdown.reserved_bytes >= peak.bytes),
        *(
            (f"of the peak: {name}", f"{size(part)} ({percentage(part / peak.bytes)})")
            for name, part in shares.items()
            if part and breakdown.recorded
        ),
        ("recorded events", count((snapshot.events.device == peak.device).sum())),
        ("in use at the end", size(state.used_bytes)),
        ("largest free piece then", size(state.largest_hole_bytes)),
    ]


_KINDS = ("peak", "region", "module", "line", "inferred", "unknown", *map(page_class, CATEGORIES))
_MAX_NODES = 2500  # of a view; with the joined ones twice as many
_NOTE = (
    "A module is the line that calls it. Where no line is known, the use is inferred, and the node names the "
    "evidence."
)


class _Node(NamedTuple):
    """What distinguishes a node from others below the same one.

    Attributes:
        kind: one of `_KINDS`.
        name: its name.
        about: what the page says of it.
    """

    kind: str
    name: str
    about: str


_PEAK = _Node("peak", "in use at the peak", "")


def peak_section(breakdown: Breakdown, side: str = "") -> dict[str, Any] | None:
    """Return the section; None if nothing was in use.

    Args:
        breakdown: what was in use.
        side: which of two snapshots it is of, such as "before".
    """
    if not breakdown.uses:
        return None
    paths = {
        "category": [(_PEAK, _category(use), *_around(use), _source(use)) for use in breakdown.uses],
        "region": [(_PEAK, *_around(use), _source(use), _category(use)) for use in breakdown.uses],
    }
    nodes = list(dict.fromkeys(chain.from_iterable(paths["category"])))
    numbers = {node: number for number, node in enumerate(nodes)}
    names: dict[int, int] = {}
    views = {
        key: {"title": f"By {key}", "note": _NOTE}
        | packed_tree(_tree(breakdown.uses, paths[key], numbers), len(nodes), names)
        for key in paths
    }
    shown = [nodes[key % len(nodes)] for key in names]
    return {
        "id": f"peak-{side}" if side else "peak",
        "type": "flame",
        "title": f"The peak {side}" if side else "The peak",
        "unit": "bytes",
        "steps": 1,
        "each": "at the peak",
        "words": {
            "views": "Order",
            "parts": "Evidence",
            "value": "Memory",
            "second": "Without a line",
            "count": "Blocks",
        },
        "parts": [["all", "All"], ["known", "With a line"], ["other", "Without a line"]],
        "kinds": _KINDS,
        "names": [node.name for node in shown],
        "about": {number: node.about for number, node in enumerate(shown) if node.about},
        "views": views,
    }


def _around(use: Use) -> Iterator[_Node]:
    """Yield the region and the modules around the allocation, the outermost first."""
    if use.region:
        yield _Node("region", shown_name(use.region), "")
    for place in use.modules:
        yield _at("module", place)


def _source(use: Use) -> _Node:
    if use.place is not None:
        return _at("line", use.place)
    if use.inferred:
        return _Node("inferred", use.source, f"Evidence: {EVIDENCE[use.evidence]}.")
    return _Node("unknown", use.source, "Neither a line nor other evidence is known.")


def _at(kind: str, place: Place) -> _Node:
    line = str(place).rpartition("/")[2]  # boxes are narrow
    return _Node(kind, shown_name(f"{line} {place.function}"), shown_name(f"{place.file}:{place.line}"))


def _category(use: Use) -> _Node:
    text = CATEGORIES[use.category]
    return _Node(page_class(use.category), category_words(use.category), f"{text[:1].upper()}{text[1:]}.")


def _tree(uses: Sequence[Use], paths: Sequence[Sequence[_Node]], numbers: Mapping[_Node, int]) -> Tree:
    """Return the tree of the uses, each below the nodes of its path: bytes and blocks, with and without a line."""
    depth = np.array([len(path) for path in paths])
    last = np.cumsum(depth) - 1
    keys = np.array([_KINDS.index(node.kind) * len(numbers) + numbers[node] for path in paths for node in path])
    parents = np.arange(len(keys)) - 1
    parents[last - depth + 1] = -1
    with_line = np.array([use.place is not None for use in uses])
    sizes, blocks = np.array([(use.bytes, use.blocks) for use in uses]).T
    values = np.zeros((len(keys), 2), np.int64)
    values[last] = _by_line(sizes, with_line)
    return tree_of(parents, keys, values, _by_line(blocks, with_line).repeat(depth, axis=0), _MAX_NODES)


def _by_line(values: Array, with_line: Array) -> Array:
    """Return two columns: the values with a line, and those without."""
    return np.stack((np.where(with_line, values, 0), np.where(with_line, 0, values)), axis=1)
