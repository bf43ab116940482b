"""Findings and what a replay of the steps without their cause wins."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

import instrument
from tests.replay.machine import Machine


def test_findings_are_ordered_by_replayed_wins() -> None:
    """The replay finds that input waits are hidden behind GPU work, and that kernels are not."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.launch(2_000_000)
            machine.work(1_000_000, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
            machine.synchronize()
            machine.work(500_000, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    found = {each.rule: each for each in instrument.diagnose(machine.trace()).findings}
    waits = found["input-wait"]
    assert waits.replayed_ns is not None
    assert waits.win_ns is not None
    assert waits.likely_win_ns == waits.replayed_ns <= waits.win_ns
    without = {each.rule: each for each in instrument.diagnose(machine.trace(), what_if=False).findings}
    assert without["input-wait"].replayed_ns is None
    assert without["input-wait"].likely_win_ns == waits.win_ns


def test_a_finding_off_the_critical_path() -> None:
    """Copies that other work hides win only the CPU time of their launches, and text says if nothing is left."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            for _ in range(20):
                machine.launch(100_000, 8, "Memcpy HtoD (Pinned -> Device)")
            machine.launch(10_000)
            machine.work(5_000_000)
    diagnosis = instrument.diagnose(machine.trace())
    copies = next(each for each in diagnosis.findings if each.rule == "exposed-copies")
    assert copies.replayed_ns == 20 * machine.costs.call
    assert diagnosis.win_text(copies).startswith("40.0 us (0.8 %) in a replay, at most 1.99 ms per step")
    off = replace(copies, replayed_ns=0)
    assert "nothing in a replay, as something else takes as long; at most" in diagnosis.win_text(off)
    assert json.loads(diagnosis.to_json())["replay"]["self_error"] == 0


@pytest.mark.parametrize("copy_us", [200, 900])
def test_copies_ahead_of_use(copy_us: int) -> None:
    """The fix of copies from pageable memory hides them behind other work, and other work behind them."""
    machine = Machine()
    for number in range(12):
        if number == 4:
            machine.begin()
        with machine.step() if number >= 4 else nullcontext():
            machine.copy(copy_us * 1_000)
            for _ in range(10):
                machine.work(5_000)
                machine.launch(50_000)
    guess = instrument.diagnose(machine.trace()).what_if(fix="exposed-copies")
    assert guess.before_ns > (500 + copy_us) * 1_000
    assert guess.step_ns == pytest.approx(max(500, copy_us) * 1_000, rel=0.03)
