"""What the allocator took from the driver and gave back, by line and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import instrument

from ..support.shared_traces import shared
from .snapshots import event, write
from .test_breakdown import BATCH, FORWARD, OPTIMIZER, frames

CLEARED = frames(
    ("/usr/lib/python3.11/site-packages/torch/cuda/memory.py", "empty_cache", 9),
    ("/home/me/train.py", "train", 50),
)
STEP = [event("alloc", 6, 1, frames=OPTIMIZER), event("alloc", 7, 1, frames=BATCH)]


def read(path: Path, events: list[list[dict[str, Any]]]) -> instrument.MemorySnapshot:
    """Return the snapshot of these events, of which a file has each on its own."""
    return instrument.read_memory(write(path / "a.pickle", [[*map(dict, each)] for each in events]))


def test_returns(tmp_path: Path) -> None:
    """Segments that go back one after the other are one time; frees of streams between them do not count."""
    retried = [
        event("segment_free", 1, 10, frames=FORWARD),
        event("free_completed", 9, 1, frames=FORWARD),
        event("segment_free", 2, 20, frames=FORWARD),
        event("segment_alloc", 3, 30, frames=FORWARD),
    ]
    cleared = [event("segment_free", 3, 30, frames=CLEARED), event("segment_unmap", 4, 5, frames=CLEARED)]
    events = [*retried, *cleared, *retried, *retried]
    found = read(tmp_path, [events]).driver_traffic()
    shown = [(str(each.place), each.reason, each.times, each.bytes) for each in found.returns]
    assert [("me/model.py:12", "none left", 3, 90), ("me/train.py:50", "empty_cache", 1, 35)] == shown


def test_unknown_reasons(tmp_path: Path) -> None:
    """Without a stack, another allocation by the same, or with garbage collection, the reason is not known."""
    returned, taken = (event(name, 1, 10, frames=FORWARD) for name in ("segment_free", "segment_alloc"))
    for events, settings in (
        ([returned, {**taken, "frames": BATCH}], {}),
        ([{**returned, "frames": []}, {**taken, "frames": []}], {}),
        ([returned], {}),
        ([returned, taken], {"garbage_collection_threshold": 0.8}),
    ):
        path = write(tmp_path / "a.pickle", [events], allocator_settings=settings)
        (found,) = instrument.read_memory(path).driver_traffic().returns
        assert (None, "unknown", 1, 1) == (found.place, found.reason, found.times, found.times_later)


def test_after_the_first_step(tmp_path: Path) -> None:
    """What the first step gives back counts apart."""
    cleared = event("segment_free", 3, 30, frames=CLEARED)
    (found,) = read(tmp_path, [[cleared, *STEP, cleared, *STEP, cleared]]).driver_traffic().returns
    assert (3, 2) == (found.times, found.times_later)


def test_taken_later(tmp_path: Path) -> None:
    """What the first step takes does not count."""
    taken = event("segment_alloc", 3, 30, frames=FORWARD)
    events = [taken, *STEP, taken, *STEP, {**taken, "action": "segment_map"}]
    found = read(tmp_path, [[taken], events]).driver_traffic(1)
    assert (2, 60, 2, ()) == (found.taken_later, found.taken_later_bytes, found.steps, found.returns)


def test_a_real_program() -> None:
    """A program whose memory grows takes more in each step."""
    found = instrument.read_memory(shared("memory/npu_expandable.pickle")).driver_traffic()
    assert (10, 92 * 2**20, 2) == (found.taken_later, found.taken_later_bytes, found.steps)
