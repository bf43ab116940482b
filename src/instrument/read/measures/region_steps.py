"""Takes regions for steps: the calls of a region, or the rounds of a cycle of outermost regions."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..tables.links import link_coverage
from ..tables.nest import inside_rows
from ..tables.steps import StepIndex, main_thread, span
from ..tables.table import Array, Interner, Table, table
from ..tables.trace import Trace

PART_OF_STEP = re.compile(r"^(?:Optimizer\.|enumerate\(DataLoader\)|nccl:)")
"""The names of torch's own regions, of which a step has several."""
MIN_CALLS = 3  # calls that make a region, or a cycle of regions, a step

_BETWEEN = re.compile(
    r"(?<![a-z])(?:eval\w*|val|valid\w*|test\w*|checkpoint\w*|ckpt|sav(?:e|ing)\w*|log|logging|sampl\w*)(?![a-z])",
    re.IGNORECASE,
)
_UPDATE = re.compile(r"optim|update|(?<![a-z])step|apply_grad", re.IGNORECASE)
_MOST = 64  # regions of a cycle
_REGULAR = 0.9  # of the rounds: a region that fewer of them have comes in between


class Cycle(NamedTuple):
    """The rounds of a cycle.

    Attributes:
        start_ns: when the first region of each round begins.
        end_ns: when the round ends: where the next one, or a region in between, begins.
        first: the first region of each round, a row of the regions.
        names: the regions of a round, in their order.
    """

    start_ns: Array
    end_ns: Array
    first: Array
    names: list[str]


def find_cycle(regions: Table, rows: Array, names: list[str]) -> Cycle | None:
    """Return the cycle of at least two named regions; None if there is none.

    A round ends with the update of the parameters, if a region is named after one; regions before it may repeat,
    as with micro-batches. Otherwise a round begins with the region that is called most often. Evaluations, and
    regions that only some rounds have, come in between.

    Args:
        regions: all regions.
        rows: the outermost regions of one thread, in order of their start.
        names: their names, which may be those of several calls.
    """
    numbers = Interner[str]()
    codes = np.array([numbers[name] for name in names], np.int64)
    distinct, calls = list(numbers), np.bincount(codes)
    often = np.flatnonzero(calls >= MIN_CALLS).tolist()
    regular = [code for code in often if not _BETWEEN.search(distinct[code])] if len(often) <= _MOST else []
    updates = [code for code in regular if _UPDATE.search(distinct[code])]
    last = {code: int(np.flatnonzero(codes == code)[-1]) for code in updates}
    ends = [min(updates, key=lambda code: (calls[code], -last[code]))] if updates else []
    begins = sorted(regular, key=lambda code: -calls[code])  # of equally many, the first
    numbered = chain(
        (np.cumsum(np.append(0, codes[:-1] == code)) for code in ends),
        (np.cumsum(codes == code) - 1 for code in begins),
    )
    cycles = (_rounds(regions, rows, codes, distinct, regular, round_of) for round_of in numbered)
    return next(filter(None, cycles), None)


def _rounds(
    regions: Table, rows: Array, codes: Array, names: list[str], regular: list[int], round_of: Array
) -> Cycle | None:
    """Return the cycle whose rounds are numbered in ``round_of``; None if they have too little in common."""
    count = int(round_of.max()) + 1
    inside = round_of >= 0
    has = np.array([np.bincount(round_of[inside & (codes == code)], minlength=count) > 0 for code in regular])
    whole = has[:, 1:-1] if count > MIN_CALLS else has  # the recording may begin and end within a round
    common = whole.mean(1) >= _REGULAR
    core = [code for code, each in zip(regular, common.tolist(), strict=True) if each]
    if sum(not PART_OF_STEP.search(names[code]) for code in core) < 2:
        return None
    complete = has[common].all(0)
    complete[1:-1] = True
    ours = np.flatnonzero(np.isin(codes, core) & inside)
    if np.any(regions.end_ns[rows[ours]][:-1] > regions.start_ns[rows[ours]][1:]):
        return None
    of, first = np.unique(round_of[ours], return_index=True)
    last = np.append(first[1:], len(ours)) - 1
    following = np.append(regions.start_ns[rows], np.iinfo(np.int64).max)[ours[last] + 1]
    ends = np.where(ours[last] + 1 < len(rows), following, regions.end_ns[rows[ours[last]]])
    kept = complete[of]
    if kept.sum() < MIN_CALLS:
        return None
    order = dict.fromkeys(codes[ours][round_of[ours] == of[kept][0]].tolist())
    begun = rows[ours[first]][kept]
    return Cycle(regions.start_ns[begun], ends[kept], begun, [names[code] for code in order])


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
        outermost = ", ".join(dict.fromkeys(trace.regions.where(trace.regions.parent < 0).text("name")))
        which = f"the outermost are: {outermost:.300}" if outermost else "the trace has no regions"
        raise ValueError(f'"steps_from" must match the name of a region: {steps_from!r}; {which}')
    around = np.append(inside_rows(chosen, trace.regions.parent), False)[trace.regions.parent]
    return _with_steps(trace, np.flatnonzero(chosen & ~around))


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
    candidates = []
    places = defaultdict(list)
    for row, name in zip(rows.tolist(), names, strict=True):
        places[name].append(row)
    for name, own in places.items():
        calls = np.array(own)
        apart = np.all(regions.end_ns[calls][:-1] <= regions.start_ns[calls][1:])
        long = regions.duration_ns[calls].sum() > _MIN_SHARE * (end - start)
        if len(calls) >= MIN_CALLS and apart and long and not PART_OF_STEP.search(name):
            candidates.append(_with_steps(trace, calls))
    return candidates[0] if len(candidates) == 1 and _has_gpu_work(candidates[0]) else trace


def describe_steps_from(steps_from: str) -> str:
    """Return a sentence on `Trace.steps_from`."""
    if _THEN in steps_from:
        return f"A step is one round of the regions {steps_from}."
    return f'A step is a call of the region "{steps_from}".'


def _has_gpu_work(trace: Trace) -> bool:
    """Return whether most of the GPU work whose launch is known was launched in steps."""
    launched = (trace.gpu.launch >= 0) | (trace.gpu.operator >= 0)
    in_steps = trace.gpu.step[launched] >= 0
    return not launched.any() or bool(in_steps.mean() > _MIN_SHARE)


def _with_steps(trace: Trace, rows: Array) -> Trace:
    part = trace.regions.where(rows)
    names = part.text("name")
    numbers = [int(match[1]) if (match := _LAST_NUMBER.search(name)) else -1 for name in names]
    if numbers[0] < 0 or np.any(np.diff(numbers) <= 0):
        numbers = list(range(len(names)))
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
        linked = np.flatnonzero(gpu[link] >= 0)
        origin = gpu[link][linked]
        gpu.step[linked] = index.rows_at(calls.start_ns[origin], calls.thread[origin])
    result.coverage = {**trace.coverage, "step": link_coverage(gpu, "step")}
    return result
