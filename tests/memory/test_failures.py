"""Why an allocation failed: what was free then, in which pieces."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.read.memory.shortage import REASONS, FailedAllocation
from instrument.read.memory.timeline import free_pieces

from ..support.shared_traces import shared
from .snapshots import block, event, segment, write
from .test_read import PEAKS

MB = 1 << 20


def failure(path: Path, events: list[dict[str, Any]], parts: list[dict[str, Any]]) -> FailedAllocation:
    (found,) = instrument.read_memory(write(path / "a.pickle", [events], parts)).failures()
    return found


def filled(address: int, size: int, **more: Any) -> dict[str, Any]:
    """Return a segment that is in use."""
    return {**segment([block(address, size)]), "address": address, **more}


def empty(address: int, size: int, **more: Any) -> dict[str, Any]:
    """Return a segment that is free."""
    return {**segment([block(address, size, "inactive")]), "address": address, **more}


def oom(size: int, left: int) -> dict[str, Any]:
    return {**event("oom", 0, size), "device_free": left}


def test_full(tmp_path: Path) -> None:
    """What is in use and what is asked for exceed what the GPU has."""
    found = failure(tmp_path, [oom(8 * MB, 2 * MB)], [filled(0, 90 * MB), empty(100 * MB, 4 * MB)])
    assert ("full", 8 * MB, 90 * MB, 94 * MB) == (
        found.reason, found.bytes, found.used_bytes, found.reserved_bytes,
    )  # fmt: skip
    assert (4 * MB, 96 * MB) == (found.largest_hole_bytes, found.limit_bytes)
    assert "me/model.py:12 forward" == f"{found.place} {found.place and found.place.function}"


def test_fragmented(tmp_path: Path) -> None:
    """Enough is free in all, but each piece is too small; pieces of two segments do not join."""
    parts = [empty(0, 6 * MB), empty(6 * MB, 6 * MB), filled(20 * MB, 80 * MB)]
    found = failure(tmp_path, [oom(8 * MB, 0)], parts)
    assert ("fragmented", 6 * MB) == (found.reason, found.largest_hole_bytes)


def test_other_pool(tmp_path: Path) -> None:
    """A piece that would do belongs to another stream."""
    parts = [empty(0, 16 * MB, stream=7), filled(20 * MB, 80 * MB, stream=0)]
    found = failure(tmp_path, [oom(8 * MB, 0)], parts)
    assert ("other pool", 0) == (found.reason, found.largest_hole_bytes)


def test_limited(tmp_path: Path) -> None:
    """The driver had enough, so that the process had no more than it had reserved."""
    found = failure(tmp_path, [oom(8 * MB, 50 * MB)], [filled(0, 90 * MB)])
    assert ("limited", 90 * MB) == (found.reason, found.limit_bytes)


def test_what_the_driver_has_left(tmp_path: Path) -> None:
    """For 8 MB torch takes a segment of 20 MB: 12 MB at the driver are too little, 20 MB are not."""
    for left, reason in ((12, "full"), (20, "limited")):
        assert reason == failure(tmp_path, [oom(8 * MB, left * MB)], [filled(0, 90 * MB)]).reason


def test_unmapped_since(tmp_path: Path) -> None:
    """A part of an expandable segment that was unmapped later does not cut what was one piece."""
    events = [oom(30 * MB, 0), event("segment_unmap", 20 * MB, 20 * MB)]
    parts = [{**empty(0, 20 * MB), "is_expandable": True}, filled(100 * MB, 40 * MB)]
    found = failure(tmp_path, events, parts)
    assert ("other pool", 40 * MB) == (found.reason, found.largest_hole_bytes)


def test_unknown_limit(tmp_path: Path) -> None:
    """Without what the driver had left, neither the reason nor the limit is known."""
    found = failure(tmp_path, [{**event("oom", 0, 8 * MB), "device_free": None}], [filled(0, 90 * MB)])
    assert ("unknown", None) == (found.reason, found.limit_bytes)


def test_what_happened_since(tmp_path: Path) -> None:
    """Segments and blocks that were taken or freed after the failure are undone."""
    events = [
        event("segment_alloc", 0, 64 * MB),
        event("alloc", 0, 48 * MB),
        oom(32 * MB, 0),
        event("free_completed", 0, 48 * MB),
        event("segment_free", 0, 64 * MB),
        event("segment_map", 100 * MB, 40 * MB),
        event("alloc", 100 * MB, 40 * MB),
    ]
    found = failure(tmp_path, events, [filled(100 * MB, 40 * MB)])
    assert ("full", 48 * MB, 64 * MB, 16 * MB) == (
        found.reason, found.used_bytes, found.reserved_bytes, found.largest_hole_bytes,
    )  # fmt: skip


def test_the_last_ones_of_a_device(tmp_path: Path) -> None:
    """Three failures at most are explained, those of one GPU, in order."""
    events = [[oom(size * MB, 0) for size in range(1, 6)], [oom(9 * MB, 0)]]
    snapshot = instrument.read_memory(write(tmp_path / "a.pickle", events, [filled(0, MB)]))
    assert [3, 4, 5] == [each.bytes // MB for each in snapshot.failures()]
    assert [9] == [each.bytes // MB for each in snapshot.failures(1)]
    assert {each.reason for each in snapshot.failures()} <= REASONS.keys()


PAGE, PAGES = 2 * MB, 4  # of a segment


def test_against_a_map(tmp_path: Path) -> None:
    """What is reserved, used and free in one piece is that of a map of the pages, whatever the events are."""
    random.seed(3)
    for number in range(60):
        events, segments = _random_events()
        parts = [
            {**segment([_page(at, page, used) for page, used in enumerate(pages)]), "address": at * PAGES * PAGE}
            for at, pages in segments.items()
        ]
        found = failure(tmp_path, events, parts)
        pieces = found.reserved_bytes, found.used_bytes, found.largest_hole_bytes
        assert _expected(events) == tuple(size // PAGE for size in pieces), number


def _page(at: int, page: int, used: bool) -> dict[str, Any]:
    return block((at * PAGES + page) * PAGE, PAGE, "active_allocated" if used else "inactive")


def _random_events() -> tuple[list[dict[str, Any]], dict[int, list[bool]]]:
    """Return events of segments and pages with one failure among them, and the pages in use in the end."""
    segments, events = dict[int, list[bool]](), []
    for _ in range(300):
        at, page = random.randrange(16), random.randrange(PAGES)
        pages = segments.get(at)
        if pages is None:
            segments[at] = [False] * PAGES
            events.append(event("segment_alloc", at * PAGES * PAGE, PAGES * PAGE))
        elif not any(pages) and random.random() < 0.2:
            del segments[at]
            events.append(event("segment_free", at * PAGES * PAGE, PAGES * PAGE))
        else:
            action = "free_completed" if pages[page] else "alloc"
            pages[page] = not pages[page]
            events.append(event(action, (at * PAGES + page) * PAGE, PAGE))
    events.insert(random.randrange(301), oom(999 * MB, 0))
    return events, segments


def _expected(events: list[dict[str, Any]]) -> tuple[int, int, int]:
    segments, used = set[int](), set[int]()
    actions = {
        "segment_alloc": segments.add, "segment_free": segments.discard, "alloc": used.add,
        "free_completed": used.discard,
    }  # fmt: skip
    for each in events:
        if each["action"] == "oom":
            break
        actions[each["action"]](each["addr"])
    runs = "".join(
        "|" + "".join("x" if at + page * PAGE in used else "." for page in range(PAGES)) for at in sorted(segments)
    )
    largest = max(map(len, re.findall(r"\.+", runs)), default=0)
    return len(segments) * PAGES, len(used), largest


@pytest.mark.parametrize("name", [name for name in PEAKS if name != "mosaic_sample"])  # which lacks free blocks
def test_pieces_of_real_snapshots(name: str) -> None:
    """At the end of the events, the largest free piece is that of the blocks; torch_npu rounds up by more."""
    snapshot = instrument.read_memory(shared(f"memory/{name}.pickle"))
    tables = snapshot.allocations, snapshot.events, snapshot.segments
    found = free_pieces(*tables, 0, len(snapshot.events) - 1)
    state = snapshot.state()
    assert state.reserved_bytes == found.reserved_bytes
    assert state.largest_hole_bytes == found.largest_bytes - (512 if name.startswith("npu") else 0)
    assert abs(state.unused_bytes - found.free_bytes) <= 0.002 * state.reserved_bytes


def test_the_end_of_a_block_is_in_use(tmp_path: Path) -> None:
    """Torch leaves up to 1 MiB of a large block unsplit; expandable segments have no such ends."""
    blocks = [block(address * 20 * MB, 20 * MB) for address in range(4)]
    parts = [{**segment([each]), "address": each["address"]} for each in blocks]
    events = [event("alloc", each["address"], 20 * MB - MB // 2) for each in blocks]
    found = failure(tmp_path, [*events, oom(24 * MB, 0)], parts)
    assert ("full", 80 * MB, 0) == (found.reason, found.used_bytes, found.largest_hole_bytes)
    expandable = [{**each, "is_expandable": True} for each in parts]
    assert MB // 2 == failure(tmp_path, [*events, oom(24 * MB, 0)], expandable).largest_hole_bytes
