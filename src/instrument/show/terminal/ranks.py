"""Prints the ranks of a job side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ...base.units import counted, duration, listed, percent, signed_duration
from ...explain.metrics.collectives import Arrivals, RankTimes, arrivals_of
from ...explain.metrics.job import Job, job_of
from ...explain.metrics.metrics import Metrics, metrics
from ...explain.metrics.pipelines import CAUSES, Pipelines
from ...read.jobs.align import Clock
from ...read.jobs.ranks import TraceSet
from ...read.kineto.salvage import OTHER_TYPES
from ...read.tables.work_classes import Collectives
from ..text.lines import line
from .console import Block, Table, more

_FILES = 20
_CLOCK = (
    '"clock" is the offset to add to the times of a rank to get times on the clock of the lowest rank, by the '
    'ends of the collectives that they share; "?" if they share none.'
)
_NUMBERS = ("compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")


def rank_table(traces: TraceSet, collectives: Collectives, *, title: str = "") -> Iterator[Block]:
    """Yield how each rank spent the time of its GPU, then what is missing or uncertain.

    The four shares add up to the time from the first start to the last end of GPU work. For a job of one rank,
    there is only the ``title``, by default the path of the file.
    """
    several = traces.world_size > 1
    folders = sorted({str(trace.path.parent) for trace in traces.values()})
    if several:
        yield line(f"{len(traces)} of {traces.world_size} ranks, in {', '.join(folders[:3])}", "bold")
    else:
        paths = ", ".join(str(trace.path) for trace in traces.values())
        yield line(title[:1].upper() + title[1:] or paths, "bold")
    if several and any(trace.gpu for trace in traces.values()):
        columns = ["rank", "GPU span", "compute %", "exposed comm %", "exposed memcpys %", "idle %", "clock"]
        rows = [
            [str(rank), *_cells(metrics(trace, collectives), traces.clocks[rank])]
            for rank, trace in traces.items()
        ]
        yield Table(columns, rows)
        yield _CLOCK
    if several:
        job = job_of(traces, collectives)
        yield from _late(job)
        yield from _pipelines(job.pipelines)
    if traces.missing:
        yield line(f"Missing: rank {listed(traces.missing)}")
    if several and traces.guessed:
        yield line(f"Neither the file nor its name gives the rank; numbered by name: {listed(traces.guessed)}")
    for path, reason in traces.failed.items():
        yield line(f"Cannot read {path}: {reason}")
    for path, held in islice(traces.left_out.items(), _FILES):
        why = f"{held}, another window" if held.startswith("rank ") and not held.endswith("another run") else held
        yield line(f"Left out: {path} ({why if several else why.removeprefix('rank 0, ')})")
    if (hidden := len(traces.left_out) - _FILES) > 0:
        yield line(f"... and {hidden:,} more")
    for rank, trace in traces.items():
        if trace.lost:
            damage = "Different format" if trace.lost.reasons.keys() == {OTHER_TYPES} else "Damaged"
            yield line(f"{damage}, rank {rank}, {trace.path}: {'; '.join(trace.lost.reasons)}")


def _late(job: Job) -> Iterator[Block]:
    """Yield which rank the others wait for at the collectives that all share, and how long a step is without."""
    arrivals = job.arrivals
    if arrivals.latest is not None:
        yield f"{_late_rank(arrivals, arrivals.latest)}."
        if job.even is not None:
            yield job.even.text
    elif arrivals.unmatched and arrivals.unknown:
        yield f"It is not known which rank arrives last at the collectives: {arrivals.unknown}."


def _pipelines(found: Pipelines) -> Iterator[Block]:
    """Yield how long the stages of the pipeline idle that could save most, and for what."""
    for pipeline in found.pipelines[:1]:
        yield line()
        yield pipeline.text
        columns = ["rank", "step", "busy %", *(f"{cause.replace('_', '-')} %" for cause in CAUSES)]
        rows = [
            [str(stage.rank), duration(stage.step_ns), percent(round(stage.busy_ns), round(stage.step_ns))]
            + [percent(round(stage.idle_ns[cause]), round(stage.step_ns)) for cause in CAUSES]
            for stage in pipeline.stages
        ]
        yield Table(columns, rows)
    yield from more(len(found.pipelines) - 1, "pipeline")
    if found.unknown:
        yield f"It is not known which ranks are the stages of a pipeline: {found.unknown}."


def describe_ranks(times: Mapping[int, RankTimes], missing: Sequence[int]) -> list[str]:
    """Return which rank the others wait for in the recorded steps, and which ranks are not compared.

    Args:
        times: the ranks that are compared.
        missing: the others that recorded.
    """
    arrivals = arrivals_of({rank: each.collectives for rank, each in times.items()})
    texts = []
    if arrivals.latest is not None:
        steps = len(next(iter(times.values())).steps)
        texts.append(f"{_late_rank(arrivals, arrivals.latest, steps)} per step.")
    if missing:
        texts.append(f"Not compared, as they left no times beside the trace: rank {listed(missing)}.")
    return texts


def _late_rank(arrivals: Arrivals, rank: int, steps: int = 1) -> str:
    """Return how often a rank arrives last, how late, and how long each other rank waits for it in each step."""
    each = arrivals.ranks[rank]
    times = f"{each.last} of {counted(arrivals.collectives, 'collective')}"
    waited = duration(each.caused_ns / max(len(arrivals.ranks) - 1, 1) / steps)
    late = f"Rank {rank} arrives last at {times}, {duration(each.late_ns)} late in the median"
    return f"{late}: each other rank waits {waited} for it"


def _cells(numbers: Metrics, clock: Clock) -> list[str]:
    whole = numbers["span_ns"]
    shares = [percent(numbers[name], whole) for name in _NUMBERS]
    return [duration(whole), *shares, signed_duration(clock.offset_ns) if clock.is_sure else "?"]
