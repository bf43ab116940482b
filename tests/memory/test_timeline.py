"""The memory in use after each event, by category."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import instrument
from instrument.read.memory.categories import CATEGORIES

from ..support.shared_traces import shared
from .snapshots import block, event, segment, write
from .test_breakdown import OLDER, STEP
from .test_read import PEAKS


def test_a_step(tmp_path: Path) -> None:
    """Each event changes the category of its allocation, and events of segments what is reserved."""
    events = [event("segment_alloc", 5000, 4096), *STEP]
    parts = [*OLDER, {**segment([block(5000, 4096, "inactive")]), "address": 5000}]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[], events], parts_on(1, parts))).timeline(1)
    by_name = dict(zip(CATEGORIES, found.bytes.tolist(), strict=True))
    assert [-1, *range(len(events))] == found.event.tolist()
    assert [1000] * 14 == by_name["parameters"]
    assert [0] * 3 + [320] * 4 + [0] * 7 == by_name["activations"]
    assert [0] * 4 + [80, 0, 70, 70, 70, 0, 0, 0, 90, 0] == by_name["temporaries"]
    assert [0] * 8 + [1000] * 6 == by_name["gradients"]
    assert [1000] + [5096] * 13 == found.reserved_bytes.tolist()
    assert [1000, 1000, 1640] == found.used_bytes[:3].tolist()


def parts_on(device: int, parts: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{**part, "device": device} for part in parts]


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_its_highest_point(name: str) -> None:
    """The highest point is the peak, also of few points, and has the categories of the breakdown."""
    snapshot = instrument.read_memory(shared(f"memory/{name}.pickle"))
    found, whole = snapshot.break_down(), snapshot.timeline()
    for points in (whole, whole.thinned(100)):
        top = int(points.used_bytes.argmax())
        assert (found.peak.bytes, found.peak.event) == (points.used_bytes[top], points.event[top])
        assert [sum(both) for both in found.by_category().values()] == points.bytes[:, top].tolist()
        assert found.reserved_bytes == points.reserved_bytes[top]
    assert len(whole.thinned(100)) <= 100
    assert whole.used_bytes.min() == whole.thinned(100).used_bytes.min()


def test_thinned_keeps_the_ends(tmp_path: Path) -> None:
    """Few points begin before the first event and end after the last one, in order."""
    events = [event("alloc", number, 1 + number % 7) for number in range(999)]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events])).timeline().thinned(10)
    assert (-1, 998) == (found.event[0], found.event[-1])
    assert len(found) <= 10
    assert (np.diff(found.event) > 0).all()
