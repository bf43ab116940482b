"""`LargerBatch` and `BatchFit`: estimates of the memory that another batch size needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..traces.table import Array
from .categories import CATEGORIES
from .passes import OPTIMIZER_STEP, Passes
from .timeline import Timeline

_GROWING = ("activations", "temporaries", "other")
ASSUMPTION = (
    "activations, batches, and the temporaries of forward and backward pass grow in proportion to the batch, and "
    "nothing else does; memory that fragmentation loses is not counted"
)
"""What the estimate from one snapshot assumes."""
FIT_ASSUMPTION = "the peak grows by the same number of bytes for each sample; fragmentation is not counted"
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


class BatchFit(NamedTuple):
    """The peak as a line through two snapshots with different batches; see `FIT_ASSUMPTION`.

    Attributes:
        fixed_bytes: what it would be without a batch.
        bytes_per_sample: by how much it grows for each sample.
    """

    fixed_bytes: float
    bytes_per_sample: float

    def largest(self, limit_bytes: int) -> int | None:
        """Return the largest batch whose peak is within a limit; None if the peak does not grow."""
        if self.bytes_per_sample <= 0:
            return None
        return max(int((limit_bytes - self.fixed_bytes) // self.bytes_per_sample), 0)


def fit_batches(peaks: tuple[int, int], batches: tuple[int, int]) -> BatchFit:
    """Return the line through two peaks, in bytes, of two batch sizes, which differ."""
    slope = (peaks[1] - peaks[0]) / (batches[1] - batches[0])
    return BatchFit(peaks[0] - slope * batches[0], slope)
