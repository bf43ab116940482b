"""The ranks of a job side by side: how long each computes, waits for others, and makes others wait."""

from __future__ import annotations

from typing import Any

from ...page.names import shown_name
from ...units import counted
from ..diagnosis_data import DiagnosisData
from ..job import Job


def ranks_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the ranks of the job; None for a single one."""
    job = diagnosis.job
    if job is None or len(job.ranks) < 2:
        return None
    met = job.arrivals.ranks
    return {
        "id": "ranks",
        "type": "ranks",
        "title": "Ranks",
        "notes": [shown_name(text) for text in _notes(job)],
        "shown": diagnosis.rank,
        "ranks": [
            {
                "rank": rank,
                "window_ns": trace.window_ns,
                "compute_ns": trace.compute_ns,
                "last": met[rank].last,
                "waited_ns": met[rank].waited_ns,
                "caused_ns": met[rank].caused_ns,
            }
            for rank, trace in sorted(job.ranks.items())
        ],
    }


def _notes(job: Job) -> list[str]:
    arrivals = job.arrivals
    notes = [f"{len(job.ranks)} of {counted(job.world_size, 'rank')} are recorded."]
    if arrivals.unknown:
        notes.append(f"Which rank arrives last is unknown: {arrivals.unknown}.")
    else:
        notes.append(f"Compared: {counted(arrivals.collectives, 'collective')} that the ranks share.")
    if arrivals.latest is not None:
        notes.append(f"The others wait longest for rank {arrivals.latest}.")
    if job.missing:
        notes.append(
            f"Without a trace: {', '.join(map(str, job.missing[:20]))}{' ...' * (len(job.missing) > 20)}."
        )
    for rank, lost in job.damaged.items():
        notes.append(f"The trace of rank {rank} is damaged: {', '.join(lost.reasons)}.")
    return notes
