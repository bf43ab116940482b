"""Takes regions for steps, in traces of programs that mark their steps in their own way."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np

from .links import link_coverage
from .main_threads import main_thread
from .region_cycles import MIN_CALLS, PART_OF_STEP, find_cycle
from .step_content import StepIndex, span
from .table import Array, Table, table
from .trace import Trace

_NUMBERS = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"(\d{1,18})\D*$")
_THEN = " -> "  # between the names of the regions of a cycle
# Of the time from the first to the last event on the CPU, and of the GPU work with a known launch
_MIN_SHARE = 0.5


def steps_from_regions(trace: Trace, steps_from: str) -> Trace:
    """Return a copy of the trace whose steps are the calls of some regions.

    Regions inside a step are part of it. The number of a step is the last number in its name if these numbers
    increase, else its place, counted from 0.

    Args:
        trace: the trace; its own steps are replaced.
        steps_from: a regular expression that is searched in the names of regions.

    Raises:
        ValueError: ``steps_from`` is not a regular expression, or no region has such a name.
    """
    try:
        chosen = trace.regions.matching("name", re.compile(steps_from))
    except (re.error, TypeError) as error:
        raise ValueError(f'"steps_from" must be a regular expression: {steps_from!r} ({error})') from None
    if not steps_from:
        raise ValueError(f'"steps_from" must be a regular expression that is not empty: {steps_from!r}')
    if not chosen.any():
        known = ", ".join(dict.fromkeys(trace.regions.where(trace.regions.parent < 0).text("name")))
        which = f"the outermost are: {known:.300}" if known else "the trace has no regions"
        raise ValueError(f'"steps_from" must match the name of a region: {steps_from!r}; {which}')
    return _with_steps(trace, np.flatnonzero(chosen & ~_is_inside(trace.regions, chosen)))


def with_steps(trace: Trace, steps_from: str | None) -> Trace:
    """Return what `steps_from_regions` returns or, if ``steps_from`` is None, what `steps_found` does."""
    return steps_found(trace) if steps_from is None else steps_from_regions(trace, steps_from)


def steps_found(trace: Trace) -> Trace:
    """Return a copy of a trace without steps whose steps are found in its outermost regions.

    If several of them follow each other again and again, as `find_cycle` finds, each round is a step. Otherwise
    the calls of the one region that repeats are the steps: at least three on the thread of the program, one call
    after the other; torch's own names, of parts of a step, do not count. The steps take more than half of the
    recorded time and launch more than half of the GPU work. Names that differ only in numbers count as one. If the
    trace has steps, or neither a cycle nor exactly one such region, it is returned unchanged.
    """
    regions = trace.regions
    if trace.steps or not regions:
        return trace
    rows = np.flatnonzero((regions.parent < 0) & (regions.thread == main_thread(trace)))
    names = [_NUMBERS.sub("*", name) for name in regions.where(rows).text("name")]
    start, end = span(trace.operators, regions, trace.runtime)
    cycle = find_cycle(regions, rows, names)
    if cycle and (cycle.end_ns - cycle.start_ns).sum() > _MIN_SHARE * (end - start):
        part = regions.where(cycle.first)
        columns = {name: part[name] for name in ("start_ns", "name", "event", "thread")}
        columns |= {"duration_ns": cycle.end_ns - cycle.start_ns, "number": np.arange(len(part))}
        trace_of_rounds = _with_table(trace, columns, _THEN.join(cycle.names))
        if _has_gpu_work(trace_of_rounds):
            return trace_of_rounds
    found = []
    places = defaultdict(list)
    for row, name in zip(rows.tolist(), names, strict=True):
        places[name].append(row)
    for name, own in places.items():
        calls = np.array(own)
        apart = np.all(regions.end_ns[calls][:-1] <= regions.start_ns[calls][1:])
        long = regions.duration_ns[calls].sum() > _MIN_SHARE * (end - start)
        if len(calls) >= MIN_CALLS and apart and long and not PART_OF_STEP.search(name):
            found.append(_with_steps(trace, calls))
    return found[0] if len(found) == 1 and _has_gpu_work(found[0]) else trace


def describe_steps_from(steps_from: str) -> str:
    """Return a sentence on `TraceData.steps_from`."""
    if _THEN in steps_from:
        return f"A step is one round of the regions {steps_from}."
    return f'A step is a call of the region "{steps_from}".'


def _has_gpu_work(trace: Trace) -> bool:
    """Return whether most of the GPU work whose launch is known was launched in steps."""
    known = (trace.gpu.launch >= 0) | (trace.gpu.operator >= 0)
    in_steps = trace.gpu.step[known] >= 0
    return not known.any() or bool(in_steps.mean() > _MIN_SHARE)


def _is_inside(regions: Table, chosen: Array) -> Array:
    """Return a mask of the regions with a chosen region around them."""
    inside = np.zeros(len(regions), bool)
    for row, parent in enumerate(regions.parent.tolist()):  # parents come first
        if parent >= 0:
            inside[row] = inside[parent] or chosen[parent]
    return inside


def _with_steps(trace: Trace, rows: Array) -> Trace:
    part = trace.regions.where(rows)
    names = part.text("name")
    numbers_in_names = [int(found[1]) if (found := _LAST_NUMBER.search(name)) else -1 for name in names]
    numbers = (
        numbers_in_names
        if np.all(np.diff(numbers_in_names) > 0) and numbers_in_names[0] >= 0
        else range(len(numbers_in_names))
    )
    columns = {name: part[name] for name in ("start_ns", "duration_ns", "name", "event", "thread")}
    pattern = dict.fromkeys(_NUMBERS.sub("*", name) for name in names)
    return _with_table(trace, columns | {"number": np.array(numbers, np.int64)}, " | ".join(pattern))


def _with_table(trace: Trace, columns: dict[str, Array], steps_from: str) -> Trace:
    """Return a copy of the trace with these steps, and with links to them."""
    steps = table("steps", columns, trace.strings)
    gpu = Table(
        {name: trace.gpu[name] for name in trace.gpu} | {"step": np.full(len(trace.gpu), -1, np.int32)},
        trace.strings,
    )
    result = replace(trace, steps=steps, gpu=gpu, steps_from=steps_from)
    index = StepIndex(result)
    for link, calls in (("operator", trace.operators), ("launch", trace.runtime)):
        known = np.flatnonzero(gpu[link] >= 0)
        origin = gpu[link][known]
        gpu.step[known] = index.rows_at(calls.start_ns[origin], calls.thread[origin])
    result.coverage = {**trace.coverage, "step": link_coverage(gpu, "step")}
    return result
