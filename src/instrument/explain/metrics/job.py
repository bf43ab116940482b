"""`Job`: what is known of all ranks of a job, kept small so that any number of ranks fits into memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...read.jobs.ranks import TraceSet, read_ranks
from ...read.jobs.read import RankContent, content_of, rank_content_reader, read_file
from ...read.kineto.salvage import OTHER_TYPES
from ...read.measures.region_steps import with_steps
from ...read.tables.trace import ReadLosses, Trace
from ...read.tables.work_classes import Collectives
from .collectives import Arrivals, arrivals
from .even_ranks import EvenRanks, even_ranks
from .pipelines import Pipelines, pipelines_of
from .transfers import Exchange, exchange_of

_LATE = 0.1  # of the time of the ranks: waiting less for one rank does not make it the one to look at


@dataclass(frozen=True)
class Job:
    """The ranks of a job.

    Attributes:
        ranks: by rank, the steps and collectives.
        world_size: the number of ranks of the job.
        missing: the ranks without a trace.
        failed: the files that could not be read, each with the reason.
        left_out: the files of another window or run, each with what it holds.
        guessed: the ranks that neither a file nor its name gives.
        whole: the whole traces, as far as they are in memory.
    """

    ranks: Mapping[int, RankContent]
    world_size: int
    missing: tuple[int, ...]
    failed: Mapping[Path, str]
    left_out: Mapping[Path, str]
    whole: Mapping[int, Trace]
    guessed: tuple[int, ...] = ()

    @cached_property
    def arrivals(self) -> Arrivals:
        """Who arrives last at the collectives of the job."""
        return arrivals(self.ranks, self.missing)

    @cached_property
    def even(self) -> EvenRanks | None:
        """How long a step would be if all ranks were as fast as the median; None if that is not known."""
        return None if self.missing else even_ranks(self.ranks)

    @cached_property
    def exchange(self) -> Exchange:
        """The sends and receives of the job."""
        return exchange_of(self.ranks)

    @cached_property
    def pipelines(self) -> Pipelines:
        """The ranks that are the stages of pipelines."""
        return pipelines_of(self.exchange)

    @property
    def focus(self) -> int:
        """The rank to look at: the one that others wait for; if they wait little, the one that takes longest."""
        latest = self.arrivals.latest
        total_ns = sum(trace.window_ns for trace in self.ranks.values())
        if latest is not None and self.arrivals.ranks[latest].caused_ns >= _LATE * total_ns:
            return latest
        return max(self.ranks, key=lambda rank: (self.ranks[rank].window_ns, -rank))

    @property
    def damaged(self) -> dict[int, ReadLosses]:
        """What could not be read of the files of ranks, by rank; without the ranks whose file is intact."""
        return {
            rank: trace.lost for rank, trace in self.ranks.items() if trace.lost.reasons.keys() - {OTHER_TYPES}
        }

    def trace(self, rank: int) -> Trace:
        """Return the whole trace of a rank, from memory or from its file.

        Raises:
            ValueError: the job has no trace of this rank.
            TraceError, OSError: the file cannot be read.
        """
        if rank not in self.ranks:
            raise ValueError(f'"rank" must be one of {", ".join(map(str, self.ranks))}: {rank!r}')
        return self.whole.get(rank) or read_file(self.ranks[rank].path)


def job_of(
    traces: TraceSet | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    collectives: Collectives,
    executor: Executor | None = None,
    steps_from: str | None = None,
) -> Job:
    """Return the job of these traces; those of files are read one after the other, and forgotten.

    Args:
        traces: the traces, or their folder, pattern or files.
        collectives: which kernels communicate.
        executor: reads the files; by default processes of this machine.
        steps_from: which regions are the steps; None takes those that are marked or found.

    Raises:
        TraceError, OSError: as `read_traces`.
    """
    if isinstance(traces, TraceSet):
        files, whole = traces, dict(traces)
        ranks = {rank: content_of(with_steps(trace, steps_from), collectives) for rank, trace in traces.items()}
    else:
        files, whole = read_ranks(traces, rank_content_reader(collectives, steps_from), executor), {}
        ranks = {rank: trace for rank, trace in files.items() if isinstance(trace, RankContent)}
    missing, guessed = tuple(files.missing), tuple(files.guessed)
    return Job(ranks, files.world_size, missing, files.failed, files.left_out, whole, guessed)
