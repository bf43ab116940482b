"""What one rank sends to other ranks and receives from them, and how long it waits in these calls."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import numpy as np

from ..tables.intervals import covered_ns, merge_overlaps
from ..tables.lanes import latest, map_unique
from ..tables.notes import process_groups, to_record
from ..tables.steps import StepIndex
from ..tables.table import KERNEL, Array, Table, natural
from ..tables.trace import Trace
from ..tables.work_classes import Collectives, communication_mask
from .align import CALLS, name_hash

_ALL_CALLS = re.compile("^(?:c10d::|record_param_comms$)")
_KERNELS = re.compile("(?:nccl|rccl).*(?:SendRecv|Generic)")
_POINT_TO_POINT = re.compile("^(?:send|recv|)$")  # empty for calls that torch coalesced into one kernel
_RANGES = re.compile("^gloo:")
_TRANSFER, _SEND = re.compile(":(?:send|recv)"), re.compile("send")


class Transfers(NamedTuple):
    """The sends and receives of a rank in its steps, in order of the calls; times on the clock of the rank.

    On a GPU, a rank waits while a kernel of NCCL runs and none computes. Without a GPU, it waits from its call or,
    if operators ran since, from the end of the last one, to the end of the transfer; all other time is its work.

    Attributes:
        step: the number of the step of each call.
        is_send: whether it sends.
        peer: the rank at the other end; -1 for the collectives of gloo, at which a rank waits as well.
        group: a hash of the name of the process group.
        batch: equal for calls without an operator or a launch in between: the tensors of one microbatch.
        ready_ns: when this end is ready: the start of the kernel or, without a GPU, of the call.
        wait_ns: when the rank begins to wait; the waits of a rank do not overlap.
        end_ns: the end of the transfer.
        exposed_ns: how long the rank does nothing but wait.
        number: the number of each step.
        start_ns: its start: that of its first GPU work or, without a GPU, of its range.
        finish_ns: its end: on a GPU, the start of the next one; else the end of its range.
        busy_ns: how long the rank computes in it.
        last_ns: when it last computes in it.
        on_cpu: whether the rank has no GPU.
        unknown: why the calls of the rank are not known; empty if they are.
    """

    step: Array
    is_send: Array
    peer: Array
    group: Array
    batch: Array
    ready_ns: Array
    wait_ns: Array
    end_ns: Array
    exposed_ns: Array
    number: Array
    start_ns: Array
    finish_ns: Array
    busy_ns: Array
    last_ns: Array
    on_cpu: bool
    unknown: str = ""


def transfers_of(trace: Trace, collectives: Collectives = "auto") -> Transfers | None:
    """Return the sends and receives of a rank; None if it has none.

    Args:
        trace: the trace of the rank.
        collectives: which kernels communicate.
    """
    operators = trace.operators
    transfer, called = operators.matching("name", CALLS), operators.matching("name", _ALL_CALLS)
    if not transfer.any():
        return None
    rows = np.flatnonzero(transfer if trace.gpu else called)
    step_row = StepIndex(trace).rows_at(operators.start_ns[rows], operators.thread[rows])
    rows, step_row = rows[step_row >= 0], step_row[step_row >= 0]
    peer, group, unknown = _other_ends(trace, rows)
    number, start, finish = _step_times(trace)
    if not trace.steps or not len(number):
        unknown = "no steps are marked, or no work of the GPU is in them"
    if unknown:
        return Transfers._make([*[np.empty(0, np.int64)] * (len(Transfers._fields) - 2), False, unknown])
    calls, others = operators.where(rows), operators.where(~called)
    ready, wait, end = _in_kernels(trace, calls) if trace.gpu else _in_ranges(trace, calls, others)
    computes = trace.gpu.where(~communication_mask(trace.gpu, collectives) & (trace.gpu.category == KERNEL))
    compute = merge_overlaps(computes.start_ns, computes.end_ns)
    step = trace.steps.number[step_row]
    place = np.searchsorted(number, step).clip(max=len(number) - 1)
    found = (end >= 0) & (number[place] == step)
    wait, end = np.maximum(wait, start[place]), np.where(found, np.minimum(end, finish[place]), 0)
    order = np.argsort(wait, kind="stable")
    reach = np.maximum.accumulate(end[order])
    wait[order[1:]] = np.maximum(wait[order[1:]], reach[:-1])  # calls that run at once are waited for once
    end = np.maximum(end, wait)
    exposed = np.where(found, end - wait - covered_ns(compute, wait, end), 0)
    if trace.gpu:
        busy = covered_ns(compute, start, finish)
        before = np.searchsorted(compute[0], finish) - 1
        last = np.clip(np.append(compute[1], 0)[before], start, finish)
    else:
        busy, last = finish - start - np.bincount(place, exposed, len(number)).astype(np.int64), finish
    launched = trace.runtime.start_ns[computes.launch[computes.launch >= 0]]
    batch = np.searchsorted(np.sort(np.concatenate((others.start_ns, launched))), calls.start_ns)
    unknown = "" if found.any() else "neither a kernel nor a range belongs to its sends and receives"
    columns = (step, calls.matching("name", _SEND), peer, group, batch, ready, wait, end, exposed)
    of_steps = (number, start, finish, busy, last)
    return Transfers._make([*(column[found] for column in columns), *of_steps, not trace.gpu, unknown])


def _other_ends(trace: Trace, rows: Array) -> tuple[Array, Array, str]:
    """Return the rank at the other end of each call and a hash of the process group, or why they are not known.

    The operator inside a call of NCCL says both. For other backends, the call has the place of the rank in its
    process group, which has to be the only one.
    """
    operators = trace.operators
    inner = np.flatnonzero(operators.peer >= 0)
    peers, groups = np.full(len(operators) + 1, -1), np.zeros(len(operators) + 1, np.int64)
    peers[operators.parent[inner]], groups[operators.parent[inner]] = operators.peer[inner], operators.group[inner]
    peer, group = peers[rows], map_unique(groups[rows], lambda code: name_hash(trace.strings[code]))
    transfer = operators.where(rows).matching("name", CALLS)
    unnamed = np.flatnonzero((peer < 0) & transfer)
    if not len(unnamed):
        return peer, group, ""
    known = process_groups(trace.metadata)
    if len(known) > 1:
        return peer, group, "the calls do not say which of several process groups they belong to"
    members = next((each.get("ranks") for each in known), None)

    def rank_of(code: int) -> int:
        texts = json.loads(trace.strings[code] or "[]")
        place = natural(texts[2]) if isinstance(texts, list) and len(texts) > 2 else -1
        return natural(members[place]) if isinstance(members, list) and 0 <= place < len(members) else place

    peer[unnamed] = map_unique(operators.scalars[rows[unnamed]], rank_of)
    lost = (
        f"the calls do not say to which rank: record with {to_record(trace.metadata, record_shapes=True)}"
        if (peer[unnamed] < 0).any()
        else ""
    )
    return peer, group, lost


def _in_kernels(trace: Trace, calls: Table) -> tuple[Array, Array, Array]:
    """Return when each call is ready, begins to wait and ends, as its kernel does: the next one on its thread."""
    gpu = trace.gpu
    mask = (gpu.category == KERNEL) & (gpu.launch >= 0) & gpu.matching("name", _KERNELS)
    kernels = gpu.where(mask & gpu.matching("collective", _POINT_TO_POINT))
    launches = trace.runtime.where(kernels.launch)
    at = latest(launches.thread, -launches.start_ns, calls.thread, -calls.start_ns)
    start = np.append(kernels.start_ns, -1)[at]
    return start, start, np.append(kernels.end_ns, -1)[at]


def _in_ranges(trace: Trace, calls: Table, others: Table) -> tuple[Array, Array, Array]:
    """Return the same for gloo, whose ranges begin in the calls; those of collectives on other threads."""
    ranges = trace.regions.where(trace.regions.matching("name", _RANGES))
    lanes, lane = (np.where(rows.matching("name", _TRANSFER), rows.thread, -1) for rows in (ranges, calls))
    at = latest(lanes, -ranges.start_ns, lane, -calls.start_ns)
    end = np.append(ranges.end_ns, -1)[at]
    threads = np.concatenate((others.thread, calls.thread))
    edges = np.concatenate((others.end_ns, calls.start_ns))
    last = latest(threads, edges, calls.thread, end)
    return calls.start_ns, np.maximum(np.append(edges, 0)[last], calls.start_ns), end


def _step_times(trace: Trace) -> tuple[Array, Array, Array]:
    """Return the number, start and end of each step; on a GPU, of the steps with work, whose ends are starts."""
    steps = trace.steps
    if not trace.gpu:
        number, first = np.unique(steps.number, return_index=True)
        return number, steps.start_ns[first], steps.end_ns[first]
    work = trace.gpu.where(trace.gpu.step >= 0)
    number, first = np.unique(steps.number[work.step], return_index=True)
    start = work.start_ns[first]  # work is in order of start
    return number, start, np.append(start[1:], work.end_ns.max(initial=0))[-len(number) :]
