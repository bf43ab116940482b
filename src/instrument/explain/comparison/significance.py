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

from ...read.tables.table import Array

ALPHA = 0.05
"""The probability of a false alarm, at most."""

MINIMUM = 0.005
"""The minimum effect: a relative change that counts as none."""

MIN_STEPS = 4
"""The steps on each side, from which a change can be significant."""

_TRIMMED = 0.1
_LAGS, _SMALL = 5, 0.05
_CHANCE = 2.0  # standard errors of a correlation: above it, one in forty independent samples
_NO_ERROR = 1e-12  # of a logarithm: steps without variation
_PERMUTATIONS, _MOST_NUMBERS = 10_000, 4_000_000
_POWER = NormalDist().inv_cdf(0.8)


class Significance(NamedTuple):
    """The test of two samples.

    Attributes:
        p_value: the probability of a difference like this, or a larger one, if the true change is at most
            `MINIMUM`; None with too few steps.
        detectable: the smallest relative change that such samples show in 80 % of cases; None like ``p_value``.
        sign: 1 if the steps after are longer, -1 if they are shorter; 0 with too few steps.
        unknown: why nothing can be said; empty if something can.
    """

    p_value: float | None = None
    detectable: float | None = None
    sign: int = 0
    unknown: str = ""


def significance(before_ns: Array, after_ns: Array) -> Significance:
    """Return the test of the lengths of steps before and after a change."""
    samples = [np.log(np.maximum(lengths, 1)) for lengths in (before_ns, after_ns)]
    if min(map(len, samples)) < MIN_STEPS:
        return Significance(unknown=f"a side has fewer than {MIN_STEPS} steps")
    size = block_size(samples)
    before, after = (_blocks(sample, size) for sample in samples)
    if min(len(before), len(after)) < MIN_STEPS:
        return Significance(unknown="successive steps depend on each other too much for so few")
    p_value, sign = _test(before, after)
    return Significance(p_value, _detectable(before, after), sign)


def block_size(samples: Sequence[Array]) -> int:
    """Return how many successive steps count as one, because their lengths depend on each other.

    That is 1 + 2 (r1 + r2 + ...), by which the variance of the mean of such a series grows (Bartlett 1946), where
    rk is the correlation of steps that are k apart, up to the first that is small; but 1 if r1 may be chance.
    """
    centered = [values - values.mean() for values in (_without_outliers(sample) for sample in samples)]
    steps = sum(map(len, centered))
    total = sum(float((values**2).sum()) for values in centered)
    if total < steps * _NO_ERROR**2:
        return 1
    growth = 1.0
    for lag in range(1, _LAGS + 1):
        r = sum(float((values[lag:] * values[:-lag]).sum()) for values in centered) / total
        if r < (_CHANCE / math.sqrt(steps) if lag == 1 else _SMALL):
            break
        growth += 2 * r
    return math.ceil(growth)


def _without_outliers(values: Array) -> Array:
    """Return the values, where the longest and shortest twentieth are replaced by the next ones."""
    clipped: Array = np.clip(values, *np.quantile(values, (0.05, 0.95)))
    return clipped


def _blocks(values: Array, size: int) -> Array:
    """Return the means of successive blocks; steps at the beginning that fill no block are left out."""
    count = len(values) // size
    means: Array = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def _difference(before: Array, after: Array) -> tuple[Array, Array]:
    """Return the difference of the trimmed means of each pair of rows, and its standard error (Yuen 1974)."""
    (one, error_one), (two, error_two) = map(_trimmed_mean, (before, after))
    return two - one, np.sqrt(error_one + error_two)


def _trimmed_mean(values: Array) -> tuple[Array, Array]:
    """Return the mean of each row without its longest and shortest tenth, and the square of its standard error."""
    count = values.shape[-1]
    cut = int(_TRIMMED * count)
    kept, ordered = count - 2 * cut, np.sort(values, axis=-1)
    winsorized = np.clip(ordered, ordered[..., [cut]], ordered[..., [count - 1 - cut]])
    squares = ((winsorized - winsorized.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
    return ordered[..., cut : count - cut].mean(axis=-1), squares / (kept * (kept - 1))


def _test(before: Array, after: Array) -> tuple[float, int]:
    """Return the p-value against every true change of at most the minimum effect, and the sign of the difference.

    Of these changes, the one next to the observed difference makes it most probable: that change is taken out of
    the samples, and the probability of a difference as far on the other side of the range is added. Differences
    are compared in standard errors, so that samples may vary differently (Janssen 1997).
    """
    least = math.log1p(MINIMUM)
    difference, error = (float(value) for value in _difference(before, after))
    sign = 1 if difference > 0 else -1
    rest = sign * difference - least
    if rest <= 0:
        return 1.0, sign
    both = np.concatenate((before, after - sign * least))
    count = max(min(_PERMUTATIONS, _MOST_NUMBERS // len(both)), 200)
    mixed = np.random.default_rng(0).permuted(np.broadcast_to(both, (count, len(both))), axis=1)
    chance, errors = _difference(mixed[:, : len(before)], mixed[:, len(before) :])
    chance, errors = sign * chance, np.maximum(errors, _NO_ERROR)
    observed = max(error, _NO_ERROR)
    as_far = np.count_nonzero(chance / errors >= rest / observed * (1 - 1e-9))
    as_far += np.count_nonzero(chance / errors <= -(rest + 2 * least) / observed)
    return float((1 + as_far) / (1 + count)), sign


def _detectable(before: Array, after: Array) -> float:
    """Return the relative change that is found in 80 % of cases, from the standard error of the difference."""
    error = float(_difference(before, after)[1])
    least = math.log1p(MINIMUM)
    if error < _NO_ERROR:
        return MINIMUM
    freedom = len(before) + len(after) - 2
    low, high = 0.0, 10.0
    for _ in range(60):  # the difference from which the p-value is at most ALPHA, in standard errors
        middle = (low + high) / 2
        chance = NormalDist().cdf(-middle) + NormalDist().cdf(-middle - 2 * least / error)
        low, high = (middle, high) if chance > ALPHA else (low, middle)
    return math.expm1(least + error * (_student(high, freedom) + _student(_POWER, freedom)))


def _student(quantile: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for one of the normal distribution (Fisher 1941)."""
    return quantile + (quantile**3 + quantile) / (4 * freedom)
