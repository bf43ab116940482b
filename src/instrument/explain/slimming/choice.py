"""Chooses what a slim trace keeps: what a metric, a rule or the replay reads, or the events of a few steps."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ...read.measures.region_steps import MIN_CALLS
from ...read.measures.synchronizations import find_synchronizations
from ...read.tables.nest import NestedRanges, rows_around
from ...read.tables.steps import process_of_threads, span
from ...read.tables.table import Array, Table
from ...read.tables.trace import MODULE, Trace
from ..diagnosis.diagnosis_data import DiagnosisData
from ..metrics.idle import COLLECTION, COMPILATION, INPUT
from ..metrics.memory_use import OPTIMIZER
from ..rules.compiled import LOOK_UP, REGION
from ..rules.trace_facts import TraceFacts
from ..waits.trace_context import FRAME, StackSites
from .parts import (
    ALL_ARGS,
    MEMORY_ARGS,
    Part,
    extremes,
    kept_gpu,
    kept_memory,
    kept_operators,
    kept_runtime,
    kept_syncs,
    named_by_external,
    part,
)

_MARK = re.compile("^instrument_steps=")
_NAMED = (INPUT, COMPILATION, COLLECTION, OPTIMIZER, REGION, LOOK_UP, _MARK)


def chosen_parts(trace: Trace, diagnosis: DiagnosisData) -> dict[str, Part]:
    """Return what stays of each table.

    Args:
        trace: the trace as it was read.
        diagnosis: its diagnosis, whose facts say where it looked.
    """
    facts, rules = diagnosis.facts, {found.rule for found in diagnosis.findings}
    if facts is None:
        raise ValueError("only a diagnosis from instrument.diagnose says where it looked")
    named = named_by_external(trace)
    begin, end = span(*_tables(trace).values())
    edges = {name: extremes(table, begin, end) for name, table in _tables(trace).items()}
    memory = kept_memory(trace, facts.memory_events) | edges["memory"]
    return {
        "steps": part(trace.steps, np.ones(len(trace.steps), bool)),
        "regions": part(trace.regions, np.ones(len(trace.regions), bool)),
        "others": part(trace.others, _named(trace) | edges["others"]),
        "frames": part(trace.frames, kept_frames(facts) | edges["frames"]),
        "operators": kept_operators(trace, named),
        "runtime": kept_runtime(facts, named, queries="occupancy-queries" in rules),
        "gpu": kept_gpu(trace, named),
        "gpu_regions": part(trace.gpu_regions, edges["gpu_regions"]),
        "syncs": kept_syncs(trace),
        "memory": part(trace.memory, memory, ((MEMORY_ARGS, True),)),
        "counters": part(trace.counters, edges["counters"], ((ALL_ARGS, True),)),
    }


def _tables(trace: Trace) -> dict[str, Table]:
    return {name: value for name, value in vars(trace).items() if isinstance(value, Table)}


def _named(trace: Trace) -> Array:
    """Return a mask of the other events that a rule knows by name, or of all that last if a device is not read."""
    others = trace.others
    if trace.unread_devices:
        return others.duration_ns > 0
    found = np.zeros(len(others), bool)
    for pattern in _NAMED:
        found |= others.matching("name", pattern)
    return found


def kept_frames(facts: TraceFacts) -> Array:
    """Return a mask of the frames: all modules, and the functions that name each place that was looked up.

    Args:
        facts: the facts of a trace that was diagnosed.
    """
    frames = facts.trace.frames
    kept: Array = frames.matching("name", MODULE)
    if not frames:
        return kept
    threads, times = _places(facts)
    found = NestedRanges(frames.start_ns, frames.end_ns, frames.thread).innermost_at(times, threads)
    sites = StackSites(facts.trace)
    for row in np.unique(found[found >= 0]).tolist():
        stack = rows_around(row, frames.parent)
        names = [frames.strings[code] for code in frames.name[stack].tolist()]
        kept[[stack[place] for place in sites.needed(names)]] = True
    kept[_other_lines(frames, kept)] = True
    return kept


def _places(facts: TraceFacts) -> tuple[Array, Array]:
    """Return the threads and times of all synchronizations, and of what was looked up."""
    waits = np.array([(wait.thread, wait.start_ns) for wait in find_synchronizations(facts.trace)], np.int64)
    looked_up = [np.stack(each, axis=1) for each in facts.looked_up]
    threads, times = np.unique(np.concatenate([waits.reshape(-1, 2), *looked_up]), axis=0).T
    return threads[threads >= 0], times[threads >= 0]


def _other_lines(frames: Table, kept: Array) -> list[int]:
    """Return one more frame of each function of which one line stays, but which has several lines in the trace.

    `StackSites` makes the line a part of the name of a function that has several.
    """
    lines: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    names, first = np.unique(frames.name, return_index=True)
    stay = set(np.unique(frames.name[kept]).tolist())
    staying: dict[tuple[str, str], set[str]] = defaultdict(set)
    for code, row in zip(names.tolist(), first.tolist(), strict=True):
        if found := FRAME.match(frames.strings[code]):
            function = found["file"], found["function"]
            lines[function].setdefault(found["line"], row)
            if code in stay:
                staying[function].add(found["line"])
    return [
        next(row for line, row in lines[function].items() if line not in known)
        for function, known in staying.items()
        if len(known) == 1 < len(lines[function])
    ]


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
