"""Rules on the ranks of a job: who comes late, and whether their work is even."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from ...findings import Evidence, Finding, Fix
from ...units import counted, duration
from ..job import Job
from ..rule import rule
from ..trace_facts import MissingEvidenceError, TraceFacts

_LISTED = 10


def _job(facts: TraceFacts) -> Job:
    if facts.job is None or facts.job.world_size < 2:
        raise MissingEvidenceError("only one rank is known")
    return facts.job


@rule("late-rank")
def late_rank(facts: TraceFacts, *, share: float = 0.05) -> Iterator[Finding]:
    """The other ranks wait for one rank at the collectives.

    Needs the traces of several ranks. In a collective the last rank to arrive has the shortest kernel, as all end
    together: no clocks are compared. The time to win is what a rank waits for this one on average. traceml warns
    of stragglers from 10 % on.
    """
    job = _job(facts)
    found = job.arrivals
    if not found.collectives:
        raise MissingEvidenceError("the ranks share no collectives")
    rank = found.latest
    if rank is None:
        return
    others = len(found.ranks) - 1
    win = facts.per_step(found.ranks[rank].caused_ns / max(others, 1))
    if facts.share(win) < share:
        return
    yield facts.finding(
        f"The other ranks wait for rank {rank}, {duration(win)} {facts.each_step} each; it is last at "
        f"{found.ranks[rank].last} of {counted(found.collectives, 'collective')}",
        win_ns=win,
        rank=rank,
        evidence=(
            Evidence("last", found.ranks[rank].last, "events", "Collectives at which it arrives last."),
            Evidence("collectives", found.collectives, "events", "Collectives that were compared."),
            Evidence(
                "caused_ns", facts.per_step(found.ranks[rank].caused_ns), "ns", "Waits of all others for it."
            ),
            Evidence("waited_ns", facts.per_step(found.ranks[rank].waited_ns), "ns", "Its own waits per step."),
        ),
        fix=Fix(
            "Find out what this rank does alone: its data, its machine, logging or checkpoints. The other "
            "findings are about this rank, unless another one was chosen."
        ),
    )


@rule("uneven-compute")
def uneven_compute(facts: TraceFacts, *, share: float = 0.05) -> Iterator[Finding]:
    """The ranks do different amounts of work.

    Needs the traces of several ranks. Compares the time during which kernels compute. The time to win is that of
    the busiest rank above the mean: what even work would take less.
    """
    job = _job(facts)
    computes = {rank: trace.compute_ns for rank, trace in job.ranks.items() if trace.compute_ns}
    if len(computes) < 2:
        raise MissingEvidenceError("fewer than two ranks compute")
    most = max(computes, key=lambda rank: computes[rank])
    usual = mean(computes.values())
    win = facts.per_step(computes[most] - usual)
    if facts.share(win) < share:
        return
    least = min(computes, key=lambda rank: computes[rank])
    yield facts.finding(
        f"Rank {most} computes {duration(facts.per_step(computes[most]))} {facts.each_step}, rank {least} "
        f"{duration(facts.per_step(computes[least]))}",
        win_ns=win,
        rank=most,
        evidence=(
            Evidence("most_ns", facts.per_step(computes[most]), "ns", "Compute of the busiest rank per step."),
            Evidence("mean_ns", facts.per_step(usual), "ns", "Mean over the ranks."),
            Evidence("least_ns", facts.per_step(computes[least]), "ns", "Compute of the least busy rank."),
        ),
        fix=Fix("Give each rank the same amount of work: sort samples by length, balance experts and stages."),
    )


@rule("missing-ranks")
def missing_ranks(facts: TraceFacts) -> Iterator[Finding]:
    """The traces of some ranks are missing, so that nothing can be said of them.

    Needs the number of ranks, which the files say. A rank that is missing may be the one that the others wait for.
    """
    job = _job(facts)
    if not job.missing and not job.failed:
        return
    listed = ", ".join(map(str, job.missing[:_LISTED])) + ", ..." * (len(job.missing) > _LISTED)
    known = f"{len(job.ranks)} of {counted(job.world_size, 'rank')}"
    yield facts.finding(
        f"Only {known} are known" + (f"; missing: {listed}" if listed else ""),
        win_ns=None,
        severity="medium",
        evidence=(
            Evidence("missing", len(job.missing), "events", "Ranks without a trace."),
            Evidence("unreadable", len(job.failed), "events", "Files that cannot be read."),
            Evidence("known", len(job.ranks) / job.world_size, "1", "Share of the ranks that are known."),
        ),
        fix=Fix("Record all ranks, or copy their files into one folder."),
    )
