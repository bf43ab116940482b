"""The test of two samples of step lengths: false alarms, power, and the detectable change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from instrument.explain.comparison.significance import ALPHA, MINIMUM, block_size, significance
from instrument.read.tables.table import Array

RECORDED = Path(__file__).parents[1] / "data" / "cpu_loops.json"
LOOPS = {
    name: np.array(lengths, np.int64)
    for name, lengths in json.loads((Path(__file__).parents[1] / "data" / "cpu_loops.json").read_text())[
        "loops"
    ].items()
}


def draw(random: np.random.Generator, steps: int, variation: float, factor: float = 1.0) -> Array:
    """Return lengths with this coefficient of variation."""
    return np.rint(1e8 * factor * np.exp(variation * random.normal(size=steps))).astype(np.int64)


def is_change(before: Array, after: Array) -> bool:
    found = significance(before, after).p_value
    return found is not None and found <= ALPHA


@pytest.mark.corpus
def test_false_alarms_in_recorded_loops() -> None:
    """Random halves of loops that were recorded on a CPU differ significantly in at most 5 % of 200 draws."""
    random, names, alarms = np.random.default_rng(7), sorted(LOOPS), 0
    for number in range(200):
        lengths = LOOPS[names[number % len(names)]]
        order = random.permutation(len(lengths))
        alarms += is_change(lengths[order[::2]], lengths[order[1::2]])
    assert alarms <= 10


def test_successive_halves_of_recorded_loops() -> None:
    """The first and the second half of these loops differ in at most one of 16, although a machine drifts."""
    alarms = [name for name, lengths in LOOPS.items() if is_change(lengths[:30], lengths[30:])]
    assert len(alarms) <= 1


def test_a_small_change_is_found() -> None:
    """3 % are found with ten steps on each side that vary by 1.5 %."""
    random = np.random.default_rng(1)
    found = sum(is_change(draw(random, 10, 0.015), draw(random, 10, 0.015, 1.03)) for _ in range(200))
    assert found >= 0.95 * 200


@pytest.mark.corpus
@pytest.mark.parametrize(("steps", "variation"), [(10, 0.015), (6, 0.05), (30, 0.03)])
def test_the_detectable_change(steps: int, variation: float) -> None:
    """A change equal to the detectable one is found in 70 to 90 % of cases."""
    random = np.random.default_rng(2)
    typical = np.median(
        [significance(draw(random, steps, variation), draw(random, steps, variation))[1] for _ in range(30)]
    )
    found = sum(
        is_change(draw(random, steps, variation), draw(random, steps, variation, 1 + typical)) for _ in range(120)
    )
    assert 0.7 * 120 <= found <= 0.9 * 120


def test_few_steps() -> None:
    """With fewer than four steps on a side nothing is significant."""
    assert significance(np.array([1, 2, 3]), np.arange(100, 120))[:3] == (None, None, 0)


def test_equal_samples() -> None:
    """Equal samples do not differ, and steps without variation show any change above the minimum effect."""
    same = np.full(10, 1_000_000)
    assert significance(same, same)[:2] == (1.0, MINIMUM)
    assert is_change(same, same * 2)
    assert not is_change(same, np.full(10, 1_004_000))


def test_the_minimum_effect() -> None:
    """A change below the minimum effect is none, however many steps show it."""
    random = np.random.default_rng(3)
    assert not is_change(draw(random, 2000, 0.002), draw(random, 2000, 0.002, 1.004))
    assert is_change(draw(random, 2000, 0.002), draw(random, 2000, 0.002, 1.007))


def test_samples_that_vary_differently() -> None:
    """A small sample that varies much beside a large one that varies little gives few false alarms."""
    random = np.random.default_rng(6)
    alarms = sum(is_change(draw(random, 10, 0.03), draw(random, 40, 0.01)) for _ in range(100))
    assert alarms <= 12  # a test of the plain difference of the means gives 19


def test_zero_lengths_and_outliers() -> None:
    """Steps of no length, and single steps that are far too long, are accepted."""
    assert significance(np.zeros(5, np.int64), np.zeros(5, np.int64)).p_value == 1.0
    random = np.random.default_rng(4)
    before, after = draw(random, 20, 0.01), draw(random, 20, 0.01, 1.04)
    before[3], after[5] = 10**12, 1
    assert is_change(before, after)


def test_dependent_steps() -> None:
    """Steps that depend on the steps before them count as fewer."""
    random = np.random.default_rng(5)
    series = [0.0]
    for _ in range(199):
        series.append(0.8 * series[-1] + random.normal())
    dependent = np.array(series)
    assert block_size([dependent, dependent]) >= 4
    assert block_size([random.normal(size=200), random.normal(size=200)]) <= 2
    assert block_size([np.ones(8), np.ones(8)]) == 1
