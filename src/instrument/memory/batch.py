"""`LargerBatch` and `BatchFit`: estimates of the memory that another batch size needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..traces.table import Array
from ..units import count, percentage, size
from .categories import CATEGORIES
from .passes import OPTIMIZER_STEP, PASS_NAMES, Passes
from .timeline import Timeline

_MANY = 10  # times as large: from there without decimals
_GROWING = ("activations", "temporaries", "other")
ASSUMPTION = (
    "activations, batches, and the temporaries of forward and backward pass grow in proportion to the batch, and "
    "nothing else does; memory that fragmentation loses is not counted"
)
"""What the estimate from one snapshot assumes."""
FIT_ASSUMPTION = "each pass grows by the same number of bytes for each sample; fragmentation is not counted"
"""What the estimate from two snapshots assumes."""


class LargerBatch(NamedTuple):
    """What a larger batch would need, as an estimate from one snapshot; see `ASSUMPTION`.

    Attributes:
        growing_bytes: what of the peak grows with the batch.
        fixed_bytes: what does not.
        doubled_bytes: the peak with a batch twice as large. It may be at another time than the recorded peak.
        factor: how many times as large a batch may be until the peak reaches the limit; 0 if even what does not
            grow exceeds it. None if no limit is given, or nothing grows.
    """

    growing_bytes: int
    fixed_bytes: int
    doubled_bytes: int
    factor: float | None


def larger_batch(timeline: Timeline, passes: Passes, limit_bytes: int | None) -> LargerBatch:
    """Return what a larger batch would need.

    Args:
        timeline: all points of a snapshot.
        passes: its passes.
        limit_bytes: the memory that the GPU has for the program; None if that is not known.
    """
    used, growing = timeline.used_bytes, _growing(timeline, passes)
    peak = int(used.argmax())
    fixed = used - growing
    grows = growing > 0
    factor = None
    if limit_bytes is not None and grows.any():
        factor = max(float(((limit_bytes - fixed[grows]) / growing[grows]).min()), 0.0)
        factor = factor if fixed.max() <= limit_bytes else 0.0
    return LargerBatch(int(growing[peak]), int(fixed[peak]), int((used + growing).max()), factor)


def _growing(timeline: Timeline, passes: Passes) -> Array:
    """Return the bytes of each point that grow with the batch; the temporaries of an optimizer do not."""
    activations, temporaries, other = (timeline.bytes[list(CATEGORIES).index(name)] for name in _GROWING)
    in_optimizer = np.append(passes.kind, -1)[timeline.event] == OPTIMIZER_STEP
    growing: Array = activations + other + np.where(in_optimizer, 0, temporaries)
    return growing


def batch_texts(found: LargerBatch, batch: int | None = None) -> list[str]:
    """Return the estimate and its assumption in sentences; none if nothing grows.

    Args:
        found: the estimate.
        batch: the batch size of the snapshot; None if it is not known.
    """
    whole = found.growing_bytes + found.fixed_bytes
    if found.doubled_bytes == whole:
        return []
    share = percentage(found.growing_bytes / whole)
    text = (
        f"{size(found.growing_bytes)} ({share}) of the peak grows with the batch. "
        f"With a batch twice as large, the peak would be {size(found.doubled_bytes)}."
    )
    if found.factor is not None:
        times = f"{found.factor:.2f}" if found.factor < _MANY else count(int(found.factor))
        largest = f", which is {count(int(batch * found.factor))}," if batch else ""
        text += f" The batch can be {times} times as large{largest} until the memory is full."
    return [text, f"Assumed: {ASSUMPTION}."]


class PassFit(NamedTuple):
    """The highest memory of a pass as a line through two snapshots with different batches; see `FIT_ASSUMPTION`.

    Attributes:
        name: "forward", "backward" or "optimizer".
        fixed_bytes: what it would be without a batch.
        bytes_per_sample: by how much it grows for each sample.
    """

    name: str
    fixed_bytes: float
    bytes_per_sample: float


class BatchFit(NamedTuple):
    """The peak for each batch size, as an estimate from two snapshots: the highest of the passes.

    Attributes:
        passes: the passes that both snapshots have.
    """

    passes: tuple[PassFit, ...]

    def peak(self, batch: int) -> int:
        """Return the estimated peak with a batch of so many samples, in bytes."""
        return round(max(each.fixed_bytes + each.bytes_per_sample * batch for each in self.passes))

    def largest(self, limit_bytes: int) -> int | None:
        """Return the largest batch whose peak is within a limit; None if no pass grows."""
        found = [
            (limit_bytes - each.fixed_bytes) // each.bytes_per_sample
            for each in self.passes
            if each.bytes_per_sample > 0
        ]
        return max(int(min(found)), 0) if found else None


def pass_peaks(timeline: Timeline, passes: Passes) -> dict[str, int]:
    """Return the highest memory in use in the passes of each kind, in bytes."""
    kind, used = passes.kind[timeline.event[1:]], timeline.used_bytes[1:]
    rows = {name: kind == number for number, name in enumerate(PASS_NAMES)}
    return {name: int(used[own].max()) for name, own in rows.items() if own.any()}


def fit_batches(before: Mapping[str, int], after: Mapping[str, int], batches: tuple[int, int]) -> BatchFit:
    """Return lines through the `pass_peaks` of two snapshots with two batch sizes, which differ."""
    fits = []
    for name in before.keys() & after.keys():
        slope = (after[name] - before[name]) / (batches[1] - batches[0])
        fits.append(PassFit(name, before[name] - slope * batches[0], slope))
    return BatchFit(tuple(sorted(fits, key=lambda each: PASS_NAMES.index(each.name))))


def fit_texts(fit: BatchFit, limit_bytes: int | None = None) -> list[str]:
    """Return the estimate and its assumption in sentences.

    Args:
        fit: the estimate.
        limit_bytes: the memory that the GPU has for the program; None if it is not known.
    """
    passes = "; ".join(
        f"{each.name} {size(each.fixed_bytes)} and {size(each.bytes_per_sample)} for each sample"
        for each in fit.passes
    )
    texts = [f"Highest memory of each pass: {passes}."]
    largest = None if limit_bytes is None else fit.largest(limit_bytes)
    if limit_bytes is not None and largest is not None:
        texts.append(f"The largest batch within {size(limit_bytes)} is {count(largest)}.")
    return [*texts, f"Assumed: {FIT_ASSUMPTION}."]
