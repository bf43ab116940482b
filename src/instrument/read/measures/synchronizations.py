"""Finds the calls that made the CPU wait for the GPU, how long they blocked, and how long the GPU was idle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..tables.intervals import covered_ns, merge_overlaps
from ..tables.lanes import LaneAxis, group_rows, is_among, latest
from ..tables.nest import NestedRanges
from ..tables.table import MEMCPY, Array, Table
from ..tables.trace import Trace

NONE, EXPLICIT, COPY, FREE = range(4)
"""Kinds of calls: not blocking; explicit synchronization; blocking memcpy; memory freed while the GPU ran."""

_CUDA = "cuda|hip|cu|musa|mu|mc|tops"  # the runtimes whose calls have CUDA's names


class Runtime(NamedTuple):
    """The calls of one runtime, or of several with the same names, and those that wait for the GPU."""

    calls: str
    waits: str
    copies: str = "$."  # nothing


_RUNTIMES = (
    Runtime(  # CUDA, HIP, and those of Moore Threads, MetaX and Enflame
        f"(?:{_CUDA})[A-Z]",
        f"(?:{_CUDA})(?:Stream|Device|Ctx|Context|Thread|Event)Synchronize(?:_v\\d+|_ptsz|_spt)*$",
        f"(?:{_CUDA})Memcpy(?!.*(?:Async|Peer|Batch))(?:2D|3D|To|From|Hto[DA]|[DA]toH|WithStream|$|_)",
    ),
    Runtime("ze[A-Z]", "ze(?:Event|Fence|CommandList)HostSynchronize$|zeCommandQueueSynchronize$"),  # Level Zero
    Runtime("(?:ur|pi)[A-Z]", "(?:urEventWait|piEventsWait|(?:ur|pi)QueueFinish)$"),  # SYCL
    Runtime("cl[A-Z]", "cl(?:Finish|WaitForEvents)$"),  # OpenCL
    Runtime("acl", "aclrtSynchronize(?:Stream|Device|Event)(?:WithTimeout)?$", "aclrtMemcpy(?:2d)?$"),  # Ascend
    Runtime("syn[A-Z]", "syn(?:Stream|Device|Event)Synchronize$"),  # Gaudi
    Runtime("cnrt|cn[A-Z]", "cnrt(?:QueueSync|SyncDevice|WaitNotifier)$", "cnrtMemcpy(?:2D|3D)?$"),  # Cambricon
)
_KNOWN, _EXPLICIT, _COPY = (
    re.compile("^(?:" + "|".join(getattr(runtime, kind) for runtime in _RUNTIMES) + ")")
    for kind in Runtime._fields
)
_DRIVER = re.compile(r"^(?:xpu|privateuse1)_driver$")  # categories of `Trace.others`
_FREE = re.compile(
    r"^(?:cuda|hip)(?:Free(?:Host|Array|MipmappedArray)?|Host(?:Unregister|Free))$"
    r"|^cu(?:Mem(?:Free(?:Host)?|HostUnregister)|ArrayDestroy|ModuleUnload)(?:_v\d+)?$"
)
_STREAM_CALL = re.compile(r"WithStream")  # blocks for any direction
_NOT_BLOCKING = re.compile(r"Query|WaitEvent")  # these do not block, though CUPTI records them as synchronizations
_TO_GPU, _TO_CPU = (  # Intel's M is memory of the host
    re.compile(r"[HA]to[DA]\b|HOST_TO_DEVICE|\([HM]2D\)"), re.compile(r"DtoH|AtoH|DEVICE_TO_HOST|\(D2[HM]\)"),
)  # fmt: skip
_INSIDE_GPU = re.compile(r"DtoD|DtoA|AtoD|PtoP|DEVICE_TO_DEVICE")
_PAGEABLE = re.compile("Pageable")


class Synchronization(NamedTuple):
    """One call that made the CPU wait for the GPU.

    Attributes:
        start_ns: the start of the call.
        end_ns: the end of the call.
        blocked_ns: how long it waited.
        kind: EXPLICIT, COPY or FREE.
        call: the name of the function.
        thread: an index of `Trace.threads`; -1 if unknown.
        copy: the row of the last memcpy between CPU and GPU that the thread launched, by this call or before it.
        copy_ns: the start of the call that launched this memcpy.
        adjacent: whether that call is this one, or the call right before it.
        device: the device that it waited for; -1 if unknown.
        idle_ns: how long the synchronization left that device without work: the time from the end of its work to
            the start of its next work, but at most `blocked_ns`. None if no work follows. Synchronizations in the
            same gap share it.
    """

    start_ns: int
    end_ns: int
    blocked_ns: int
    kind: int
    call: str
    thread: int
    copy: int
    copy_ns: int
    adjacent: bool
    device: int
    idle_ns: int | None


def find_synchronizations(trace: Trace) -> list[Synchronization]:
    """Return all synchronizations of a trace in order of their start; nested calls count once."""
    gpu = trace.gpu
    launched = np.flatnonzero(gpu.launch >= 0)
    calls, names = _calls(trace, launched)
    thread, start = calls["thread"], calls["start_ns"]
    by, at = trace.runtime.thread[gpu.launch[launched]], trace.runtime.start_ns[gpu.launch[launched]]
    moved = np.flatnonzero(_is_transfer(trace, launched))
    copy, copy_ns, adjacent = np.full(len(start), -1), np.zeros(len(start), np.int64), np.zeros(len(start), bool)
    last = latest(by[moved], at[moved], thread, start)
    some = np.flatnonzero(last >= 0)
    copy[some] = launched[moved[last[some]]]
    copy_ns[some] = at[moved[last[some]]]
    adjacent[some] = _adjacent(trace.runtime, gpu.launch[copy[some]], thread[some], start[some])
    used = _devices(gpu, launched, by, at, thread, start)
    device = np.where(calls["device"] >= 0, calls["device"], used)
    idle = _idle(gpu, calls["end_ns"], calls["blocked_ns"], device)
    arrays = (start, calls["end_ns"], calls["blocked_ns"], calls["kind"], thread, copy, copy_ns, adjacent, device)
    one, two, three, four, *rest = (array.tolist() for array in arrays)
    return [Synchronization(*row) for row in zip(one, two, three, four, names, *rest, idle, strict=True)]


def columns_of(waits: Sequence[Synchronization], *names: str) -> Array:
    """Return attributes of synchronizations that are integers: a row for each of these names."""
    return np.array([[getattr(wait, name) for wait in waits] for name in names], np.int64)


def unknown_calls(trace: Trace) -> list[str]:
    """Return the names of the calls whose runtime is in no table, if they are most of the calls; else nothing."""
    unknown = ~trace.runtime.matching("name", _KNOWN)
    unknown[trace.runtime.matching("category", re.compile("^cann$"))] = False  # the layers above Ascend's runtime
    names, counts = np.unique(trace.runtime.name[unknown], return_counts=True)
    if 2 * counts.sum() <= len(unknown):
        return []
    return [trace.strings[code] for code in names[np.argsort(-counts, kind="stable")].tolist()]


def direction(name: str) -> Literal["H2D", "D2H"] | None:
    """Return the direction of a memcpy of this name; None if it stays on one side."""
    return "H2D" if _TO_GPU.search(name) else "D2H" if _TO_CPU.search(name) else None


def _calls(trace: Trace, launched: Array) -> tuple[dict[str, Array], list[str]]:
    """Return the calls that synchronized, in order of their start, and their names."""
    runtime, syncs = trace.runtime, trace.syncs
    kind, until = _kinds(trace, launched)
    rows, driver = _outermost(trace, np.flatnonzero(kind))
    alone = _only_gpu_side(trace, rows)
    others = trace.others.where(driver)
    unknown, explicit = np.full(len(alone), -1), np.full(len(driver) + len(alone), EXPLICIT)
    parts = {
        "start_ns": (runtime.start_ns[rows], others.start_ns, syncs.start_ns[alone]),
        "end_ns": (runtime.end_ns[rows], others.end_ns, syncs.end_ns[alone]),
        "blocked_ns": (until[rows] - runtime.start_ns[rows], others.duration_ns, syncs.duration_ns[alone]),
        "kind": (kind[rows], explicit),
        "thread": (runtime.thread[rows], others.thread, unknown),
        "device": (np.full(len(rows) + len(driver), -1), syncs.device[alone]),
        "name": (runtime.name[rows], others.name, syncs.name[alone]),
    }
    columns = {name: np.concatenate(part) for name, part in parts.items()}
    order = np.argsort(columns["start_ns"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    return columns, [trace.strings[code] for code in columns.pop("name").tolist()]


def _is_transfer(trace: Trace, launched: Array) -> Array:
    """Return a mask of the memcpys between CPU and GPU."""
    gpu = trace.gpu
    moving = gpu.matching("name", _TO_GPU)[launched] | gpu.matching("name", _TO_CPU)[launched]
    moving |= trace.runtime.matching("name", _STREAM_CALL)[gpu.launch[launched]]
    copies: Array = moving & (gpu.category[launched] == MEMCPY)
    return copies


def _kinds(trace: Trace, launched: Array) -> tuple[Array, Array]:
    """Return the kind of each runtime call, and until when it blocked."""
    runtime, gpu = trace.runtime, trace.gpu
    kind, until = np.zeros(len(runtime), np.int8), runtime.end_ns
    calls = gpu.launch[launched]
    kind[runtime.matching("name", _COPY)] = COPY
    inside = gpu.matching("name", _INSIDE_GPU)[launched]
    # The host does not wait for a memcpy inside the GPU; ROCm gives this name to other memcpys too, and waits for
    # them.
    unmoved = inside & ~runtime.matching("name", _STREAM_CALL)[calls]
    returned = until[calls] < gpu.end_ns[launched]
    kind[calls[unmoved & (returned | runtime.matching("name", re.compile("^cu"))[calls])]] = NONE
    kind[calls[_blocked_by_pages(runtime, gpu, launched)]] = COPY
    free = np.flatnonzero(runtime.matching("name", _FREE))
    done = _work_done(runtime, gpu, launched, free)
    blocked = (runtime.start_ns[free] < done) & (done <= until[free])
    kind[free[blocked]] = FREE
    until[free[blocked]] = done[blocked]
    noted = runtime.correlation >= 0
    noted &= is_among(
        runtime.correlation, trace.syncs.correlation[~trace.syncs.matching("name", re.compile("Wait"))]
    )
    other = (kind == NONE) & noted & ~runtime.matching("name", _NOT_BLOCKING) & ~runtime.matching("name", _FREE)
    kind[other] = EXPLICIT
    kind[runtime.matching("name", _EXPLICIT)] = EXPLICIT
    return kind, until


def _blocked_by_pages(runtime: Table, gpu: Table, launched: Array) -> Array:
    """Return a mask of memcpys of pageable memory that ran at least half of their time during the call.

    The driver copies pageable memory in chunks through its own buffer: the call for a large memcpy returns shortly
    before the last chunk has arrived, the call for a small one to the GPU before it is sent.
    """
    calls = gpu.launch[launched]
    start, end = gpu.start_ns[launched], gpu.end_ns[launched]
    both = np.minimum(end, runtime.end_ns[calls]) - np.maximum(start, runtime.start_ns[calls])
    pageable: Array = gpu.matching("name", _PAGEABLE)[launched] & (gpu.category[launched] == MEMCPY)
    return pageable & (both >= 0) & (2 * both >= end - start)


def _work_done(runtime: Table, gpu: Table, launched: Array, rows: Array) -> Array:
    """Return when the work launched before each call had ended, on the device that its thread used last."""
    calls = gpu.launch[launched]
    at, by = runtime.start_ns[calls], runtime.thread[calls]
    device = _devices(gpu, launched, by, at, runtime.thread[rows], runtime.start_ns[rows])
    done = np.full(len(rows), np.iinfo(np.int64).min)
    work = dict(group_rows(gpu.device[launched]))
    for number, chosen in group_rows(device):
        if number < 0 or number not in work:
            continue
        own = work[number][np.argsort(at[work[number]], kind="stable")]
        ends = np.maximum.accumulate(gpu.end_ns[launched[own]])
        last = np.searchsorted(at[own], runtime.start_ns[rows[chosen]]) - 1
        done[chosen[last >= 0]] = ends[last[last >= 0]]
    return done


def _outermost(trace: Trace, rows: Array) -> tuple[Array, Array]:
    """Return the runtime's calls of ``rows``, and the driver's waits, that lie inside no other of these."""
    others = trace.others
    driver = np.flatnonzero(others.matching("category", _DRIVER) & others.matching("name", _EXPLICIT))
    calls, inner = trace.runtime.where(rows), others.where(driver)
    start, end, thread = (
        np.concatenate((getattr(calls, name), getattr(inner, name))) for name in ("start_ns", "end_ns", "thread")
    )
    order = np.lexsort((-end, start))
    outer = np.empty(len(order), bool)
    outer[order] = NestedRanges(start[order], end[order], thread[order]).parents < 0
    return rows[outer[: len(rows)]], driver[outer[len(rows) :]]


def _only_gpu_side(trace: Trace, rows: Array) -> Array:
    """Return the synchronizations that CUPTI recorded and whose call is not in the trace."""
    syncs, runtime = trace.syncs, trace.runtime
    has_call = (syncs.correlation >= 0) & is_among(syncs.correlation, runtime.correlation)
    waited = merge_overlaps(runtime.start_ns[rows], runtime.end_ns[rows])
    within = (covered_ns(waited, syncs.start_ns, syncs.end_ns) == syncs.duration_ns) & (syncs.duration_ns > 0)
    return np.flatnonzero(~has_call & ~within & ~syncs.matching("name", re.compile("Wait|Unknown")))


def _devices(gpu: Table, launched: Array, by: Array, at: Array, thread: Array, start: Array) -> Array:
    """Return the device of the last launch of each thread or, if it launched nothing, of any thread."""
    last = latest(by, at, thread, start)
    anybody = latest(np.zeros_like(by), at, np.zeros_like(thread), start)
    last = np.where(last >= 0, last, anybody)
    only = np.unique(gpu.device)
    device = np.full(len(thread), only[0] if len(only) == 1 else -1)
    device[last >= 0] = gpu.device[launched[last[last >= 0]]]
    return device


def _adjacent(runtime: Table, launch: Array, thread: Array, start: Array) -> Array:
    """Return whether the thread made no other call between the launch of the memcpy and the synchronization."""
    returned = runtime.end_ns[launch]
    lanes = LaneAxis(int(runtime.thread.max(initial=-1)), runtime.start_ns, start, returned)
    begun = np.sort(lanes.positions(runtime.thread, runtime.start_ns))
    between = np.searchsorted(begun, lanes.positions(thread, start)) - np.searchsorted(
        begun, lanes.positions(thread, returned)
    )
    alone: Array = between <= 0
    return alone


def _idle(gpu: Table, end: Array, blocked: Array, device: Array) -> list[int | None]:
    """Return `Synchronization.idle_ns` of each call."""
    idle: list[int | None] = [None] * len(end)
    work, ends_ns = dict(group_rows(gpu.device)), gpu.end_ns
    nothing = np.empty(0, np.int64)
    for number, calls in group_rows(device):
        rows = work.get(number, nothing)
        starts, ends = merge_overlaps(gpu.start_ns[rows], ends_ns[rows])
        calls = calls[np.argsort(end[calls], kind="stable")]
        before, left = -1, 0  # the current gap, and how much of it is not yet assigned
        for row, after in zip(calls.tolist(), np.searchsorted(starts, end[calls], "right").tolist(), strict=True):
            since = int(ends[after - 1]) if after else int(end[row])
            if since > end[row]:
                idle[row] = 0
            elif after < len(starts):
                left = left if after == before else int(starts[after]) - since
                before, idle[row] = after, min(left, int(blocked[row]))
                left -= idle[row] or 0
    return idle
