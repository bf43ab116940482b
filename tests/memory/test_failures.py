"""Why an allocation failed: what was free then, in which pieces."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.memory.failures import REASONS, FailedAllocation

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
    """The driver had enough."""
    assert "limited" == failure(tmp_path, [oom(8 * MB, 50 * MB)], [filled(0, 90 * MB)]).reason


def test_unknown_limit(tmp_path: Path) -> None:
    """Without what the driver had left, the limit is not known."""
    found = failure(tmp_path, [{**event("oom", 0, 8 * MB), "device_free": None}], [filled(0, 90 * MB)])
    assert ("full", None) == (found.reason, found.limit_bytes)


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


def test_against_a_bitmap(tmp_path: Path) -> None:
    """The pieces that are free are those of a map of each page, whatever the events are."""
    random.seed(3)
    for number in range(60):
        events, pages = _random_events()
        held = [page for page in range(64) if pages[page]]
        parts = [filled(page * MB, MB) if pages[page] == 2 else empty(page * MB, MB) for page in held]
        found = failure(tmp_path, events, parts)
        assert _expected(events) == (found.reserved_bytes // MB, found.used_bytes // MB), number


def _random_events() -> tuple[list[dict[str, Any]], list[int]]:
    """Return events of segments of 1 MB with one failure among them, and the final state of each."""
    pages, events = [0] * 64, []  # 0: of the driver, 1: free, 2: in use
    for _ in range(200):
        page = random.randrange(64)
        choice = random.random() < 0.5
        if pages[page] == 0:
            action, pages[page] = "segment_alloc", 1
        elif pages[page] == 1:
            action, pages[page] = ("alloc", 2) if choice else ("segment_free", 0)
        else:
            action, pages[page] = "free_completed", 1
        events.append(event(action, page * MB, MB))
    events.insert(random.randrange(201), oom(999 * MB, 0))
    return events, pages


def _expected(events: list[dict[str, Any]]) -> tuple[int, int]:
    reserved, used = set[int](), set[int]()
    actions = {
        "segment_alloc": reserved.add, "segment_free": reserved.discard, "alloc": used.add,
        "free_completed": used.discard,
    }  # fmt: skip
    for each in events:
        if each["action"] == "oom":
            break
        actions[each["action"]](each["addr"])
    return len(reserved), len(used)


@pytest.mark.parametrize("name", PEAKS)
def test_pieces_of_real_snapshots(name: str) -> None:
    """At the end of the events, the largest free piece is that of the blocks, where these list what is free."""
    snapshot = instrument.read_memory(shared(f"memory/{name}.pickle"))
    unused = snapshot.blocks.where(~snapshot.blocks.matching("state", re.compile("^active")))
    largest = max(unused.bytes.tolist(), default=0)
    state = snapshot.state()
    assert state.largest_hole_bytes - 512 <= largest <= state.largest_hole_bytes or not len(unused)
