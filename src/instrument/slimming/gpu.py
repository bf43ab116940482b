"""Chooses the args of GPU work, of the calls that launch it, and of synchronizations that stay."""

from __future__ import annotations

import re

import numpy as np

from ..diagnosis.idle_causes import SLOW_NS
from ..diagnosis.matmul import matmul_rows
from ..diagnosis.rules.host import QUERIES
from ..diagnosis.trace_facts import TraceFacts
from ..traces.nest import inside_rows
from ..traces.table import KERNEL, MEMCPY, Array, Table
from ..traces.trace import Trace
from .operators import EXTERNAL
from .parts import Part, extremes, part

FLOW_OUT, FLOW_IN = ("flow_out",), ("flow_in",)
"""Stand for the correlation ids of a launch and its work: a flow between them, which viewers show as an arrow."""

EVENT_IDS = ("correlation", "wait_on_cuda_event_record_corr_id")
"""The args that hold correlation ids."""

_PLACE = ("device", "stream")
_COLLECTIVE = ("Collective name", "Process Group Name", "In msg nelems", "Out msg nelems", "dtype")
_RECORD = re.compile("EventRecord")
_WAITS = re.compile("Synchronize|Memcpy|Free")
_WAIT = re.compile("Stream Wait Event|Event Sync")


def named_by_external(trace: Trace) -> Array:
    """Return the external ids that link GPU work to operators.

    They are those of the work without a launch or, in a trace without correlation ids, of all work.
    """
    gpu = trace.gpu
    if not has_correlations(trace):
        return np.unique(gpu.external[gpu.external >= 0])
    alone = (gpu.launch < 0) & (gpu.external >= 0) & (gpu.external != gpu.correlation)
    return np.unique(gpu.external[alone])


def has_correlations(trace: Trace) -> bool:
    """Return whether correlation ids link the GPU work of a trace to its launches; else external ids do."""
    return bool((trace.gpu.correlation >= 0).any() or (trace.runtime.correlation >= 0).any())


def used_correlations(trace: Trace) -> Array:
    """Return the correlation ids of the GPU work and of the synchronizations that CUPTI recorded."""
    return np.unique(np.concatenate((trace.gpu.correlation, trace.syncs.correlation)))


def kept_runtime(facts: TraceFacts, named: Array, *, queries: bool) -> Part:
    """Return the calls of the runtime that stay: all but queries that no finding counts.

    Args:
        facts: the facts of the trace.
        named: the external ids that `named_by_external` returns.
        queries: whether a finding counts the calls that query attributes.
    """
    trace = facts.trace
    runtime, launches = trace.runtime, np.zeros(len(trace.runtime), bool)
    launches[trace.gpu.launch[trace.gpu.launch >= 0]] = True
    linked = np.isin(runtime.correlation, used_correlations(trace)) & (runtime.correlation >= 0)
    if trace.syncs.matching("name", _WAIT).any():
        linked |= runtime.matching("name", _RECORD)
    by_external = np.isin(runtime.external, named) & (not has_correlations(trace))
    args = ((EXTERNAL, by_external), (FLOW_OUT, linked & launches), (EVENT_IDS[:1], linked & ~launches))
    kept = np.ones(len(runtime), bool) if queries else linked | ~_idle_queries(facts)
    return part(runtime, kept, args)


def _idle_queries(facts: TraceFacts) -> Array:
    """Return a mask of the queries of attributes on whose times no number depends.

    The start of an event counts if it is the first in a region, or stands between a copy and a synchronization;
    where several threads launch work, every event shows that its thread is not waiting for another.
    """
    trace, runtime = facts.trace, facts.trace.runtime
    threads = (trace.steps.thread, runtime.thread[trace.gpu.launch[trace.gpu.launch >= 0]])
    waiting = [np.array([wait.thread for wait in facts.waits], np.int64)]
    if len(np.unique(np.concatenate((*threads, *waiting)))) > 1:
        return np.zeros(len(runtime), bool)
    found = runtime.matching("name", QUERIES) & (runtime.duration_ns < SLOW_NS)
    starts = np.sort(np.concatenate([each.start_ns for each in (trace.operators, trace.regions, runtime)]))
    first = np.searchsorted(starts, trace.regions.start_ns, "right")
    found &= ~np.isin(runtime.start_ns, starts[first[first < len(starts)]])
    order = np.lexsort((runtime.start_ns, runtime.thread))
    waits = np.append(runtime.matching("name", _WAITS)[order], True)[1:]
    found[order[waits]] = False
    return found & ~extremes(runtime, int(runtime.start_ns.min(initial=0)), int(runtime.end_ns.max(initial=0)))


def kept_gpu(trace: Trace, named: Array) -> Part:
    """Return the GPU work: all of it stays."""
    gpu = trace.gpu
    kernel, copy = gpu.category == KERNEL, gpu.category == MEMCPY
    inside = inside_rows(matmul_rows(trace.operators), trace.operators.parent)
    of_matmul = np.append(inside, False)[gpu.operator]
    alone = (gpu.launch < 0) | (not has_correlations(trace))
    collective = (gpu.collective > 0) | (gpu.group > 0) | (gpu.dtype > 0) | (gpu.elements_in >= 0)
    args = (
        (_PLACE, True),
        (("bytes", "size"), copy),
        (("grid",), kernel & (np.isnan(gpu.blocks_per_sm) | of_matmul)),
        (("block",), kernel & _threads_count(trace, gpu)),
        (("blocks per SM",), kernel & ~np.isnan(gpu.blocks_per_sm)),
        (("est. achieved occupancy %",), kernel & ~np.isnan(gpu.occupancy_percent)),
        (_COLLECTIVE, kernel & (collective | (gpu.elements_out >= 0))),
        (EXTERNAL, alone & np.isin(gpu.external, named)),
        (FLOW_IN, (gpu.launch >= 0) & (gpu.correlation >= 0)),
        (EVENT_IDS[:1], (gpu.launch < 0) & (gpu.correlation >= 0)),
    )
    return part(gpu, np.ones(len(gpu), bool), args)


def _threads_count(trace: Trace, gpu: Table) -> bool:
    """Return whether occupancy is computed from the threads per block, which needs the limits of the device."""
    return any(device.threads_per_sm for device in trace.devices) or bool(np.isnan(gpu.blocks_per_sm).any())


def kept_syncs(trace: Trace) -> Part:
    """Return the synchronizations that CUPTI recorded."""
    syncs = trace.syncs
    waits = syncs.matching("name", _WAIT)
    args = (
        (_PLACE, True),
        (("wait_on_stream",), waits),
        (EVENT_IDS[1:], waits),
        (EVENT_IDS[:1], syncs.correlation >= 0),
    )
    return part(syncs, np.ones(len(syncs), bool), args)


def may_renumber(trace: Trace) -> bool:
    """Return whether correlation ids can get other numbers: not if external ids stay.

    An external id that equals the correlation id means nothing (traces of 2022), and others must not become equal.
    """
    return not len(named_by_external(trace))
