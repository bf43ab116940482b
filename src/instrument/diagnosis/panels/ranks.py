"""The ranks of a job side by side: how long each computes, waits for others, and makes others wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...page.names import shown_name
from ...traces.rank_content import RankContent
from ...units import counted, listed
from ..arrivals import RankArrivals
from ..diagnosis_data import DiagnosisData
from ..job import Job


def ranks_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the ranks of the job; None for a single one. Times are means over the steps of the rank."""
    job = diagnosis.job
    if job is None or job.world_size < 2:
        return None
    met = job.arrivals
    return {
        "id": "ranks",
        "type": "ranks",
        "title": "Ranks",
        "notes": [shown_name(text) for text in _notes(job)],
        "each": diagnosis.each_step,
        "shown": diagnosis.rank,
        "compared": met.collectives,
        "ranks": [_rank(rank, trace, met.ranks[rank]) for rank, trace in sorted(job.ranks.items())],
    }


def _rank(rank: int, trace: RankContent, met: RankArrivals) -> dict[str, Any]:
    times = {
        "step": trace.window_ns,
        "compute": trace.compute_ns,
        "waited": met.waited_ns,
        "caused": met.caused_ns,
    }
    steps = max(len(trace.steps), 1)
    return {"rank": rank, "last": met.last, **{name: ns / steps for name, ns in times.items()}}


def _notes(job: Job) -> list[str]:
    arrivals = job.arrivals
    notes = [f"{len(job.ranks)} of {counted(job.world_size, 'rank')} are recorded."]
    if job.missing:
        notes.append(f"Without a trace: {_listed(job.missing)}.")
    if job.damaged:
        reasons = "; ".join(sorted({reason for lost in job.damaged.values() for reason in lost.reasons}))
        notes.append(f"Damaged traces: {_listed(list(job.damaged))} ({reasons}).")
    if arrivals.unknown:
        return [*notes, f"Who arrives last is unknown: {arrivals.unknown}."]
    latest = arrivals.latest
    if latest is None:
        return [*notes, f"No rank waits at {counted(arrivals.collectives, 'collective')} that the ranks share."]
    times = f"{arrivals.ranks[latest].last:,} of {counted(arrivals.collectives, 'shared collective')}"
    return [*notes, f"The others wait longest for rank {latest}, which arrives last at {times}."]


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
