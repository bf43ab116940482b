"""Sends and receives of a job: which belong together, and how long each rank waits in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...base.trace_marks import MACHINE
from ...base.units import listed
from ...read.jobs.read import RankContent
from ...read.jobs.transfers import Transfers
from ...read.tables.table import Array

_UNKNOWN = -(1 << 62)  # a time before all others


class SendReceive(NamedTuple):
    """The transfers of a rank whose both ends are known; how long it waits in them, in all its steps.

    Attributes:
        calls: their number.
        waited_ns: how long it waits until the other end is ready.
        transfer_ns: how long it waits from then on.
    """

    calls: int
    waited_ns: int
    transfer_ns: int


class Link(NamedTuple):
    """The calls of two ranks that belong together: their rows in `Transfers`, those of the lower rank first.

    ``shift_ns``, added to times of the higher rank, gives times of the lower; None if their clocks are unrelated.
    """

    rows: tuple[Array, Array]
    shift_ns: int | None


@dataclass(frozen=True)
class Exchange:
    """The sends and receives of a job.

    Attributes:
        transfers: by rank, its sends and receives.
        links: by pair of ranks, the lower first, what belongs together.
        waited_ns: by rank, how long it waits in each transfer until the other end is ready; 0 if that is unknown.
        totals: by rank, the times in the transfers of which both ends are known.
        unknown: why nothing belongs together; empty if something does, or the job has no sends.
    """

    transfers: Mapping[int, Transfers] = field(default_factory=dict)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    waited_ns: Mapping[int, Array] = field(default_factory=dict)
    totals: Mapping[int, SendReceive] = field(default_factory=dict)
    unknown: str = ""


def exchange_of(ranks: Mapping[int, RankContent]) -> Exchange:
    """Return which sends and receives of a job belong together, and the waits in them.

    A send and a receive belong together if they are at the same place among those from one rank to the other in
    one process group and one step; steps with different numbers of them are left out. A transfer begins once both
    ends are ready: a rank waits for the other end until then, and for the transfer afterwards.
    """
    known = {rank: each.transfers for rank, each in ranks.items() if each.transfers is not None}
    reasons = [f"rank {rank}: {each.unknown}" for rank, each in known.items() if each.unknown]
    if reasons or not known:
        return Exchange(unknown=reasons[0] if reasons else "")
    peers = {rank: {*each.peer.tolist()} - {-1} for rank, each in known.items()}
    if absent := sorted(set().union(*peers.values()) - known.keys()):
        return Exchange(unknown=f"no sends and receives are recorded of rank {listed(absent)}")
    links = {
        (low, high): link
        for low in known
        for high in sorted(peers[low])
        if low < high and (link := _link(low, high, ranks, known))
    }
    if not links:
        return Exchange(unknown="the ranks recorded different numbers of sends and receives")
    ready = {rank: np.full(len(each.step), _UNKNOWN) for rank, each in known.items()}
    ended = {rank: np.full(len(each.step), -_UNKNOWN) for rank, each in known.items()}
    for (low, high), ((of_low, of_high), shift) in links.items():
        if shift is not None:
            ready[low][of_low] = known[high].ready_ns[of_high] + shift
            ready[high][of_high] = known[low].ready_ns[of_low] - shift
            ended[low][of_low] = known[high].end_ns[of_high] + shift
            ended[high][of_high] = known[low].end_ns[of_low] - shift
    known = {rank: _until_received(each, ended[rank]) for rank, each in known.items()}
    waited = {rank: np.clip(ready[rank] - each.wait_ns, 0, each.exposed_ns) for rank, each in known.items()}
    totals = {
        rank: SendReceive(
            int(both.sum()), int(waited[rank].sum()), int((each.exposed_ns - waited[rank])[both].sum())
        )
        for rank, each in known.items()
        if (both := ready[rank] > _UNKNOWN).any()
    }
    return Exchange(known, links, waited, totals)


def _until_received(own: Transfers, ended: Array) -> Transfers:
    """Return the transfers, in which a rank without a GPU waits in a send only until the tensor has arrived.

    gloo marks a send as finished only when the rank asks for the result: the rank's work since its last operator
    does not count as waiting.

    Args:
        own: the transfers of a rank.
        ended: when the receive of each send ends.
    """
    if not own.on_cpu:
        return own
    late = np.where(own.is_send, np.clip(own.end_ns - np.maximum(own.wait_ns, ended), 0, own.exposed_ns), 0)
    busy = own.busy_ns + np.bincount(np.searchsorted(own.number, own.step), late, len(own.number)).astype(np.int64)
    return own._replace(exposed_ns=own.exposed_ns - late, busy_ns=busy)


def _link(low: int, high: int, ranks: Mapping[int, RankContent], known: Mapping[int, Transfers]) -> Link | None:
    """Return the calls of two ranks that belong together; None without any."""
    one, other = known[low], known[high]
    sent, got = _pairs(one, low, other, high)
    back, taken = _pairs(other, high, one, low)
    if not len(sent) + len(back):
        return None
    machine, shift = ranks[low].metadata.get(MACHINE), None
    if machine is not None and machine == ranks[high].metadata.get(MACHINE):
        shift = ranks[high].epoch_ns - ranks[low].epoch_ns
    elif len(sent) and len(back):
        # A tensor arrives after it was sent, by either clock: the fastest of both directions take equally long.
        there = int((other.end_ns[got] - one.ready_ns[sent]).min())
        shift = (int((one.end_ns[taken] - other.ready_ns[back]).min()) - there) // 2
    return Link((np.append(sent, taken), np.append(got, back)), shift)


def _pairs(sender: Transfers, source: int, receiver: Transfers, target: int) -> tuple[Array, Array]:
    """Return the rows of the sends and of their receives, in the steps in which there are as many of both."""
    rows: list[tuple[Array, Array]] = [(np.empty(0, np.int64),) * 2]
    for group in np.unique(sender.group).tolist():
        sent = np.flatnonzero(sender.is_send & (sender.peer == target) & (sender.group == group))
        got = np.flatnonzero(~receiver.is_send & (receiver.peer == source) & (receiver.group == group))
        counts, others = Counter(sender.step[sent].tolist()), Counter(receiver.step[got].tolist())
        same = [step for step, count in counts.items() if count == others[step]]
        rows.append((sent[np.isin(sender.step[sent], same)], got[np.isin(receiver.step[got], same)]))
    sends, receives = zip(*rows, strict=True)
    return np.concatenate(sends), np.concatenate(receives)
