"""How many stalls are found and how many alarms are false, over simulated loops."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from instrument.record.slow_steps.box import BlackBox

from .conftest import Clock

STEPS = 1000
RUNS = 12


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.2])
@pytest.mark.parametrize("drift", [1.0, 1.5])
def test_recall_and_false_alarms(sigma: float, drift: float, clock: Clock, make: Callable[..., BlackBox]) -> None:
    """At least 95 % of stalls of twice the median or more are found, and at most one alarm in 1,000 is false."""
    alarms = found = stalls = 0
    for seed in range(RUNS):
        rng = random.Random(seed)
        level = [1 + (drift - 1) * step / STEPS for step in range(STEPS)]
        steps = [10 * now * rng.lognormvariate(0, sigma) for now in level]
        at = {step + rng.randrange(20) for step in range(100, STEPS - 20, 50)}
        quiet, stalled = make(), make()
        for took in steps:
            clock.advance(took)
            quiet.step()
        stalled.clock.leave_out()
        for step, took in enumerate(steps):
            clock.advance(took + (10 * level[step] * rng.uniform(2, 10) if step in at else 0))
            stalled.step()
        alarms += quiet.alarms
        found += len({slow.step for slow in stalled.slow_steps} & at)
        stalls += len(at)
    assert found >= 0.95 * stalls
    assert alarms <= RUNS * STEPS / 1000


def test_many_slow_steps_do_not_hide_others(clock: Clock, make: Callable[..., BlackBox]) -> None:
    """With one step in 20 stalled at random, all stalls are found: they do not count as usual."""
    rng = random.Random(0)
    box = make()
    at = {step for step in range(64, STEPS) if rng.random() < 0.05}
    for step in range(STEPS):
        clock.advance(10 * rng.lognormvariate(0, 0.1) + (25 if step in at else 0))
        box.step()
    known = {slow.step for slow in box.slow_steps}
    assert len(known & at) >= 0.95 * len(at)
    assert known <= at


def test_two_kinds_of_steps(clock: Clock, make: Callable[..., BlackBox]) -> None:
    """Steps of two lengths, as with long and short texts, give no alarm; a stall does."""
    rng = random.Random(0)
    box = make()
    for step in range(STEPS):
        clock.advance((10 if rng.random() < 0.7 else 16) * rng.lognormvariate(0, 0.03))
        if step == 500:
            clock.advance(200)
        box.step()
    assert [slow.step for slow in box.slow_steps] == [500]
