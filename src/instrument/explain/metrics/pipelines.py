"""Pipelines of ranks: how long each stage idles in a step, and for what; each send with its receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from ...base.units import counted, duration, listed, percentage
from ...read.jobs.transfers import Transfers
from ...read.tables.lanes import distinct
from ...read.tables.table import Array
from .transfers import Exchange

CAUSES = {
    "warm_up": "Waiting for the first tensors of a step from each neighbor: the pipeline fills.",
    "drain": "Waiting in the last backward passes, and from the last work until the first stage begins again.",
    "imbalance": "Waiting for a neighbor that is not ready for the transfer: it computes longer, or waits itself.",
    "transfer": "Waiting for a transfer after both ends are ready, or whose other end is not known.",
    "other": "Everything else without compute: launches, copies, collectives.",
}
"""The causes of the idle time of a stage; each is zero where it does not occur, and they add up."""


class Stage(NamedTuple):
    """One stage of a pipeline; times are means over its steps.

    Attributes:
        rank: the rank.
        step_ns: the length of a step.
        busy_ns: how long the stage computes in it.
        idle_ns: the rest by cause; see `CAUSES`.
    """

    rank: int
    step_ns: float
    busy_ns: float
    idle_ns: Mapping[str, float]

    @property
    def idle_share(self) -> float:
        """The idle time / the step."""
        return 1 - self.busy_ns / self.step_ns


_EQUAL = 1.05  # times the mean: a stage that computes so long is like the others


@dataclass(frozen=True)
class Pipeline:
    """Ranks that pass tensors along a chain.

    Attributes:
        stages: the stages, from the first to the last.
        microbatches: the number of microbatches in a step: receives of the second stage from the first.
    """

    stages: tuple[Stage, ...]
    microbatches: int

    @property
    def idle_share(self) -> float:
        """The idle time of all stages / their steps."""
        return 1 - sum(each.busy_ns for each in self.stages) / sum(each.step_ns for each in self.stages)

    @property
    def unavoidable_share(self) -> float:
        """The idle share of p equal stages with m microbatches, (p - 1) / (m + p - 1), under GPipe and 1F1B.

        From the GPipe paper, https://arxiv.org/abs/1811.06965, section 2.3.
        """
        others = len(self.stages) - 1
        return others / (self.microbatches + others)

    @property
    def slowest(self) -> Stage:
        """The stage that computes longest."""
        return max(self.stages, key=lambda stage: stage.busy_ns)

    @property
    def slowest_text(self) -> str:
        """Which stage computes longest, as a clause; or that they are equal, if it computes at most 5 % more."""
        busy_ns = mean(stage.busy_ns for stage in self.stages)
        if self.slowest.busy_ns <= _EQUAL * busy_ns:
            return f"the stages compute about equally long, {duration(busy_ns)} per step"
        return f"rank {self.slowest.rank} computes longest, {duration(self.slowest.busy_ns)} per step"

    @property
    def avoidable_ns(self) -> float:
        """The time of a step that equal stages with the same work would save; 0 if they would save none."""
        step_ns = sum(each.step_ns for each in self.stages) / len(self.stages)
        return max(step_ns * (1 - (1 - self.idle_share) / (1 - self.unavoidable_share)), 0)

    @property
    def text(self) -> str:
        """The idle share and the slowest stage, in a sentence."""
        parts = (
            f"{counted(len(self.stages), 'stage')} and {counted(self.microbatches, 'microbatch', 'microbatches')}"
        )
        return (
            f"The stages of the pipeline idle for {percentage(self.idle_share)} of a step; with {parts} per step, "
            f"{percentage(self.unavoidable_share)} is unavoidable; {self.slowest_text}."
        )


@dataclass(frozen=True)
class Pipelines:
    """The sends and receives of a job.

    Attributes:
        pipelines: the pipelines, those first whose stages could save most.
        unknown: why sends and receives are no part of a pipeline; empty if there are none, or all are.
    """

    pipelines: tuple[Pipeline, ...] = ()
    unknown: str = ""


def pipelines_of(exchange: Exchange) -> Pipelines:
    """Return the pipelines of a job.

    Ranks are stages if sends and receives that belong together connect them in a chain; the first stage begins its
    steps with a send, the last one with a receive.
    """
    transfers, links = exchange.transfers, exchange.links
    found, unknown = [], exchange.unknown
    for chain in _components(links):
        if not _sends_first(transfers[chain[0]]):
            chain.reverse()
        connected = {pair for pair in links if pair[0] in chain}
        is_chain = connected == {(min(pair), max(pair)) for pair in pairwise(chain)}
        steps = reduce(np.intersect1d, [transfers[rank].number for rank in chain])
        ends_fit = _sends_first(transfers[chain[0]]) and not _sends_first(transfers[chain[-1]])
        if is_chain and ends_fit and len(steps):
            found.append(_pipeline(chain, exchange, steps))
        else:
            unknown = f"the sends of rank {listed(sorted(chain))} form no chain from a first stage to a last one"
    return Pipelines(tuple(sorted(found, key=lambda each: -each.avoidable_ns)), unknown)


def as_dict(pipeline: Pipeline) -> dict[str, Any]:
    """Return a pipeline as a dict of JSON values; idle times have the names of `CAUSES`."""
    return {
        **{name: getattr(pipeline, name) for name in ("microbatches", "idle_share", "unavoidable_share")},
        "slowest_rank": pipeline.slowest.rank,
        "stages": [stage._asdict() | {"idle_share": stage.idle_share} for stage in pipeline.stages],
    }


def _components(links: Collection[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the ranks that are connected; those of a chain from one end to the other."""
    near = defaultdict(list)
    for low, high in links:
        near[low].append(high)
        near[high].append(low)
    while near:
        reached = [min(near, key=lambda rank: (len(near[rank]), rank))]
        for rank in reached:
            reached += [other for other in near.pop(rank) if other not in reached]
        yield reached


def _sends_first(transfers: Transfers) -> bool:
    """Return whether the steps of a rank begin with a send."""
    return bool(transfers.is_send[transfers.peer >= 0][0])


def _pipeline(chain: Sequence[int], exchange: Exchange, steps: Array) -> Pipeline:
    """Return the pipeline whose stages are these ranks, first to last, in the steps that all recorded."""
    transfers = [exchange.transfers[rank] for rank in chain]
    first, second = transfers[:2]
    begin: Array | None = first.start_ns[np.searchsorted(first.number, steps)]
    stages = []
    for place, (rank, own) in enumerate(zip(chain, transfers, strict=True)):
        if place and begin is not None:
            before = chain[place - 1]
            shift = exchange.links[min(before, rank), max(before, rank)].shift_ns
            begin = None if shift is None else begin + (shift if rank < before else -shift)
        fills, empties = _phases(own, [*chain[place + 1 : place + 2]], len(chain) - 1 - place)
        step_ns, busy_ns, idle = _times(own, exchange.waited_ns[rank], fills, empties, steps, begin)
        stages.append(Stage(rank, step_ns, busy_ns, idle))
    rows = np.flatnonzero(~second.is_send & (second.peer == chain[0]))
    received = rows[distinct(second.step[rows], second.batch[rows])[0]]
    return Pipeline(tuple(stages), int(np.median(np.unique(second.step[received], return_counts=True)[1])))


def _phases(own: Transfers, following: Sequence[int], later: int) -> tuple[Array, Array]:
    """Return masks of the transfers while the pipeline fills, and of those while it empties.

    It fills until the first tensors of each neighbor arrive. Under 1F1B, it empties while a stage passes on the
    gradients of one microbatch for each stage that follows; under GPipe, a stage does not wait for those.

    Args:
        own: the transfers of a stage.
        following: the rank of the next stage, if there is one.
        later: the number of stages that follow.
    """
    receives = np.flatnonzero((own.peer >= 0) & ~own.is_send)
    first = distinct(own.step[receives], own.peer[receives])[0]
    fills = (own.peer >= 0) & np.isin(own.batch, own.batch[receives[first]])  # and the sends of the same batch
    back = receives[np.isin(own.peer[receives], following)]
    back = back[distinct(own.step[back], own.batch[back])[0]]
    to_come = np.searchsorted(own.step[back], own.step[back], "right") - np.arange(len(back))
    empties = (own.peer >= 0) & np.isin(own.batch, own.batch[back[to_come <= later]]) & ~fills
    return fills, empties


def _times(
    own: Transfers, waited: Array, fills: Array, empties: Array, steps: Array, begin: Array | None
) -> tuple[float, float, dict[str, float]]:
    """Return the length of a step of a stage, its busy time, and its idle time by cause: means over the steps.

    Args:
        own: the transfers of the stage.
        waited: how long it waits in each until the other end is ready.
        fills: which transfers fill the pipeline.
        empties: which transfers empty it.
        steps: the numbers of the steps.
        begin: when the first stage begins each step, on the clock of this one; None if that is not known.
    """
    place = np.searchsorted(own.number, steps)
    step = np.searchsorted(steps, own.step).clip(max=len(steps) - 1)
    exposed = own.exposed_ns * (steps[step] == own.step)
    waited = np.minimum(waited, exposed)
    length, busy, last = (own.finish_ns - own.start_ns)[place], own.busy_ns[place], own.last_ns[place]

    def in_steps(values: Array) -> Array:
        return np.bincount(step, values, len(steps))

    between = (own.peer >= 0) & ~fills & ~empties
    previous = fills * np.clip(0 if begin is None else begin[step] - own.wait_ns, 0, exposed)
    rest = length - busy - in_steps(exposed)
    tail = np.clip(own.finish_ns[place] - last - in_steps(exposed * (own.wait_ns >= last[step])), 0, rest)
    final = np.zeros(len(steps), np.int64)
    np.maximum.at(final, step, own.end_ns * (own.peer >= 0))
    after = (own.peer < 0) & (own.wait_ns >= final[step])  # collectives after the last transfer
    idle = {
        "warm_up": in_steps(exposed * fills - previous),
        "drain": in_steps(previous + exposed * (empties | after)) + tail,
        "imbalance": in_steps(waited * between),
        "transfer": in_steps((exposed - waited) * between),
        "other": rest - tail + in_steps(exposed * ((own.peer < 0) & ~after)),
    }
    return float(length.mean()), float(busy.mean()), {cause: float(each.mean()) for cause, each in idle.items()}
