"""Memory by category: what the allocated bytes are for, by when they were allocated and freed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...read.tables.intervals import merge_overlaps
from ...read.tables.lanes import group_rows
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace
from .idle import named_ranges

CATEGORIES = {
    "before_recording": "allocated before the recording: parameters, and optimizer state of earlier steps",
    "activations": "allocated outside backward pass and optimizer, and freed by the backward pass",
    "gradients": "allocated in the backward pass, and kept after it",
    "optimizer": "allocated in an optimizer's step",
    "temporary": "freed in the pass in which it was allocated",
    "kept": "allocated outside backward pass and optimizer, and freed later or never: batches, results",
}
"""The categories, which add up to the allocated bytes; torch's memory timeline has similar ones."""

_NODE = re.compile("^autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"^Optimizer\.step#")
"""The ranges that torch records around a step of an optimizer."""
_SMALLEST = 100_000  # bytes, that are worth showing
_FORWARD_PASS, _BACKWARD_PASS, _OPTIMIZER_STEP, _NEVER = range(4)


@dataclass(frozen=True)
class MemoryUse:
    """What the memory of a GPU is used for.

    Attributes:
        device: the number of the GPU, of several the one with the highest peak.
        peak_bytes: the allocated bytes at their highest.
        reserved_bytes: what torch's allocator had reserved then; None if the trace does not say.
        by_category: the allocated bytes then by category.
        growth_bytes: by category, how much more is allocated at the end of the last step than at the end of the
            first, divided by the number of steps between; None with fewer than two steps.
    """

    device: int
    peak_bytes: int
    reserved_bytes: int | None
    by_category: Mapping[str, int]
    growth_bytes: Mapping[str, int] | None


def memory_use(trace: Trace, events: Table) -> MemoryUse | None:
    """Return what the memory is used for; None if no allocation has an address and a total.

    Args:
        trace: the trace.
        events: the rows of its memory events that count, such as those on GPUs.
    """
    events = events.where((events.allocated_bytes >= 0) & (events.address >= 0))
    if not events:
        return None
    device = int(events.device[np.argmax(events.allocated_bytes)])
    events = events.where(events.device == device)
    allocated = np.flatnonzero(events.bytes > 0)
    freed = freed_by(events)[allocated]
    categories = _categories(trace, events, allocated, freed)

    def by_category(at: int) -> dict[str, int]:
        """Return the allocated bytes after the event in this row."""
        alive = (allocated <= at) & (freed > at)
        parts = {name: int(events.bytes[allocated[alive & (categories == name)]].sum()) for name in CATEGORIES}
        total = int(events.allocated_bytes[at]) if at >= 0 else 0
        return parts | {"before_recording": max(total - sum(parts.values()), 0)}

    peak, steps = int(np.argmax(events.allocated_bytes)), trace.steps
    reserved = int(events.reserved_bytes[peak])
    growth = None
    if len(steps) > 1:
        ends = np.searchsorted(events.start_ns, [steps.end_ns[0], steps.end_ns[-1]], "right") - 1
        first, last = map(by_category, ends.tolist())
        growth = {name: round((last[name] - first[name]) / (len(steps) - 1)) for name in CATEGORIES}
    return MemoryUse(
        device,
        int(events.allocated_bytes[peak]),
        reserved if reserved >= 0 else None,
        by_category(peak),
        growth,
    )


def megabytes(parts: Mapping[str, int]) -> str:
    """Return the sizes of categories in words, the largest first, without those below 0.1 MB."""
    order = sorted(parts.items(), key=lambda item: -abs(item[1]))
    return ", ".join(
        f"{name.replace('_', ' ')} {size / 1e6:,.1f} MB" for name, size in order if abs(size) >= _SMALLEST
    )


def freed_by(events: Table) -> Array:
    """Return for each event that allocates the row of the event that frees it; the number of rows for none."""
    order = np.argsort(events.address, kind="stable")
    address, change = events.address[order], events.bytes[order]
    pairs = np.flatnonzero((address[1:] == address[:-1]) & (change[:-1] > 0) & (change[1:] < 0))
    freed = np.full(len(events), len(events))
    freed[order[pairs]] = order[pairs + 1]
    return freed


def _categories(trace: Trace, events: Table, allocated: Array, freed: Array) -> Array:
    """Return the category of each block of memory, by the rows of the events that allocated and freed it."""
    kinds, numbers = _passes(trace, events)
    begun, ended = kinds[allocated], np.append(kinds, _NEVER)[freed]
    same = np.append(numbers, -1)[freed] == numbers[allocated]
    activation = (begun == _FORWARD_PASS) & (ended == _BACKWARD_PASS)
    chosen = [same, begun == _OPTIMIZER_STEP, begun == _BACKWARD_PASS, activation]
    return np.select(chosen, ["temporary", "optimizer", "gradients", "activations"], "kept")


def _passes(trace: Trace, events: Table) -> tuple[Array, Array]:
    """Return for each event the kind of pass that it is in, and a number that differs between passes."""
    at, kinds = events.start_ns, np.full(len(events), _FORWARD_PASS)
    bounds = [trace.steps.end_ns]
    for thread, starts, ends in _backward_passes(trace):
        kinds[_inside(at, starts, ends) & (events.thread == thread)] = _BACKWARD_PASS
        bounds += [starts, ends]
    for steps in named_ranges(trace, OPTIMIZER):
        for thread, rows in group_rows(steps.thread):
            starts, ends = merge_overlaps(steps.start_ns[rows], steps.end_ns[rows])
            kinds[_inside(at, starts, ends) & (events.thread == thread)] = _OPTIMIZER_STEP
            bounds += [starts, ends]
    return kinds, np.searchsorted(np.sort(np.concatenate(bounds)), at, "right")


def _backward_passes(trace: Trace) -> Iterator[tuple[int, Array, Array]]:
    """Yield for each thread the starts and ends of its runs of nodes of autograd, without operators between."""
    outer = trace.operators.where(trace.operators.parent < 0)
    nodes = outer.matching("name", _NODE)
    for thread, rows in group_rows(outer.thread):
        rows = rows[np.argsort(outer.start_ns[rows], kind="stable")]
        node = np.concatenate(([False], nodes[rows], [False]))
        first, last = np.flatnonzero(node[1:] & ~node[:-1]), np.flatnonzero(node[:-1] & ~node[1:]) - 1
        if len(first):
            yield thread, outer.start_ns[rows[first]], outer.end_ns[rows[last]]


def _inside(at: Array, starts: Array, ends: Array) -> Array:
    of = np.searchsorted(starts, at, "right") - 1
    inside: Array = (of >= 0) & (at <= ends[of])
    return inside
