"""Chooses the events of a few steps, as if only those had been recorded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..traces.region_cycles import MIN_CALLS
from ..traces.step_content import process_of_threads
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .parts import ALL_ARGS, Part, part

_ON_CPU = ("operators", "regions", "frames", "runtime", "memory", "counters", "others", "gpu_regions")


class ChosenSteps(NamedTuple):
    """The steps that stay: those in the middle of the recording.

    Attributes:
        first: the number of the first one.
        last: the number of the last one.
        kept: how many they are.
        of: how many are in the file.
        begin_ns: the start of the first one.
        end_ns: the end of the last one on the CPU.
    """

    first: int
    last: int
    kept: int
    of: int
    begin_ns: int
    end_ns: int


def middle_steps(trace: Trace, count: int) -> ChosenSteps:
    """Return this many steps from the middle of a trace with steps: the first and the last ones are less typical.

    Of several processes, the one with most steps counts.

    Raises:
        ValueError: the trace has no steps; or they are calls of a region, and ``count`` is less than three.
    """
    steps, process_of = trace.steps, process_of_threads(trace)[trace.steps.thread]
    if not steps:
        raise ValueError(f'"steps" must be left out: {trace.path} has no steps')
    if trace.steps_from and count < MIN_CALLS:
        raise ValueError(f'"steps" must be at least {MIN_CALLS} where calls of a region are the steps: {count}')
    own = steps.where(process_of == np.bincount(process_of - process_of.min()).argmax() + process_of.min())
    begin = max(len(own) - count + 1, 0) // 2
    chosen = own.where(slice(begin, begin + count))
    numbers = chosen.number.tolist()
    bounds = int(chosen.start_ns.min()), int(chosen.end_ns.max())
    return ChosenSteps(numbers[0], numbers[-1], len(chosen), len(own), *bounds)


def parts_of_steps(trace: Trace, chosen: ChosenSteps) -> dict[str, Part]:
    """Return the events of some steps with all their args.

    On the CPU, all events stay that overlap the time of the steps. Of the GPU work, what these launch stays, and
    what runs in that time but was launched before it, without its launch, as at the head of any recording.

    Args:
        trace: the trace as it was read.
        chosen: the steps.
    """
    kept = {name: _overlaps(getattr(trace, name), chosen.begin_ns, chosen.end_ns) for name in _ON_CPU}
    starts = trace.steps.start_ns
    kept["steps"] = (starts >= chosen.begin_ns) & (starts < chosen.end_ns)
    kept["gpu"] = _work(trace, kept, chosen)
    called = np.isin(trace.syncs.correlation, trace.runtime.correlation[kept["runtime"]])
    kept["syncs"] = called | _overlaps(trace.syncs, chosen.begin_ns, chosen.end_ns)
    return {name: part(getattr(trace, name), mask, ((ALL_ARGS, True),)) for name, mask in kept.items()}


def _overlaps(table: Table, begin_ns: int, end_ns: int) -> Array:
    starts = (table.start_ns >= begin_ns) | (table.end_ns > begin_ns)
    found: Array = starts & (table.start_ns < end_ns)
    return found


def _work(trace: Trace, kept: dict[str, Array], chosen: ChosenSteps) -> Array:
    """Return a mask of the GPU work of the steps, and of the work that still runs when they begin."""
    gpu = trace.gpu
    launched, at = np.zeros(len(gpu), bool), np.full(len(gpu), np.iinfo(np.int64).min)
    known = np.zeros(len(gpu), bool)
    for link, name in (("operator", "operators"), ("launch", "runtime")):  # a launch says more than an operator
        some = np.flatnonzero(gpu[link] >= 0)
        rows = gpu[link][some]
        launched[some], at[some] = kept[name][rows], getattr(trace, name).start_ns[rows]
        known[some] = True
    last = int(gpu.end_ns[launched].max(initial=chosen.end_ns))
    running = _overlaps(gpu, chosen.begin_ns, last)
    found: Array = launched | (running & (~known | (at < chosen.begin_ns)))
    return found
