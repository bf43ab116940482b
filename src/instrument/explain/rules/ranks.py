"""Rules on the ranks of a job: stragglers, uneven work, pipelines, and missing traces."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted, duration, percentage
from ..metrics.job import Job
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, require

_LISTED = 10


def _job(facts: TraceFacts) -> Job:
    if facts.job is None or facts.job.world_size < 2:
        raise MissingEvidenceError("the trace is of one rank only")
    return facts.job


def _in_a_step(facts: TraceFacts, ns: float) -> int:
    """Return a time of other ranks per step, at most a step of this one: theirs may be longer."""
    return min(facts.per_step(ns), int(facts.step_ns))


@rule("late-rank", share=0.05)
def late_rank(facts: TraceFacts) -> Iterator[Finding]:
    """The other ranks wait for one rank at the collectives.

    Needs the traces of several ranks. In a collective, the last rank to arrive has the shortest kernel, because
    all kernels end together: clocks are not compared. The time to win is the time that another rank waits for this
    one on average, at most one step. traceml warns about stragglers from 10 % on; 5 % is this library's choice.
    """
    job = _job(facts)
    facts.require_gpu()
    arrivals = job.arrivals
    require(arrivals.collectives, arrivals.unknown)
    rank = arrivals.latest
    if rank is None:
        return
    own, others = arrivals.ranks[rank], len(arrivals.ranks) - 1
    scale = facts.steps / (arrivals.steps or facts.steps)  # another rank may have recorded fewer steps
    win = _in_a_step(facts, scale * own.caused_ns / max(others, 1))
    yield facts.finding(
        f"The other ranks wait for rank {rank}, {duration(win)} {facts.each_step} each; it arrives last at "
        f"{own.last} of {counted(arrivals.collectives, 'collective')}",
        Evidence("last", own.last, "events", "Collectives at which it arrives last."),
        Evidence("collectives", arrivals.collectives, "events", "Collectives that were compared."),
        facts.step_time(
            "caused_ns", scale * own.caused_ns, "Time per step that all other ranks together wait for it."
        ),
        facts.step_time("waited_ns", scale * own.waited_ns, "Time per step that this rank waits for others."),
        win_ns=win,
        rank=rank,
        fix=Fix(
            "Find out what differs on this rank: data, machine, logging or checkpoints. The other findings are "
            "about this rank, unless --rank chose another."
        ),
    )


@rule("uneven-compute", share=0.05)
def uneven_compute(facts: TraceFacts) -> Iterator[Finding]:
    """The ranks do different amounts of work.

    Needs the traces of several ranks. The rule compares the time during which kernels compute. The time to
    win is the time of the busiest rank above the mean, which evenly divided work would save.
    """
    job = _job(facts)
    facts.require_gpu()
    computes = {  # in as many steps as this rank recorded
        rank: trace.compute_ns * facts.steps / max(len(trace.steps), 1)
        for rank, trace in job.ranks.items()
        if trace.compute_ns
    }
    require(len(computes) >= 2, "fewer than two ranks compute")
    most = max(computes, key=lambda rank: computes[rank])
    usual = mean(computes.values())
    win = _in_a_step(facts, computes[most] - usual)
    least = min(computes, key=lambda rank: computes[rank])
    yield facts.finding(
        f"Rank {most} computes {duration(facts.per_step(computes[most]))} {facts.each_step}, rank {least} "
        f"{duration(facts.per_step(computes[least]))}",
        facts.step_time("most_ns", computes[most], "Compute of the busiest rank per step."),
        facts.step_time("mean_ns", usual, "Mean over the ranks, per step."),
        facts.step_time("least_ns", computes[least], "Compute of the least busy rank per step."),
        win_ns=win,
        rank=most,
        fix=Fix("Give each rank the same amount of work: sort samples by length, balance experts and stages."),
    )


@rule("pipeline-bubble", share=0.05)
def pipeline_bubble(facts: TraceFacts) -> Iterator[Finding]:
    """The stages of a pipeline idle for longer than its schedule makes unavoidable.

    Needs the steps and the sends and receives of all stages; those of gloo name their ranks only with
    ``record_shapes=True``. Of a step, p equal stages with m microbatches idle for (p - 1) / (m + p - 1), under
    GPipe and 1F1B. The time to win is what equal stages that do the same work and idle for this share would save.
    """
    job = _job(facts)
    require(job.pipelines.pipelines, job.pipelines.unknown or "the ranks send nothing to each other")
    pipeline = job.pipelines.pipelines[0]
    slowest = pipeline.slowest
    usual = mean(stage.busy_ns for stage in pipeline.stages)
    yield facts.finding(
        f"The stages of a pipeline idle for {percentage(pipeline.idle_share)} of a step; "
        f"{percentage(pipeline.unavoidable_share)} is unavoidable with its schedule; {pipeline.slowest_text}",
        Evidence("idle_share", pipeline.idle_share, "1", "Share of a step that the stages idle, on average."),
        Evidence("unavoidable_share", pipeline.unavoidable_share, "1", "(p - 1) / (m + p - 1)."),
        Evidence("slowest_ns", slowest.busy_ns, "ns", "Compute of the slowest stage per step."),
        Evidence("mean_ns", usual, "ns", "Mean over the stages, per step."),
        Evidence("microbatches", pipeline.microbatches, "events", "Microbatches per step."),
        win_ns=min(int(pipeline.avoidable_ns), int(facts.step_ns)),
        rank=slowest.rank,
        fix=Fix(
            "Give the slowest stage fewer layers, so that all compute equally long, and overlap transfers with "
            "compute. More microbatches per step make the unavoidable share smaller."
        ),
    )


@rule("missing-ranks")
def missing_ranks(facts: TraceFacts) -> Iterator[Finding]:
    """The traces of some ranks are missing.

    Needs the number of ranks, which the files state. A missing rank may be the straggler.
    """
    job = _job(facts)
    if not job.missing and not job.failed:
        return
    listed = ", ".join(map(str, job.missing[:_LISTED])) + ", ..." * (len(job.missing) > _LISTED)
    with_trace = f"{len(job.ranks)} of {counted(job.world_size, 'rank')}"
    yield facts.finding(
        f"Only {with_trace} have a trace" + (f"; missing: {listed}" if listed else ""),
        Evidence("missing", len(job.missing), "events", "Ranks without a trace."),
        Evidence("unreadable", len(job.failed), "events", "Files that cannot be read."),
        Evidence("known", len(job.ranks) / job.world_size, "1", "Share of the ranks with a trace that was read."),
        severity="medium",
        fix=Fix("Record all ranks, or copy their files into one folder."),
    )
