"""How long a step would be if all ranks were as fast as the median one, replayed through their collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...base.units import duration
from ...read.jobs.align import steps_of
from ...read.jobs.read import RankContent
from ...read.tables.lanes import group_rows
from .collectives import matched, sequences_of

_IN_STEP = 0xFFFFFFFF  # of a number from `places`: the place of a collective in its step


class EvenRanks(NamedTuple):
    """The mean step of a job, and what it would be with even ranks.

    Attributes:
        step_ns: the mean length of a step, of the median rank.
        even_ns: the same if each rank worked as long as the median rank between collectives.
    """

    step_ns: float
    even_ns: float

    @property
    def text(self) -> str:
        """Both lengths, in a sentence."""
        return (
            f"With all ranks as fast as the median: {duration(self.even_ns)} instead of {duration(self.step_ns)} "
            "per step."
        )


def even_ranks(ranks: Mapping[int, RankContent]) -> EvenRanks | None:
    """Return the prediction; None without steps, or if all ranks share less than two collectives.

    The collectives of all ranks are barriers: one begins when the last rank arrives, takes as long as for that
    rank, and then each rank does its own work until it arrives at the next one. The replay scales this work by
    its place in a step: over the steps, the median of each rank becomes that of the median rank; what varies from
    step to step stays. A step is not less than what the median rank computes, as work may go on while a collective
    runs. Other collectives count as own work.
    """
    sequences = [sequences_of(trace) for trace in ranks.values()]
    shared = set(sequences[0]).intersection(*sequences) if len(sequences) > 1 else set()
    every = [matched([each[group] for each in sequences]) for group in sorted(shared)]
    every = [each for each in every if not each[0]]
    if sum(len(place) for _, place, _, _ in every) < 2 or not all(trace.steps for trace in ranks.values()):
        return None
    in_step = np.concatenate([(place & _IN_STEP) * len(every) + n for n, (_, place, _, _) in enumerate(every)])
    ends, took = (np.hstack([each[column] for each in every]) for column in (2, 3))
    order = np.argsort(ends[0], kind="stable")
    ends, took = ends[:, order], took[:, order]
    work = np.maximum(ends[:, 1:] - took[:, 1:] - ends[:, :-1], 0)
    saved = 0.0
    for _, columns in group_rows(in_step[order]):
        if len(own := work[:, columns[columns > 0] - 1].T):  # the work before the first collective is not known
            usual = np.median(own, axis=0)
            even = own * (np.median(usual) / np.maximum(usual, 1))
            saved += float((own.max(axis=1) - even.max(axis=1)).mean()) * len(columns)
    steps, window_ns, compute_ns = np.median(
        [(len(trace.steps), trace.window_ns, trace.compute_ns) for trace in ranks.values()], axis=0
    ).tolist()
    saved *= steps / len(steps_of(np.concatenate([place for _, place, _, _ in every])))  # all ranks recorded these
    return EvenRanks(window_ns / steps, min(max(window_ns - saved, compute_ns), window_ns) / steps)
