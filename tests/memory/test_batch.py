"""What another batch size would need: an estimate from one snapshot, and from two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.read.memory.batch import batch_texts, fit_batches

from .snapshots import block, event, segment, write
from .test_breakdown import BATCH, FORWARD, OLDER, OPTIMIZER, frames

KEPT = frames(("/home/me/log.py", "keep", 8))


def step(batch: int) -> list[dict[str, Any]]:
    """Return the events of a step whose batch has so many samples."""
    return [
        event("alloc", 1, 10 * batch, frames=BATCH),
        event("alloc", 2, 300 * batch, frames=FORWARD),  # an activation
        event("alloc", 3, 40 * batch, frames=FORWARD),  # a temporary
        event("free_completed", 3, 40 * batch, frames=FORWARD),
        event("alloc", 5, 1000, frames=[]),  # the gradient of the parameter
        event("free_completed", 2, 300 * batch, frames=[]),
        event("alloc", 6, 1000, frames=OPTIMIZER),
        event("alloc", 7, 2500, frames=OPTIMIZER),
        event("free_completed", 7, 2500, frames=OPTIMIZER),
    ]


def later_step(batch: int) -> list[dict[str, Any]]:
    """Return the events of a step after the first one, which finds the state of the optimizer."""
    freed = [event("free_completed", 1, 10 * batch, frames=BATCH), event("free_completed", 5, 1000, frames=BATCH)]
    return [*freed, *(each for each in step(batch) if each["addr"] != 6)]


def snapshot(path: Path, batch: int) -> instrument.MemorySnapshot:
    return instrument.read_memory(write(path / f"{batch}.pickle", [step(batch)], OLDER))


def run(path: Path, batch: int) -> instrument.MemorySnapshot:
    events = [*step(batch), *later_step(batch)]
    return instrument.read_memory(write(path / f"run-{batch}.pickle", [events], OLDER))


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 40])
def test_twice_the_batch(tmp_path: Path, batch: int) -> None:
    """The estimate for twice the batch is the peak of a run with it, also if that is at another time.

    From the first step too, which makes the state of the optimizer at its end.
    """
    found = snapshot(tmp_path, batch).larger_batch()
    assert run(tmp_path, 2 * batch).peak().bytes == found.doubled_bytes
    assert found.doubled_bytes == run(tmp_path, batch).larger_batch().doubled_bytes
    assert snapshot(tmp_path, batch).peak().bytes == found.growing_bytes + found.fixed_bytes


@pytest.mark.parametrize("limit", [5600, 9000, 20_000])
def test_the_largest_batch(tmp_path: Path, limit: int) -> None:
    """A run with the largest batch stays within the limit, and one sample more exceeds it."""
    factor = snapshot(tmp_path, 2).larger_batch(0, limit).factor
    assert factor is not None
    largest = int(2 * factor)
    assert run(tmp_path, largest).peak().bytes <= limit < run(tmp_path, largest + 1).peak().bytes


def test_no_batch_fits(tmp_path: Path) -> None:
    """What does not grow exceeds the limit."""
    assert 0 == snapshot(tmp_path, 2).larger_batch(0, 3000).factor


def test_the_limit_of_a_failure(tmp_path: Path) -> None:
    """The limit is what the GPU had when an allocation failed."""
    failed = {**event("oom", 0, 9999), "device_free": 600}
    parts = [segment([{**block(100, 1000), "frames": []}, block(1100, 4400, "inactive")])]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[*step(2), failed]], parts))
    assert found.larger_batch(0, 6000).factor == found.larger_batch().factor != found.larger_batch(0, 9000).factor


def test_the_limit_of_a_snapshot(tmp_path: Path) -> None:
    """The limit is what was reserved and left, where the snapshot says it of this GPU."""
    parts = [segment([{**block(100, 1000), "frames": []}, block(1100, 4400, "inactive")])]
    path = tmp_path / "a.pickle"
    for own, limit in (
        ({"device": 0, "free_bytes": 600}, 6000),
        ({"device": 1, "free_bytes": 600}, None),
        ({"device": 0, "free_bytes": None}, None),
        ({"free_bytes": "many"}, None),
        ("none", None),
    ):
        assert limit == instrument.read_memory(write(path, [step(2)], parts, instrument=own)).known_limit()


def test_nothing_grows(tmp_path: Path) -> None:
    """Without activations or batches, the peak stays, and any batch fits."""
    events = [event("segment_alloc", 100, 1000)]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events], OLDER)).larger_batch(0, 9999)
    assert (0, 1000, 1000, "", 9999, None) == tuple(found)
    assert [] == batch_texts(found)


@pytest.mark.parametrize("batches", [(1, 2), (8, 2), (2, 40)])
def test_two_snapshots(tmp_path: Path, batches: tuple[int, int]) -> None:
    """The peak with another batch is that of a run with it, also if it is in another pass than in both."""
    before, after = (side(snapshot(tmp_path, batch)) for batch in batches)
    fit = fit_batches(before, after, batches)
    for batch in (1, 3, 20, 100):
        assert run(tmp_path, batch).peak().bytes == fit.peak(batch)
    assert ("optimizer", "forward") == (fit.highest(1).pass_name, fit.highest(100).pass_name)
    largest = fit.largest(20_000)
    assert largest is not None
    assert fit.peak(largest) <= 20_000 < fit.peak(largest + 1)
    assert 0 == fit.largest(4000)  # the optimizer, which does not grow, needs more


def side(of: instrument.MemorySnapshot) -> tuple[Any, Any]:
    return of.timeline(), of.passes


def test_what_does_not_grow(tmp_path: Path) -> None:
    """Without a pass that grows, any batch fits, or none."""
    same = side(snapshot(tmp_path, 4))
    fit = fit_batches(same, same, (2, 5))
    assert (None, 0) == (fit.largest(9999), fit.largest(999))
    with pytest.raises(ValueError, match="needs snapshots with recorded events"):
        fit_batches(same, side(instrument.read_memory(write(tmp_path / "b.pickle", [[]], OLDER))), (2, 5))


def test_snapshots_of_other_programs(tmp_path: Path) -> None:
    """Two snapshots that cannot be of one program give no estimate, and the error says why."""
    forward = side(instrument.read_memory(write(tmp_path / "f.pickle", [step(9)[:3]], OLDER)))
    small, large = side(snapshot(tmp_path, 2)), side(snapshot(tmp_path, 40))
    with pytest.raises(ValueError, match="the same passes: forward; and forward, backward, optimizer"):
        fit_batches(forward, small, (9, 2))
    for sides, batches in (((small, large), (4, 2)), ((large, small), (2, 4))):
        with pytest.raises(ValueError, match=r"with a batch of 2 the forward pass needs .* with 4 only"):
            fit_batches(*sides, batches)


def test_a_failure_within_the_limit(tmp_path: Path) -> None:
    """After an allocation that failed for fragmentation, it is not known how much larger the batch can be."""
    failed = {**event("oom", 0, 300, frames=FORWARD), "device_free": 10}
    parts = [segment([{**block(100, 1000), "frames": []}, block(1100, 8000, "inactive")])]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[*step(2)[:2], failed]], parts))
    assert found.larger_batch().factor is None
    assert (found.larger_batch(0, 20_000).factor or 0) > 1  # another GPU


def test_a_limit_of_more_than_64_bits(tmp_path: Path) -> None:
    """What the driver had left may be any number."""
    own = {"device": 0, "free_bytes": 2**63 - 1}
    found = instrument.read_memory(write(tmp_path / "a.pickle", [step(2)], OLDER, instrument=own)).larger_batch()
    assert 2**63 - 1 + 1000 == found.limit_bytes
    assert (found.factor or 0) > 1e15


def test_pass_peaks(tmp_path: Path) -> None:
    """The highest memory in each kind of pass."""
    assert {"forward": 2400, "backward": 3240, "optimizer": 5540} == snapshot(tmp_path, 4).pass_peaks()


def test_a_batch_that_does_not_fit(tmp_path: Path) -> None:
    """An allocation that failed belongs to the batch, which must be smaller."""
    failed = {**event("oom", 0, 1000, frames=FORWARD), "device_free": 100}
    parts = [segment([{**block(100, 1000), "frames": []}, block(1100, 700, "inactive")])]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[*step(2)[:2], failed]], parts)).larger_batch()
    assert (620, 1000, 1800, 0.494) == (
        found.growing_bytes, found.fixed_bytes, found.limit_bytes, round(found.factor or 0, 3),
    )  # fmt: skip
    assert (
        "This batch does not fit into 1.80 kB: it can be 0.49 times as large, which is 3."
        == batch_texts(found, 8)[1]
    )
    assert "No batch fits into 900 B" in batch_texts(found._replace(limit_bytes=900, factor=0.0))[1]


def test_what_steps_leave_behind(tmp_path: Path) -> None:
    """Memory that several steps left behind does not grow with the batch."""
    kept = [event("alloc", 50 + number, 500, frames=KEPT) for number in range(3)]
    events = [each for one in kept for each in (*step(2)[1:], one, event("free_completed", 6, 1000, frames=BATCH))]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[dict(each) for each in events]], OLDER))
    assert [1000] == [growth.bytes for _, growth in found.growth()]
    assert found.larger_batch().doubled_bytes - found.peak().bytes <= 2 * 340


@pytest.mark.parametrize("limit", [0, -1, 2**63, 1.5, True, "80GB"])
def test_wrong_limits(tmp_path: Path, limit: Any) -> None:
    """The error names the argument and what is accepted."""
    with pytest.raises(ValueError, match='"limit_bytes" must be a number of bytes'):
        snapshot(tmp_path, 2).larger_batch(0, limit)


def test_wrong_gpus_and_numbers(tmp_path: Path) -> None:
    """Every method refuses a GPU that the snapshot does not have."""
    found = snapshot(tmp_path, 2)
    for device in (-1, 7, "0", None, True):
        for method in (
            found.peak, found.break_down, found.largest_blocks, found.timeline, found.state, found.failures,
            found.failed, found.complete_steps, found.driver_traffic, found.growth, found.pass_peaks,
            found.larger_batch, found.known_limit,
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r'"device" must be a GPU with memory in .* \(0\)'):
                method(device)
    for most in (0, -1, "3", True):
        for method in (found.failures, found.largest_blocks):
            with pytest.raises(ValueError, match='"most" must be a number from 1'):
                method(0, most)
