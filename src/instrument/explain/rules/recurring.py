"""Rules on what recurs: workers that start at each epoch, and other slow steps at equal distances."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted, duration, percentage
from ...read.tables.intervals import clip, merge_overlaps, overlap_ns, total_ns
from ...read.tables.nest import NestedRanges
from ...read.tables.steps import StepIndex
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace
from ..metrics import idle
from ..replay.replay import without_events
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, Win, require

_LONG = 2  # times a usual step: such a wait for a batch is long
_FAR = 10  # times the median wait in other steps: a batch that comes so late does not come from slow workers
_MIN_STARTS = 2


def without_worker_starts(facts: TraceFacts) -> tuple[list[Table], list[Table]]:
    """Return the waits for batches, and those for the first batch of a loop whose workers start anew.

    A loop over a DataLoader ends with a call of ``__next__`` that returns no batch, so the step in which the next
    loop begins has more of these calls than others. Long ones among them count, if there are two or more, or if
    the step recurs in the run. Neither are the call before such a one, and a like wait in step 0, where the
    workers start for the first time.
    """
    tables = idle.input_ranges(facts.trace)
    if not facts.trace.steps:
        return tables, []
    usual_ns, index = float(np.median(facts.trace.steps.duration_ns)), StepIndex(facts.trace)
    lengths = facts.timing.lengths if facts.timing is not None else None
    recurring = [step for each in lengths.recurrences() for step in each.steps] if lengths is not None else []
    usual, starts = [], []
    for ranges in tables:
        took_ns, step = ranges.duration_ns, index.rows_at(ranges.start_ns, ranges.thread)
        calls = np.bincount(step[step >= 0], minlength=len(facts.trace.steps))
        begins = np.append(calls > np.median(calls), False)[step]  # no range outside of the steps
        waits_ns = took_ns[~begins] if not begins.all() else took_ns
        long = took_ns >= max(_LONG * usual_ns, _FAR * float(np.median(waits_ns)))
        late = begins & long & ranges.matching("name", idle.MULTIPLE)
        known = np.isin(facts.trace.steps.number[step[late]], recurring).any()
        if np.count_nonzero(late) < (1 if known else _MIN_STARTS):
            usual.append(ranges)
            continue
        first = np.append(facts.trace.steps.number == 0, False)[step]
        like = first & (2 * took_ns >= np.median(took_ns[late]))
        ends = np.append(late[1:] & (step[1:] == step[:-1]), False)  # the workers of the loop before shut down
        usual.append(ranges.where(~(late | ends | like)))
        starts.append(ranges.where(late))
    return [each for each in usual if each], starts


@rule("restarted-workers", on_cpu=True, share=0.05, of="input")
def restarted_workers(facts: TraceFacts) -> Iterator[Finding]:
    """The first batch of each epoch comes late, as a DataLoader starts its worker processes anew.

    Needs the ranges that torch records around a DataLoader, and the begin of two loops over it in the window, or
    of one in a step that recurs in the run (see recurring-slow-steps). Such a step has one call more than others,
    as a loop ends with one that returns no batch. A first batch is late if the loop waits twice a usual step for
    it, and ten times as long as for a batch in other steps. The time to win is that of these waits or, if times
    of the GPU are known, that in which it idles meanwhile. A batch that itself takes as long to load, in workers
    that keep up in between, comes as late with workers that stay.
    """
    usual, starts = without_worker_starts(facts)
    require(usual or starts, "the trace has no ranges of a DataLoader")
    for late in starts:
        times = merge_overlaps(late.start_ns, late.end_ns)
        gaps = times if facts.unknown_gpu else (facts.idle.start_ns, facts.idle.end_ns)
        won_ns = overlap_ns(gaps, clip(times, *facts.recorded))
        # Where the workers of the loop before end slowly, their last call is late, too.
        step = StepIndex(facts.trace).rows_at(late.start_ns, late.thread)
        loops = np.bincount(step, late.duration_ns)[np.unique(step)]
        each_ns = float(np.median(loops))
        usual_ns = float(np.median(np.concatenate([each.duration_ns for each in usual]))) if usual else 0.0
        yield facts.finding(
            f"The first batch of a loop over a DataLoader comes {duration(each_ns)} late, "
            f"{counted(len(loops), 'time')} in {counted(facts.steps, 'step')}",
            Evidence("first_ns", each_ns, "ns", "Median wait for the first batch of a loop."),
            Evidence("usual_ns", usual_ns, "ns", "Median wait for a batch."),
            Evidence("loops", len(loops), "events", "Loops in the window whose first batch comes late."),
            win_ns=Win(facts.per_step(won_ns), partial(without_events, late)),
            fix=Fix(
                "Keep the worker processes: without persistent_workers a DataLoader starts them anew in each loop "
                "over it, and each of them opens the data again.",
                "DataLoader(dataset, ..., num_workers=2)",
                "DataLoader(dataset, ..., num_workers=2, persistent_workers=True)",
            ),
            at=(int(late.thread[0]), int(late.start_ns[0])),
        )


_FREE = re.compile("Free|Unmap|Release")


@rule("recurring-slow-steps", on_cpu=True)
def recurring_slow_steps(facts: TraceFacts, *, share: float = 0.05) -> Iterator[Finding]:
    """Slow steps recur at equal distances or with each epoch, and take much of the run.

    Needs the lengths of all steps of the run, from its manifest, and three slow steps of like length. If the
    window has such a step, the cause is what takes at least half of its delay there: waiting for a batch,
    compilation, garbage collection, torch's allocator that is short of memory, and so frees inside an operator,
    other allocation by the driver, or regions named evaluation or checkpoint. The threshold is a share of the time
    of the loop; as the window has few of these steps or none, what it would win is not known.
    """
    lengths = facts.timing.lengths if facts.timing is not None else None
    if lengths is None or not lengths.are_enough:
        raise MissingEvidenceError("the lengths of the steps of the run are not known")
    for each in lengths.recurrences():
        lost_ns = (each.each_ns - lengths.usual_ns) * len(each.steps)
        if lost_ns < share * lengths.loop_ns:
            continue
        rows = np.flatnonzero(np.isin(facts.trace.steps.number, each.steps))
        each = each._replace(begin_epochs=each.begin_epochs or _begin_loops(facts.trace, rows))
        cause, fix = _cause(facts, rows)
        lost = percentage(lost_ns / lengths.loop_ns)
        none = "" if len(rows) else "; none of them is in this window"
        which = f"{each}," if each.every and each.begin_epochs else str(each)
        yield facts.finding(
            f"{which.capitalize()} takes {duration(each.each_ns)} instead of "
            f"{duration(lengths.usual_ns)}{cause}: {lost} of the time of the loop{none}",
            Evidence("every", each.every or None, "steps", "Steps from one to the next, if always as many."),
            Evidence("steps", ", ".join(map(str, each.steps[-5:])), "", "The last of these steps."),
            Evidence("lost_ns", lost_ns, "ns", "What they take more than usual steps, in the whole run."),
            severity="high" if lost_ns >= 2 * share * lengths.loop_ns else "medium",
            fix=fix if len(rows) else Fix(f"Record one, with {lengths.how_to_record('--steps {}')}."),
            step=int(facts.trace.steps.number[rows[0]]) if len(rows) else None,
        )


def _begin_loops(trace: Trace, rows: Array) -> bool:
    """Return whether in each of these steps, and in no other, the next loop over a DataLoader begins.

    Such a step has one call more than others (see `without_worker_starts`).
    """
    for ranges in idle.input_ranges(trace):
        step = StepIndex(trace).rows_at(ranges.start_ns, ranges.thread)
        calls = np.bincount(step[step >= 0], minlength=len(trace.steps))
        usual = np.median(calls)
        if len(rows) and usual and np.array_equal(np.flatnonzero(calls != usual), rows):
            return bool((calls[rows] == usual + 1).all())
    return False


def _cause(facts: TraceFacts, rows: Array) -> tuple[str, Fix]:
    """Return what takes at least half of the delay of these steps, in words, and what helps."""
    trace, regions = facts.trace, facts.trace.regions
    allocations = trace.runtime.where(trace.runtime.matching("name", idle.ALLOCATION))
    causes: list[tuple[str, Sequence[Table], str]] = [
        (
            ", as the loop waits for a batch",
            idle.input_ranges(trace),
            "See what the DataLoader does at these steps: persistent_workers=True keeps its processes from one "
            "epoch to the next.",
        ),
        (
            ", as torch.compile compiles",
            idle.named_ranges(trace, idle.COMPILATION),
            "Keep shapes fixed at these steps, as that of the last batch of an epoch (drop_last=True), or mark "
            "the dimensions that change as dynamic.",
        ),
        (
            ", as Python collects garbage",
            idle.named_ranges(trace, idle.COLLECTION),
            "Freeze long-lived objects (gc.freeze()), and collect garbage at times of your choice.",
        ),
        (
            ", as torch's allocator is short of memory and gives its cache back",
            [_retries(trace, allocations)],
            "Use less memory at these steps, or fewer different sizes: expandable segments, and batches padded to "
            "a few lengths. Each time, the CPU waits for the GPU, and all memory is allocated anew.",
        ),
        (
            ", as the driver allocates or frees memory",
            [allocations],
            "Let the allocator keep its memory: no torch.cuda.empty_cache() in the loop, and expandable segments.",
        ),
        (
            ", as it evaluates",
            [regions.where(regions.matching("name", idle.EVALUATION))],
            "Evaluate less often, or on fewer batches.",
        ),
        (
            ", as it saves a checkpoint",
            [regions.where(regions.matching("name", idle.CHECKPOINT))],
            "Save less often, or beside the training, as torch.distributed.checkpoint.async_save does.",
        ),
    ]
    steps = trace.steps
    others = np.setdiff1d(np.arange(len(steps)), rows)
    delay_ns = _excess(steps.duration_ns, rows, others)
    for words, tables, fix in causes:
        if delay_ns and 2 * _excess(_in_steps(steps, tables), rows, others) >= delay_ns:
            return words, Fix(fix)
    return "", Fix(
        "Name what the loop does there with instrument.annotate, or record with stacks, to see it here."
    )


def _retries(trace: Trace, calls: Table) -> Table:
    """Return the calls with which torch's allocator finds no room, gives its cache back and allocates anew.

    It does so inside an operator; ``torch.cuda.empty_cache()`` frees outside of operators.
    """
    operators = trace.operators
    nest = NestedRanges(operators.start_ns, operators.end_ns, operators.thread)
    operator = nest.innermost_at(calls.start_ns, calls.thread)
    frees = operator[calls.matching("name", _FREE)]
    return calls.where(np.isin(operator, frees[frees >= 0]))


def _in_steps(steps: Table, tables: Sequence[Table]) -> Array:
    """Return the time in these events in each step."""
    times, pairs = idle.times_of(tables), zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)
    return np.array([total_ns(clip(times, start, end)) for start, end in pairs])


def _excess(ns: Array, rows: Array, others: Array) -> float:
    """Return how much longer something takes in the steps ``rows``, in the median."""
    return float(np.median(ns[rows]) - (np.median(ns[others]) if len(others) else 0)) if len(rows) else 0.0
