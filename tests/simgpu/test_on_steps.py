"""The numbers of `on_steps` that only a GPU has."""

from __future__ import annotations

import pytest
import torch

import instrument
from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


def test_waits_and_memory() -> None:
    """Every second step waits; the peak is the program's own, which stays as it is."""
    got: list[instrument.StepNumbers] = []
    held = torch.ones(1000, 1000, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with (
        instrument.detect_syncs(every=1) as syncs,
        instrument.black_box(on_steps=instrument.every(10, got.append)) as box,
    ):
        for step in range(40):
            if step % 2:
                (held + 1).sum().item()
            box.step()
            syncs.step()
    (found,) = syncs.report.syncs
    assert found.count == 20
    assert [0.5] * 3 == [numbers["instrument/syncs"] for numbers in got[1:]]
    assert 0 < got[-1]["instrument/sync_wait_s"] < 0.5 * found.blocked_ns / 1e9
    assert {torch.cuda.max_memory_allocated()} == {numbers["instrument/memory_peak_bytes"] for numbers in got}
    assert got[0]["instrument/memory_peak_bytes"] >= 2 * held.numel() * 4


def test_without_a_detector_no_waits_are_known() -> None:
    """A number that is not known is left out."""
    got: list[instrument.StepNumbers] = []
    with instrument.black_box(on_steps=instrument.every(10, got.append)) as box:
        for _ in range(20):
            torch.ones(4, device="cuda").sum().item()
            box.step()
    assert not any("sync" in name for numbers in got for name in numbers)
