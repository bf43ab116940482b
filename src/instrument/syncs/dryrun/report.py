"""`DryRunReport`: what a dry run found: synchronizations, counts, regions and memory."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from ...base.findings import Site
from ...explain.contract.numbers import Numbers
from ...explain.contract.region_tree import RegionTree
from ...explain.waits.events import CountByStep
from ...explain.waits.report import SyncReport
from ..counting.counts import Counts
from ..counting.memory import MemoryRecord
from ..counting.memory_use import MemoryUse, memory_use
from ..counting.numbers import numbers_of


@dataclass
class DryRunReport(SyncReport):
    """The synchronizations of a dry run, and what its steps do on the GPU.

    Attributes:
        counts: operators, kernels, operations, bytes and copies of a step.
        regions: the regions of that step with their calls; its modules, if it has no regions.
        allocations: what takes memory on the GPU, and when.
        counting_failed: whether an error of this library left operators uncounted.
        ended_at: the program's line at which an error ended the run; None if none did, or it is not known.
    """

    counts: Counts | None = None
    regions: RegionTree | None = None
    allocations: MemoryRecord | None = None
    counting_failed: bool = False
    ended_at: Site | None = None

    @property
    def failure(self) -> str:
        """Why the numbers cannot be compared with others; empty if they can."""
        if not self.finished:
            where = f" at {self.ended_at}" if self.ended_at is not None else ""
            return f"the run ended early{where}: {self.ended}"
        if self.unavailable_reason:
            return f"nothing could be counted: {self.unavailable_reason}"
        return "operators could not be counted, for the reason that was logged" if self.counting_failed else ""

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The counts of the step as integers by name, each with its places; empty without counts."""
        return numbers_of(self.counts, self.syncs, self.memory) if self.counts is not None else Numbers({})

    @functools.cached_property
    def memory(self) -> MemoryUse | None:
        """The memory on the GPU at its peak; None if it was not counted."""
        if self.counts is None or self.allocations is None:
            return None
        return memory_use(self.allocations, self.counts.record)


def final_counts(seen: CountByStep, steps: int, has_optimizer: bool) -> CountByStep:
    """Return the final number of calls by step, given the numbers ``seen`` during the run.

    Calls before the first update (0 in ``seen``, where steps count from 1) count for the first step, but only
    up to the most in any other step: the rest are preparations. Calls after the last step are outside the
    steps. Without an optimizer, everything is one step.
    """
    settled: CountByStep = Counter({step - 1: calls for step, calls in seen.items() if step and step <= steps})
    before, outside = seen[0], seen[None] + seen[steps + 1]
    if not has_optimizer:
        before, outside = before + seen[None], seen[steps + 1]
    others = (calls for step, calls in settled.items() if step)
    first = before if steps == 1 else min(before, max(max(others, default=0) - settled[0], 0))
    settled.update({0: first, None: before - first + outside})
    return +settled
