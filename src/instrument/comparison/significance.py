"""Says whether two samples of step lengths differ by more than chance, and which change they could have shown.

The sample is the steps, on a logarithmic scale, so that changes are relative. The statistic is the difference of
the means without the longest and the shortest tenth (trimmed means; Yuen 1974). Its distribution without a change
is that over random divisions of all steps into two samples (a permutation test).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ..traces.table import Array

ALPHA = 0.05
"""The probability of a false alarm, at most."""

MINIMUM = 0.005
"""The minimum effect: a relative change that counts as none."""

MIN_STEPS = 4
"""The steps on each side, from which a change can be significant."""

_TRIMMED = 0.1
_LAGS, _SMALL = 5, 0.05
_CHANCE = 1.28  # standard errors of a correlation: above it, one in ten independent samples
_PERMUTATIONS, _MOST_NUMBERS = 10_000, 4_000_000
_POWER = NormalDist().inv_cdf(0.8)


class Significance(NamedTuple):
    """The test of two samples.

    Attributes:
        p_value: the probability of a difference like this, or a larger one, if the true change is at most
            `MINIMUM`; None with fewer than `MIN_STEPS` steps on a side.
        detectable: the smallest relative change that such samples show in 80 % of cases; None like ``p_value``.
    """

    p_value: float | None
    detectable: float | None


def significance(before_ns: Array, after_ns: Array) -> Significance:
    """Return the test of the lengths of steps before and after a change."""
    samples = [np.log(np.maximum(lengths, 1)) for lengths in (before_ns, after_ns)]
    if min(map(len, samples)) < MIN_STEPS:
        return Significance(None, None)
    size = block_size(samples)
    before, after = (_blocks(sample, size) for sample in samples)
    return Significance(_p_value(before, after), _detectable(before, after))


def block_size(samples: Sequence[Array]) -> int:
    """Return how many successive steps count as one, because their lengths depend on each other.

    That is 1 + 2 (r1 + r2 + ...), by which the variance of the mean of such a series grows (Bartlett 1946), where
    rk is the correlation of steps that are k apart, up to the first that is small; but 1 if r1 may be chance, and
    never so many that fewer than `MIN_STEPS` blocks remain.
    """
    centered = [values - values.mean() for values in (_without_outliers(sample) for sample in samples)]
    steps = sum(map(len, centered))
    total = sum(float((values**2).sum()) for values in centered)
    if not total:
        return 1
    growth = 1.0
    for lag in range(1, _LAGS + 1):
        r = sum(float((values[lag:] * values[:-lag]).sum()) for values in centered) / total
        if r < (_CHANCE / math.sqrt(steps) if lag == 1 else _SMALL):
            break
        growth += 2 * r
    return min(math.ceil(growth), min(map(len, samples)) // MIN_STEPS)


def _without_outliers(values: Array) -> Array:
    """Return the values, where the longest and shortest twentieth are replaced by the next ones."""
    clipped: Array = np.clip(values, *np.quantile(values, (0.05, 0.95)))
    return clipped


def _blocks(values: Array, size: int) -> Array:
    """Return the means of successive blocks; steps at the beginning that fill no block are left out."""
    count = len(values) // size
    means: Array = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def _trimmed_mean(values: Array) -> Array:
    """Return the mean of each row without its longest and shortest tenth."""
    cut = int(_TRIMMED * values.shape[-1])
    mean: Array = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)
    return mean


def _p_value(before: Array, after: Array) -> float:
    """Return the p-value against every true change of at most the minimum effect.

    Of these, the one next to the observed difference makes it most probable: that change is taken out of the
    samples, and the probability of a difference as far on the other side of the range is added.
    """
    least = math.log1p(MINIMUM)
    difference = float(_trimmed_mean(after) - _trimmed_mean(before))
    sign = 1 if difference > 0 else -1
    rest = difference - sign * least
    if sign * rest <= 0:
        return 1.0
    both = np.concatenate((before, after - sign * least))
    random = np.random.default_rng(0)
    count = max(min(_PERMUTATIONS, _MOST_NUMBERS // len(both)), 200)
    mixed = random.permuted(np.broadcast_to(both, (count, len(both))), axis=1)
    chance = sign * (_trimmed_mean(mixed[:, len(before) :]) - _trimmed_mean(mixed[:, : len(before)]))
    as_far = np.count_nonzero(chance >= sign * rest - 1e-12)
    as_far += np.count_nonzero(chance <= -(sign * rest + 2 * least))
    return float((1 + as_far) / (1 + count))


def _detectable(before: Array, after: Array) -> float:
    """Return the relative change that is found in 80 % of cases, from the standard error of the trimmed means."""
    error = math.hypot(_standard_error(before), _standard_error(after))
    least = math.log1p(MINIMUM)
    if not error:
        return MINIMUM
    freedom = len(before) + len(after) - 2
    low, high = 0.0, 10.0
    for _ in range(60):  # the difference from which the p-value is at most ALPHA, in standard errors
        middle = (low + high) / 2
        chance = NormalDist().cdf(-middle) + NormalDist().cdf(-middle - 2 * least / error)
        low, high = (middle, high) if chance > ALPHA else (low, middle)
    return math.expm1(least + error * (_student(high, freedom) + _student(_POWER, freedom)))


def _standard_error(values: Array) -> float:
    """Return the standard error of a trimmed mean (Yuen 1974)."""
    count, cut = len(values), int(_TRIMMED * len(values))
    ordered = np.sort(values)
    winsorized = np.clip(values, ordered[cut], ordered[count - 1 - cut])
    kept = count - 2 * cut
    return math.sqrt(float(((winsorized - winsorized.mean()) ** 2).sum()) / (kept * (kept - 1)))


def _student(quantile: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for one of the normal distribution (Fisher 1941)."""
    return quantile + (quantile**3 + quantile) / (4 * freedom)
