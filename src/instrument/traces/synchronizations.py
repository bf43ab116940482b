"""Which calls in a trace made the CPU wait for the GPU, for how long, and what the GPU had to do afterwards."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import numpy as np

from .intervals import covered_ns, merge_overlaps
from .lanes import LaneAxis, group_rows
from .nest import NestedRanges
from .table import MEMCPY, Array, Table
from .trace import Trace

NONE, EXPLICIT, COPY, FREE = range(4)
"""No wait; a synchronisation that was asked for; a copy that blocks; memory given back while the GPU ran."""

_EXPLICIT = re.compile(
    r"^(?:cuda|hip|cu)(?:Stream|Device|Ctx|Context|Thread|Event)Synchronize(?:_v\d+|_ptsz|_spt)*$"
)
_COPY = re.compile(
    r"^(?:cuda|hip|cu)Memcpy(?!.*(?:Async|Peer|Batch))(?:2D|3D|To|From|Hto[DA]|[DA]toH|WithStream|$|_)"
)
_FREE = re.compile(
    r"^(?:cuda|hip)(?:Free(?:Host|Array|MipmappedArray)?|Host(?:Unregister|Free))$"
    r"|^cu(?:Mem(?:Free(?:Host)?|HostUnregister)|ArrayDestroy|ModuleUnload)(?:_v\d+)?$"
)
_UPON_STREAM = re.compile(r"WithStream")  # waits whatever it copies
_ASKS = re.compile(r"Query|WaitEvent")  # neither waits for the GPU, though CUPTI notes both as synchronisations
_TO_GPU, _TO_CPU = re.compile(r"[HA]to[DA]\b|HOST_TO_DEVICE"), re.compile(r"DtoH|AtoH|DEVICE_TO_HOST")
_INSIDE = re.compile(r"DtoD|DtoA|AtoD|PtoP|DEVICE_TO_DEVICE")
_PAGEABLE = re.compile("Pageable")


class Synchronization(NamedTuple):
    """One call that waited.

    Attributes:
        start_ns: when the call began.
        end_ns: when it returned.
        blocked_ns: how much of that it waited.
        kind: EXPLICIT, COPY or FREE.
        call: its name.
        thread: a number of `Trace.threads`; -1 where the trace does not say.
        copy: the row of the last copy between CPU and GPU that the thread launched, with this call or before.
        copy_ns: when the call that launched it began.
        adjacent: it was this call, or the one right before it.
        device: whose work it waited for, as far as can be told.
        idle_ns: for how long the wait left that device without work: from the end of what it did to the start of
            what follows, but no longer than the call blocked, as without the wait the program would have come to
            it by so much earlier. None where nothing follows. Several waits in one gap share it.
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
    """Return all waits of ``trace`` in order of their start; what one call does inside another one is one wait."""
    gpu = trace.gpu
    launched = np.flatnonzero(gpu.launch >= 0)
    calls, names = _calls(trace, launched)
    thread, start = calls["thread"], calls["start_ns"]
    by, at = trace.runtime.thread[gpu.launch[launched]], trace.runtime.start_ns[gpu.launch[launched]]
    moved = np.flatnonzero(_moving(trace, launched))
    copy, copy_ns, adjacent = np.full(len(start), -1), np.zeros(len(start), np.int64), np.zeros(len(start), bool)
    last = _latest(by[moved], at[moved], thread, start)
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


def direction(name: str) -> Literal["H2D", "D2H"] | None:
    """Return where a copy of this name goes; None for one that stays where it is."""
    return "H2D" if _TO_GPU.search(name) else "D2H" if _TO_CPU.search(name) else None


def _calls(trace: Trace, launched: Array) -> tuple[dict[str, Array], list[str]]:
    """The calls that waited, in order of their start, and their names."""
    runtime, syncs = trace.runtime, trace.syncs
    kind, until = _kinds(trace, launched)
    rows = _outermost(runtime, np.flatnonzero(kind))
    alone = _only_gpu_side(trace, rows)
    nothing = np.full(len(alone), -1)
    parts = {
        "start_ns": (runtime.start_ns[rows], syncs.start_ns[alone]),
        "end_ns": (runtime.end_ns[rows], syncs.end_ns[alone]),
        "blocked_ns": (until[rows] - runtime.start_ns[rows], syncs.duration_ns[alone]),
        "kind": (kind[rows], np.full(len(alone), EXPLICIT)),
        "thread": (runtime.thread[rows], nothing),
        "device": (np.full(len(rows), -1), syncs.device[alone]),
        "name": (runtime.name[rows], syncs.name[alone]),
    }
    columns = {name: np.concatenate(part) for name, part in parts.items()}
    order = np.argsort(columns["start_ns"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    return columns, [trace.strings[code] for code in columns.pop("name").tolist()]


def _moving(trace: Trace, launched: Array) -> Array:
    """Which work copies between CPU and GPU."""
    gpu = trace.gpu
    moving = gpu.matching("name", _TO_GPU)[launched] | gpu.matching("name", _TO_CPU)[launched]
    moving |= trace.runtime.matching("name", _UPON_STREAM)[gpu.launch[launched]]
    copies: Array = moving & (gpu.category[launched] == MEMCPY)
    return copies


def _kinds(trace: Trace, launched: Array) -> tuple[Array, Array]:
    """What each call of the runtime is, and until when it waited."""
    runtime, gpu = trace.runtime, trace.gpu
    kind, until = np.zeros(len(runtime), np.int8), runtime.end_ns
    calls = gpu.launch[launched]
    kind[runtime.matching("name", _COPY)] = COPY
    inside = gpu.matching("name", _INSIDE)[launched]
    # The host does not wait for a copy inside the GPU; ROCm calls others so, and those it waits for.
    unmoved = inside & ~runtime.matching("name", _UPON_STREAM)[calls]
    returned = until[calls] < gpu.end_ns[launched]
    kind[calls[unmoved & (returned | runtime.matching("name", re.compile("^cu"))[calls])]] = NONE
    kind[calls[_blocked_by_pages(runtime, gpu, launched)]] = COPY
    free = np.flatnonzero(runtime.matching("name", _FREE))
    done = _work_done(runtime, gpu, launched, free)
    blocked = (runtime.start_ns[free] < done) & (done <= until[free])
    kind[free[blocked]] = FREE
    until[free[blocked]] = done[blocked]
    noted = runtime.correlation >= 0
    noted &= np.isin(
        runtime.correlation, trace.syncs.correlation[~trace.syncs.matching("name", re.compile("Wait"))]
    )
    other = (kind == NONE) & noted & ~runtime.matching("name", _ASKS) & ~runtime.matching("name", _FREE)
    kind[other] = EXPLICIT
    kind[runtime.matching("name", _EXPLICIT)] = EXPLICIT
    return kind, until


def _blocked_by_pages(runtime: Table, gpu: Table, launched: Array) -> Array:
    """Which copies of pageable memory ran, at least half of their time, while the call that asked for them did.

    The driver copies such memory piece by piece through its own: the call of a large one returns a little before
    the last piece has arrived, that of a small one to the GPU before it is sent.
    """
    calls = gpu.launch[launched]
    start, end = gpu.start_ns[launched], gpu.end_ns[launched]
    both = np.minimum(end, runtime.end_ns[calls]) - np.maximum(start, runtime.start_ns[calls])
    pageable: Array = gpu.matching("name", _PAGEABLE)[launched] & (gpu.category[launched] == MEMCPY)
    return pageable & (both >= 0) & (2 * both >= end - start)


def _work_done(runtime: Table, gpu: Table, launched: Array, rows: Array) -> Array:
    """When all that was launched before each call had ended, on the device that its thread used last."""
    calls = gpu.launch[launched]
    at, by = runtime.start_ns[calls], runtime.thread[calls]
    device = _devices(gpu, launched, by, at, runtime.thread[rows], runtime.start_ns[rows])
    done = np.full(len(rows), np.iinfo(np.int64).min)
    work = dict(group_rows(gpu.device[launched]))
    for number, chosen in group_rows(device):
        if number < 0 or number not in work:
            continue
        here = work[number][np.argsort(at[work[number]], kind="stable")]
        ends = np.maximum.accumulate(gpu.end_ns[launched[here]])
        last = np.searchsorted(at[here], runtime.start_ns[rows[chosen]]) - 1
        done[chosen[last >= 0]] = ends[last[last >= 0]]
    return done


def _outermost(runtime: Table, rows: Array) -> Array:
    """The rows without those that lie in another one of them on their thread."""
    calls = runtime.where(rows)
    return rows[NestedRanges(calls.start_ns, calls.end_ns, calls.thread).parents < 0]


def _only_gpu_side(trace: Trace, rows: Array) -> Array:
    """The synchronisations that CUPTI noted, and of which no call is in the trace."""
    syncs, runtime = trace.syncs, trace.runtime
    known = (syncs.correlation >= 0) & np.isin(syncs.correlation, runtime.correlation)
    waited = merge_overlaps(runtime.start_ns[rows], runtime.end_ns[rows])
    within = (covered_ns(waited, syncs.start_ns, syncs.end_ns) == syncs.duration_ns) & (syncs.duration_ns > 0)
    return np.flatnonzero(~known & ~within & ~syncs.matching("name", re.compile("Wait|Unknown")))


def _latest(threads: Array, times: Array, thread: Array, start: Array) -> Array:
    """The last of the first ones that began on the same thread before or with each of the second; -1 for none."""
    if not len(threads):
        return np.full(len(thread), -1)
    lanes = LaneAxis(int(max(threads.max(), thread.max(initial=-1))), times, start)
    places = lanes.positions(threads, times)
    order = np.argsort(places, kind="stable")
    last = order[np.searchsorted(places[order], lanes.positions(thread, start), "right") - 1]
    before = (threads[last] == thread) & (times[last] <= start)
    return np.where(before, last, -1)


def _devices(gpu: Table, launched: Array, by: Array, at: Array, thread: Array, start: Array) -> Array:
    """The device on which each thread launched last; if it did on none, any thread."""
    last = _latest(by, at, thread, start)
    anybody = _latest(np.zeros_like(by), at, np.zeros_like(thread), start)
    last = np.where(last >= 0, last, anybody)
    only = np.unique(gpu.device)
    device = np.full(len(thread), only[0] if len(only) == 1 else -1)
    device[last >= 0] = gpu.device[launched[last[last >= 0]]]
    return device


def _adjacent(runtime: Table, launch: Array, thread: Array, start: Array) -> Array:
    """Whether nothing else was called on the thread between a copy's launch and the wait."""
    returned = runtime.end_ns[launch]
    lanes = LaneAxis(int(runtime.thread.max(initial=-1)), runtime.start_ns, start, returned)
    begun = np.sort(lanes.positions(runtime.thread, runtime.start_ns))
    between = np.searchsorted(begun, lanes.positions(thread, start)) - np.searchsorted(
        begun, lanes.positions(thread, returned)
    )
    alone: Array = between <= 0
    return alone


def _idle(gpu: Table, end: Array, blocked: Array, device: Array) -> list[int | None]:
    """How long each wait left its device without work; see `Synchronization`."""
    found: list[int | None] = [None] * len(end)
    work, ends_ns = dict(group_rows(gpu.device)), gpu.end_ns
    nothing = np.empty(0, np.int64)
    for number, here in group_rows(device):
        rows = work.get(number, nothing)
        starts, ends = merge_overlaps(gpu.start_ns[rows], ends_ns[rows])
        here = here[np.argsort(end[here], kind="stable")]
        before, left = -1, 0  # of which gap how much is not yet a wait's
        for row, after in zip(here.tolist(), np.searchsorted(starts, end[here], "right").tolist(), strict=True):
            since = int(ends[after - 1]) if after else int(end[row])
            if since > end[row]:
                found[row] = 0
            elif after < len(starts):
                left = left if after == before else int(starts[after]) - since
                before, found[row] = after, min(left, int(blocked[row]))
                left -= found[row] or 0
    return found
