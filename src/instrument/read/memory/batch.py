"""`LargerBatch` and `BatchFit`: estimates of the memory that another batch size needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...base.units import count, percentage, size
from ..tables.table import Array
from .categories import CATEGORIES
from .passes import OPTIMIZER_STEP, PASS_NAMES, Passes
from .shortage import FailedAllocation
from .timeline import Timeline

_MANY = 10  # times as large: from there without decimals
_STRETCHES = 8  # of a pass: its highest memory moves from its end to its begin as the batch grows
_LEAST_GROWTH = 0.99  # of a pass: what else differs from run to run
_GROWING = ("activations", "temporaries", "other")
ASSUMPTION = (
    "activations, batches, and the temporaries of forward and backward pass grow in proportion to the batch; "
    "parameters and their casts, gradients, the optimizer and what steps leave behind do not. What the optimizer "
    "makes in its first step and keeps is there in later ones. Memory that fragmentation loses is not counted, "
    "and of a step that is not complete only what was recorded"
)
"""What the estimate from one snapshot assumes."""
FIT_ASSUMPTION = (
    "each eighth of a pass grows by the same number of bytes for each sample; fragmentation is not counted, and "
    "what steps leave behind is the same in both"
)
"""What the estimate from two snapshots assumes."""


class LargerBatch(NamedTuple):
    """What a larger batch would need, as an estimate from one snapshot; see `ASSUMPTION`.

    Attributes:
        growing_bytes: what of the peak grows with the batch.
        fixed_bytes: what does not.
        doubled_bytes: the peak with a batch twice as large. It may be at another time than the recorded peak.
        doubled_pass: the pass in which that would be: "forward", "backward" or "optimizer"; empty if it is before
            the recorded events.
        limit_bytes: the memory that the GPU has for the program; None if it is not known.
        factor: how many times as large a batch may be until the peak reaches the limit: less than 1 if this one
            exceeds it, and 0 if even what does not grow does. None without a limit, if nothing grows, or if an
            allocation failed although the peak is within the limit: fragmentation then decides.
    """

    growing_bytes: int
    fixed_bytes: int
    doubled_bytes: int
    doubled_pass: str
    limit_bytes: int | None
    factor: float | None


def larger_batch(
    timeline: Timeline,
    left_behind: Array,
    passes: Passes,
    failures: Sequence[FailedAllocation],
    limit_bytes: int | None,
) -> LargerBatch:
    """Return what a larger batch would need.

    Args:
        timeline: all points of a snapshot.
        left_behind: the bytes at each point that steps left behind.
        passes: its passes.
        failures: the allocations that failed, which the batch needs too.
        limit_bytes: the memory that the GPU has for the program; None if it is not known.
    """
    used, in_optimizer = timeline.used_bytes, np.append(passes.kind, -1)[timeline.event] == OPTIMIZER_STEP
    activations, temporaries, other = (timeline.bytes[list(CATEGORIES).index(name)] for name in _GROWING)
    # The temporaries of an optimizer do not grow.
    growing = activations + other + np.where(in_optimizer, 0, temporaries) - left_behind
    peak = int(used.argmax())
    parts = int(growing[peak]), int(used[peak] - growing[peak])
    for failed in failures:
        point = int(np.searchsorted(timeline.event, failed.event))
        used[point] += failed.bytes
        growing[point] += 0 if in_optimizer[point] else failed.bytes
    used += _as_later(timeline).used_bytes - timeline.used_bytes
    doubled = used + growing
    event = int(timeline.event[doubled.argmax()])
    pass_ = PASS_NAMES[passes.kind[event]] if event >= 0 else ""
    factor = _factor(used - growing, growing, limit_bytes)
    fragmented = limit_bytes is not None and any((each.limit_bytes or 0) >= limit_bytes for each in failures)
    if factor is not None and factor >= 1 and fragmented:
        factor = None
    return LargerBatch(*parts, int(doubled.max()), pass_, limit_bytes, factor)


def _as_later(timeline: Timeline) -> Timeline:
    """Return ``timeline`` with what the optimizer keeps at its end at all times, as in the steps that follow."""
    rows, state = timeline.bytes.copy(), list(CATEGORIES).index("optimizer_state")
    rows[state] = np.maximum(rows[state], rows[state, -1])
    return replace(timeline, bytes=rows)


def _factor(fixed: Array, growing: Array, limit_bytes: int | None) -> float | None:
    grows = growing > 0
    if limit_bytes is None or not grows.any():
        return None
    limit = float(limit_bytes)  # the sum of two numbers of 64 bits
    if fixed.max() > limit:
        return 0.0
    return float(((limit - fixed[grows]) / growing[grows]).min())


def batch_texts(larger: LargerBatch, batch: int | None = None) -> list[str]:
    """Return the estimate and its assumption in sentences; none if nothing grows.

    Args:
        larger: the estimate.
        batch: the batch size of the snapshot; None if it is not known.
    """
    whole = larger.growing_bytes + larger.fixed_bytes
    if larger.doubled_bytes == whole and larger.factor is None:
        return []
    part = "Nothing"
    if larger.growing_bytes:
        part = f"{size(larger.growing_bytes)} ({percentage(larger.growing_bytes / whole)})"
    text = (
        f"{part} of the peak grows with the batch. With a batch twice as large, "
        f"the peak would be {size(larger.doubled_bytes)}{_in_pass(larger.doubled_pass)}."
    )
    limit = []
    if larger.factor is not None:
        limit = [_limit_text(larger, larger.factor, batch)]
    elif batch and larger.limit_bytes is None:
        limit = ["How large the batch can be is not known without the memory of the GPU: see --limit."]
    return [text, *limit, f"Assumed: {ASSUMPTION}."]


def _in_pass(name: str) -> str:
    if not name:
        return ""
    return ", in the step of the optimizer" if name == PASS_NAMES[OPTIMIZER_STEP] else f", in the {name} pass"


def _limit_text(larger: LargerBatch, factor: float, batch: int | None) -> str:
    limit = size(larger.limit_bytes or 0)
    if factor == 0:
        return f"No batch fits into {limit}: what does not grow with it needs more."
    times = f"{factor:.2f}" if factor < _MANY else count(int(factor))
    largest = f", which is {count(int(batch * factor))}" if batch else ""
    if factor < 1:
        return f"This batch does not fit into {limit}: it can be {times} times as large{largest}."
    return f"The batch can be {times} times as large{largest}, until {limit} is full."


class StretchFit(NamedTuple):
    """The highest memory of a part of a pass as a line through two snapshots; see `FIT_ASSUMPTION`.

    Attributes:
        pass_name: "forward", "backward" or "optimizer".
        fixed_bytes: what it would be without a batch.
        bytes_per_sample: by how much it grows for each sample.
    """

    pass_name: str
    fixed_bytes: float
    bytes_per_sample: float

    def bytes(self, batch: int) -> float:
        """Return the highest memory with a batch of so many samples."""
        return self.fixed_bytes + self.bytes_per_sample * batch


class BatchFit(NamedTuple):
    """The peak for each batch size, as an estimate from two snapshots: the highest of the stretches.

    Attributes:
        batches: the batch sizes of the snapshots.
        stretches: the parts of passes that both snapshots have.
    """

    batches: tuple[int, int]
    stretches: tuple[StretchFit, ...]

    def highest(self, batch: int) -> StretchFit:
        """Return the stretch in which the peak is with a batch of so many samples."""
        return max(self.stretches, key=lambda each: each.bytes(batch))

    def peak(self, batch: int) -> int:
        """Return the estimated peak with a batch of so many samples, in bytes."""
        return round(self.highest(batch).bytes(batch))

    def largest(self, limit_bytes: int) -> int | None:
        """Return the largest batch whose peak is within a limit: 0 if none is, and None if any is."""
        if any(each.bytes(0) > limit_bytes and each.bytes_per_sample <= 0 for each in self.stretches):
            return 0
        limits = [
            (limit_bytes - each.fixed_bytes) // each.bytes_per_sample
            for each in self.stretches
            if each.bytes_per_sample > 0
        ]
        return max(int(min(limits)), 0) if limits else None


def pass_peaks(timeline: Timeline, passes: Passes, stretches: int = 1) -> dict[tuple[str, int], int]:
    """Return the highest memory in use in each kind of pass, in bytes, by its name and the stretch.

    Args:
        timeline: all points of a snapshot.
        passes: its passes.
        stretches: into how many stretches of equal length each pass is divided.
    """
    event, used = timeline.event[1:], timeline.used_bytes[1:]
    kind, number = passes.kind[event], passes.number[event]
    _, first, length = np.unique(number, return_index=True, return_counts=True)
    first, length = np.repeat(first, length), np.repeat(length, length)
    stretch = (np.arange(len(event)) - first) * stretches // np.maximum(length, 1)
    peaks = {}
    for name, each in ((name, each) for name in range(len(PASS_NAMES)) for each in range(stretches)):
        own = used[(kind == name) & (stretch == each)]
        if len(own):
            peaks[PASS_NAMES[name], each] = int(own.max())
    return peaks


def fit_batches(
    before: tuple[Timeline, Passes], after: tuple[Timeline, Passes], batches: tuple[int, int]
) -> BatchFit:
    """Return lines through the stretches of two snapshots.

    Args:
        before: the timeline and the passes of the first snapshot.
        after: those of the second one.
        batches: their batch sizes, which differ.

    Raises:
        ValueError: the snapshots have no recorded events or not the same passes, or a pass needs less memory with
            the larger batch.
    """
    sides = [(_as_later(timeline), passes) for timeline, passes in (before, after)]
    one, two = (pass_peaks(*each) for each in sides)
    _check_alike(one, two, batches)
    one, two = (pass_peaks(*each, _STRETCHES) for each in sides)
    fits = []
    for key in [key for key in one if key in two]:
        slope = (two[key] - one[key]) / (batches[1] - batches[0])
        fits.append(StretchFit(key[0], one[key] - slope * batches[0], slope))
    return BatchFit(batches, tuple(fits))


def _check_alike(
    one: dict[tuple[str, int], int], two: dict[tuple[str, int], int], batches: tuple[int, int]
) -> None:
    """Raise an error unless the highest memory of the passes can be that of one program."""
    needs = "an estimate from two batch sizes needs"
    if not one or not two:
        raise ValueError(f"{needs} snapshots with recorded events")
    if one.keys() != two.keys():
        names = [", ".join(name for name, _ in passes) for passes in (one, two)]
        raise ValueError(f"{needs} snapshots of the same passes: {names[0]}; and {names[1]}")
    small, large = (one, two) if batches[0] < batches[1] else (two, one)
    for key, highest in small.items():
        if large[key] < highest * _LEAST_GROWTH:
            raise ValueError(
                f"{needs} snapshots of the same program: with a batch of {count(min(batches))} the {key[0]} pass "
                f"needs {size(highest)}, with {count(max(batches))} only {size(large[key])}"
            )


def fit_texts(fit: BatchFit, limit_bytes: int | None = None) -> list[str]:
    """Return the estimate and its assumption in sentences.

    Args:
        fit: the estimate.
        limit_bytes: the memory that the GPU has for the program; None if it is not known.
    """
    twice = 2 * max(fit.batches)
    where = _in_pass(fit.highest(twice).pass_name)
    texts = [f"With a batch of {count(twice)}, the peak would be {size(fit.peak(twice))}{where}."]
    if limit_bytes is not None:
        largest = fit.largest(limit_bytes)
        said = "any" if largest is None else count(largest) if largest else "none"
        texts.append(f"The largest batch within {size(limit_bytes)}: {said}.")
    return [*texts, f"Assumed: {FIT_ASSUMPTION}."]
