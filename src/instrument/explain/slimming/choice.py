"""Chooses what a slim trace keeps: what a metric, a rule or the replay reads, or the events of a few steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...read.measures.region_steps import MIN_CALLS
from ...read.measures.synchronizations import columns_of, find_synchronizations
from ...read.tables.autograd import autograd_nodes, engine_node_name
from ...read.tables.lanes import is_among
from ...read.tables.nest import NestedRanges, inside_rows, rows_around
from ...read.tables.steps import main_thread, process_of_threads, span
from ...read.tables.table import KERNEL, MEMCPY, TRANSFERS, Array, Table
from ...read.tables.trace import MODULE, Trace
from ..diagnosis.diagnose import Diagnosis
from ..metrics.idle import COLLECTION, COMPILATION, INPUT, SLOW_NS
from ..metrics.matmul_table import innermost_matmuls, matmul_rows
from ..metrics.memory_use import OPTIMIZER, freed_by
from ..metrics.operator_work import BACKWARD
from ..metrics.roofline import counted_calls
from ..metrics.tables import one_of
from ..rules.compiled import LOOK_UP, REGION
from ..rules.host import QUERIES
from ..rules.trace_facts import TraceFacts
from ..waits.trace_context import FRAME, StackSites

Keys = tuple[str, ...]
ALL_ARGS: Keys = ("*",)
"""Stands for all args of an event."""


class Part(NamedTuple):
    """The events of one table that stay.

    Attributes:
        rows: the rows of the table that stay.
        keys: the different sets of args.
        which: for each of these rows, the index of its set in ``keys``.
    """

    rows: Table
    keys: list[Keys]
    which: Array


def part(table: Table, kept: Array, args: Iterable[tuple[Keys, Array | bool]] = ()) -> Part:
    """Return the part of a table that stays.

    Args:
        table: the table.
        kept: a mask of its rows.
        args: keys of args, each with a mask of the rows of the table that keep them.
    """
    rows = np.flatnonzero(kept)
    masks = [(keys, np.broadcast_to(mask, len(table))[rows]) for keys, mask in args]
    code = sum(
        (mask.astype(np.int64) << bit for bit, (_, mask) in enumerate(masks)), np.zeros(len(rows), np.int64)
    )
    codes, which = np.unique(code, return_inverse=True)
    sets = [
        sum((keys for bit, (keys, _) in enumerate(masks) if number >> bit & 1), ()) for number in codes.tolist()
    ]
    return Part(table.where(rows), sets, which)


def extremes(table: Table, begin_ns: int, end_ns: int) -> Array:
    """Return a mask of the first row that begins at a time, and of the first that ends at another."""
    kept = np.zeros(len(table), bool)
    for at_edge in (table.start_ns == begin_ns, table.end_ns == end_ns):
        kept[np.flatnonzero(at_edge)[:1]] = True
    return kept


EXTERNAL = ("External id", "external id")
"""The args that name the operator of GPU work; traces of 2021 have the second."""

_ANYWHERE = re.compile(f"softmax|^{BACKWARD}$")
_SHAPES = ("Input Dims", "Input type")


def kept_operators(trace: Trace, named: Array) -> Part:
    """Return the operators: all stay, as each counts in the table of operators.

    Args:
        trace: the trace.
        named: the external ids of the GPU work that no call of the runtime links to an operator.
    """
    operators = trace.operators
    shapes = _with_shapes(trace)
    args = (
        (EXTERNAL, is_among(operators.external, named)),
        (_SHAPES, shapes),
        (("Concrete Inputs",), (shapes | one_of(operators, "name", TRANSFERS)) & (operators.scalars > 0)),
        (("Process Group Name", "Src Rank", "Dst Rank"), operators.peer >= 0),
        (("Sequence number",), _with_sequence(trace)),
    )
    return part(operators, np.ones(len(operators), bool), args)


def _with_shapes(trace: Trace) -> Array:
    """Return a mask of the operators whose shapes some number depends on.

    Matmuls and the convolutions and softmaxes of attention count wherever they are, others where they launch GPU
    work and no operator inside them counts.
    """
    operators = trace.operators
    counted = operators.matching("name", _ANYWHERE)
    counted[innermost_matmuls(operators)] = counted[counted_calls(trace)] = True
    has = (operators.shapes > 0) | (operators.types > 0)
    counted &= has
    if not counted.any():  # one shows that shapes were recorded
        counted[np.flatnonzero(has)[:1]] = True
    return counted


def _with_sequence(trace: Trace) -> Array:
    """Return a mask of the operators whose sequence numbers tell which threads run backward passes, and for whom.

    One number of each kind shows what a thread does; where several threads may wait for a pass, all count.
    """
    operators = trace.operators
    numbered = operators.sequence >= 0
    made = np.unique(autograd_nodes(operators).made.thread)
    if len(np.union1d(made, [main_thread(trace)])) > 2 and trace.regions:
        return numbered
    rows = np.flatnonzero(numbered)
    creates = np.isin(operators.event[rows], autograd_nodes(operators).made.event)
    runs = np.array([engine_node_name(word) is not None for word in operators.strings])[operators.name[rows]]
    _, first = np.unique(operators.thread[rows].astype(np.int64) * 4 + creates * 2 + runs, return_index=True)
    first_of_kind = np.zeros(len(operators), bool)
    first_of_kind[rows[first]] = True
    return first_of_kind


FLOW_OUT, FLOW_IN = ("flow_out",), ("flow_in",)
"""Stand for the correlation ids of a launch and its work: a flow between them, which viewers show as an arrow."""

EVENT_IDS = ("correlation", "wait_on_cuda_event_record_corr_id")
"""The args that hold correlation ids."""

_PLACE = ("device", "stream")
_COLLECTIVE = ("Collective name", "Process Group Name", "In msg nelems", "Out msg nelems", "dtype")
_RECORD = re.compile("EventRecord")
_WAITS = re.compile("Synchronize|Memcpy|Free")
_WAIT = re.compile("Stream Wait Event|Event Sync")


def named_by_external(trace: Trace) -> Array:
    """Return the external ids that link GPU work to operators.

    They are those of the work without a launch or, in a trace without correlation ids, of all work.
    """
    gpu = trace.gpu
    if not has_correlations(trace):
        return np.unique(gpu.external[gpu.external >= 0])
    alone = (gpu.launch < 0) & (gpu.external >= 0) & (gpu.external != gpu.correlation)
    return np.unique(gpu.external[alone])


def has_correlations(trace: Trace) -> bool:
    """Return whether correlation ids link the GPU work of a trace to its launches; else external ids do."""
    return bool((trace.gpu.correlation >= 0).any() or (trace.runtime.correlation >= 0).any())


def kept_runtime(facts: TraceFacts, named: Array, *, queries: bool) -> Part:
    """Return the calls of the runtime that stay: all but queries that no finding counts.

    Args:
        facts: the facts of the trace.
        named: the external ids that `named_by_external` returns.
        queries: whether a finding counts the calls that query attributes.
    """
    trace = facts.trace
    runtime, launches = trace.runtime, np.zeros(len(trace.runtime), bool)
    launches[trace.gpu.launch[trace.gpu.launch >= 0]] = True
    used = np.concatenate((trace.gpu.correlation, trace.syncs.correlation))
    linked = is_among(runtime.correlation, used) & (runtime.correlation >= 0)
    if trace.syncs.matching("name", _WAIT).any():
        linked |= runtime.matching("name", _RECORD)
    by_external = is_among(runtime.external, named) & (not has_correlations(trace))
    args = ((EXTERNAL, by_external), (FLOW_OUT, linked & launches), (EVENT_IDS[:1], linked & ~launches))
    kept = np.ones(len(runtime), bool) if queries else linked | ~_idle_queries(facts)
    return part(runtime, kept, args)


def _idle_queries(facts: TraceFacts) -> Array:
    """Return a mask of the queries of attributes on whose times no number depends.

    The start of an event counts if it is the first in a region, or stands between a copy and a synchronization;
    where several threads launch work, every event shows that its thread is not waiting for another.
    """
    trace, runtime = facts.trace, facts.trace.runtime
    threads = (trace.steps.thread, runtime.thread[trace.gpu.launch[trace.gpu.launch >= 0]])
    if len(np.unique(np.concatenate((*threads, *columns_of(facts.waits, "thread"))))) > 1:
        return np.zeros(len(runtime), bool)
    idle = runtime.matching("name", QUERIES) & (runtime.duration_ns < SLOW_NS)
    starts = np.sort(np.concatenate([each.start_ns for each in (trace.operators, trace.regions, runtime)]))
    first = np.searchsorted(starts, trace.regions.start_ns, "right")
    idle &= ~np.isin(runtime.start_ns, starts[first[first < len(starts)]])
    order = np.lexsort((runtime.start_ns, runtime.thread))
    waits = np.append(runtime.matching("name", _WAITS)[order], True)[1:]
    idle[order[waits]] = False
    return idle & ~extremes(runtime, int(runtime.start_ns.min(initial=0)), int(runtime.end_ns.max(initial=0)))


def kept_gpu(trace: Trace, named: Array) -> Part:
    """Return the GPU work: all of it stays."""
    gpu = trace.gpu
    kernel, copy = gpu.category == KERNEL, gpu.category == MEMCPY
    inside = inside_rows(matmul_rows(trace.operators), trace.operators.parent)
    of_matmul = np.append(inside, False)[gpu.operator]
    alone = (gpu.launch < 0) | (not has_correlations(trace))
    collective = (gpu.collective > 0) | (gpu.group > 0) | (gpu.dtype > 0) | (gpu.elements_in >= 0)
    args = (
        (_PLACE, True),
        (("bytes", "size"), copy),
        (("grid",), kernel & (np.isnan(gpu.blocks_per_sm) | of_matmul)),
        (("block",), kernel & _threads_count(trace, gpu)),
        (("blocks per SM",), kernel & ~np.isnan(gpu.blocks_per_sm)),
        (("est. achieved occupancy %",), kernel & ~np.isnan(gpu.occupancy_percent)),
        (_COLLECTIVE, kernel & (collective | (gpu.elements_out >= 0))),
        (EXTERNAL, alone & np.isin(gpu.external, named)),
        (FLOW_IN, (gpu.launch >= 0) & (gpu.correlation >= 0)),
        (EVENT_IDS[:1], (gpu.launch < 0) & (gpu.correlation >= 0)),
    )
    return part(gpu, np.ones(len(gpu), bool), args)


def _threads_count(trace: Trace, gpu: Table) -> bool:
    """Return whether occupancy is computed from the threads per block, which needs the limits of the device."""
    return any(device.threads_per_sm for device in trace.devices) or bool(np.isnan(gpu.blocks_per_sm).any())


def kept_syncs(trace: Trace) -> Part:
    """Return the synchronizations that CUPTI recorded."""
    syncs = trace.syncs
    waits = syncs.matching("name", _WAIT)
    args = (
        (_PLACE, True),
        (("wait_on_stream",), waits),
        (EVENT_IDS[1:], waits),
        (EVENT_IDS[:1], syncs.correlation >= 0),
    )
    return part(syncs, np.ones(len(syncs), bool), args)


def may_renumber(trace: Trace) -> bool:
    """Return whether correlation ids can get other numbers: not if external ids stay.

    An external id that equals the correlation id means nothing (traces of 2022), and others must not become equal.
    """
    return not len(named_by_external(trace))


MEMORY_ARGS = ("Device Type", "Device Id", "Bytes", "Addr", "Total Allocated", "Total Reserved")
"""The args of an event of the allocator that are read."""


def kept_memory(trace: Trace, events: Table) -> Array:
    """Return a mask of the events of the allocator.

    The events at the peak and at the end of each step stay, and the allocations that are in use at the peak or at
    the end of the first or the last step, each with the event that frees it.

    Args:
        trace: the trace.
        events: its memory events on GPUs.
    """
    counted = events.where(events.allocated_bytes >= 0)
    kept = np.zeros(len(counted), bool)
    ends = np.sort(trace.steps.end_ns)
    kept[_peaks(counted)] = True
    kept[_last_before(counted, ends)] = True
    blocks = np.flatnonzero(counted.address >= 0)
    for device in np.unique(counted.device[blocks]).tolist():
        rows = blocks[counted.device[blocks] == device]
        own, freed = counted.where(rows), freed_by(counted.where(rows))
        allocated = np.flatnonzero(own.bytes > 0)
        at = [
            int(np.argmax(own.allocated_bytes)),
            *_last_before(own, ends[[0, -1]] if len(ends) else ends).tolist(),
        ]
        kept[rows[at]] = True
        for row in at:
            kept[rows[allocated[(allocated <= row) & (freed[allocated] > row)]]] = True
        frees = freed[kept[rows]]
        kept[rows[frees[frees < len(rows)]]] = True
    return np.isin(trace.memory.event, counted.event[kept])


def _peaks(events: Table) -> list[int]:
    """Return the rows with the largest numbers, as the rules take them."""
    if not events:
        return []
    reserved = np.flatnonzero(events.reserved_bytes >= 0)
    rows = [int(np.argmax(events.allocated_bytes)), int(np.argmax(events.reserved_bytes))]
    if len(reserved):
        rows.append(int(reserved[np.argmax(events.allocated_bytes[reserved])]))
    return rows


def _last_before(events: Table, times_ns: Array) -> Array:
    at = np.searchsorted(events.start_ns, times_ns, "right") - 1
    return at[at >= 0]


_MARK = re.compile("^instrument_steps=")
_NAMED = (INPUT, COMPILATION, COLLECTION, OPTIMIZER, REGION, LOOK_UP, _MARK)


def chosen_parts(trace: Trace, diagnosis: Diagnosis) -> dict[str, Part]:
    """Return what stays of each table.

    Args:
        trace: the trace as it was read.
        diagnosis: its diagnosis, whose facts say where it looked.
    """
    facts, rules = diagnosis.facts, {finding.rule for finding in (*diagnosis.findings, *diagnosis.hidden)}
    if facts is None:
        raise ValueError("only a diagnosis from instrument.diagnose says where it looked")
    named = named_by_external(trace)
    begin, end = span(*_tables(trace).values())
    edges = {name: extremes(table, begin, end) for name, table in _tables(trace).items()}
    memory = kept_memory(trace, facts.memory_events) | edges["memory"]
    counters = np.diff(trace.counters.event, prepend=-1) != 0  # an event has a row for each series
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
        "counters": part(trace.counters, counters, ((ALL_ARGS, True),)),
    }


def _tables(trace: Trace) -> dict[str, Table]:
    return {name: value for name, value in vars(trace).items() if isinstance(value, Table)}


def _named(trace: Trace) -> Array:
    """Return a mask of the other events that a rule knows by name, or of all that last if a device is not read."""
    others = trace.others
    if trace.unread_devices:
        return others.duration_ns > 0
    named = np.zeros(len(others), bool)
    for pattern in _NAMED:
        named |= others.matching("name", pattern)
    return named


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
    nest = NestedRanges(frames.start_ns, frames.end_ns, frames.thread, frames.parent)
    innermost = nest.innermost_at(times, threads)
    sites = StackSites(facts.trace)
    for row in np.unique(innermost[innermost >= 0]).tolist():
        stack = rows_around(row, frames.parent)
        names = [frames.strings[code] for code in frames.name[stack].tolist()]
        kept[[stack[place] for place in sites.needed(names)]] = True
    kept[_other_lines(frames, kept)] = True
    return kept


def _places(facts: TraceFacts) -> tuple[Array, Array]:
    """Return the threads and times of all synchronizations, and of what was looked up."""
    waits = columns_of(find_synchronizations(facts.trace), "thread", "start_ns")
    threads, times = np.unique(np.concatenate([waits, *map(np.stack, facts.looked_up)], axis=1), axis=1)
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
        if frame := FRAME.match(frames.strings[code]):
            function = frame["file"], frame["function"]
            lines[function].setdefault(frame["line"], row)
            if code in stay:
                staying[function].add(frame["line"])
    return [
        next(row for line, row in lines[function].items() if line not in stay_lines)
        for function, stay_lines in staying.items()
        if len(stay_lines) == 1 < len(lines[function])
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
    called = is_among(trace.syncs.correlation, trace.runtime.correlation[kept["runtime"]])
    kept["syncs"] = called | _overlaps(trace.syncs, chosen.begin_ns, chosen.end_ns)
    return {name: part(getattr(trace, name), mask, ((ALL_ARGS, True),)) for name, mask in kept.items()}


def _overlaps(table: Table, begin_ns: int, end_ns: int) -> Array:
    starts = (table.start_ns >= begin_ns) | (table.end_ns > begin_ns)
    overlaps: Array = starts & (table.start_ns < end_ns)
    return overlaps


def _work(trace: Trace, kept: dict[str, Array], chosen: ChosenSteps) -> Array:
    """Return a mask of the GPU work of the steps, and of the work that still runs when they begin."""
    gpu = trace.gpu
    launched, at = np.zeros(len(gpu), bool), np.full(len(gpu), np.iinfo(np.int64).min)
    linked = np.zeros(len(gpu), bool)
    for link, name in (("operator", "operators"), ("launch", "runtime")):  # a launch says more than an operator
        some = np.flatnonzero(gpu[link] >= 0)
        rows = gpu[link][some]
        launched[some], at[some] = kept[name][rows], getattr(trace, name).start_ns[rows]
        linked[some] = True
    last = int(gpu.end_ns[launched].max(initial=chosen.end_ns))
    running = _overlaps(gpu, chosen.begin_ns, last)
    of_steps: Array = launched | (running & (~linked | (at < chosen.begin_ns)))
    return of_steps
