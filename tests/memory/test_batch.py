"""What another batch size would need: an estimate from one snapshot, and from two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.memory.batch import fit_batches

from .snapshots import block, event, segment, write
from .test_breakdown import BATCH, FORWARD, OLDER, OPTIMIZER


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


def snapshot(path: Path, batch: int) -> instrument.MemorySnapshot:
    return instrument.read_memory(write(path / f"{batch}.pickle", [step(batch)], OLDER))


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 40])
def test_twice_the_batch(tmp_path: Path, batch: int) -> None:
    """The estimate for twice the batch is the peak of a run with it, also if that is at another time."""
    found = snapshot(tmp_path, batch).larger_batch()
    assert snapshot(tmp_path, 2 * batch).peak().bytes == found.doubled_bytes
    assert snapshot(tmp_path, batch).peak().bytes == found.growing_bytes + found.fixed_bytes


@pytest.mark.parametrize("limit", [5600, 9000, 20_000])
def test_the_largest_batch(tmp_path: Path, limit: int) -> None:
    """A run with the largest batch stays within the limit, and one sample more exceeds it."""
    factor = snapshot(tmp_path, 2).larger_batch(0, limit).factor
    assert factor is not None
    largest = int(2 * factor)
    assert snapshot(tmp_path, largest).peak().bytes <= limit < snapshot(tmp_path, largest + 1).peak().bytes


def test_no_batch_fits(tmp_path: Path) -> None:
    """What does not grow exceeds the limit."""
    assert 0 == snapshot(tmp_path, 2).larger_batch(0, 3000).factor


def test_the_limit_of_a_failure(tmp_path: Path) -> None:
    """The limit is what the GPU had when an allocation failed."""
    failed = {**event("oom", 0, 9999), "device_free": 600}
    parts = [segment([{**block(100, 1000), "frames": []}, block(1100, 4400, "inactive")])]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[*step(2), failed]], parts))
    assert found.larger_batch(0, 6000).factor == found.larger_batch().factor != found.larger_batch(0, 9000).factor


def test_nothing_grows(tmp_path: Path) -> None:
    """Without activations or batches, the peak stays, and any batch fits."""
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[]], OLDER)).larger_batch(0, 9999)
    assert (0, 1000, 1000, None) == tuple(found)


def test_two_snapshots() -> None:
    """The peak is a line through two of them."""
    fit = fit_batches((1800, 3000), (2, 5))
    assert (1000, 400) == tuple(fit)
    assert (5, 0) == (fit.largest(3399), fit.largest(500))
    assert fit_batches((1800, 1800), (2, 5)).largest(9999) is None
