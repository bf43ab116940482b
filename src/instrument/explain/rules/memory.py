"""Rules on memory of the GPU, from a memory snapshot or the events of torch's allocator in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted, size
from ...read.memory.breakdown import Place
from ...read.memory.shortage import LEAST_STEPS
from ...read.memory.snapshot import MemorySnapshot
from ...read.tables.table import Table
from ..metrics.memory_use import megabytes
from .allocator import CHECKPOINT, expandable_fix, site_of
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, require

_MEGABYTES, _GIGABYTES = 1e6, 1e9
_DETACH = Fix(
    "Detach the tensors that the program keeps from their graphs.",
    "losses.append(loss)",
    "losses.append(loss.detach())",
)


def _on_gpu(facts: TraceFacts) -> Table:
    """Return the allocations and frees on GPUs; abstain if none are recorded."""
    rows = facts.memory_events.where(facts.memory_events.allocated_bytes >= 0)
    require(
        rows,
        "there are neither memory events nor a memory snapshot: record with "
        f"{facts.to_record(profile_memory=True)} or {facts.to_record(memory='snapshot')}",
    )
    return rows


def _snapshot(facts: TraceFacts) -> tuple[MemorySnapshot, int] | None:
    """Return the memory snapshot and the GPU with the highest peak in it; None if there is none."""
    snapshot = facts.snapshot
    device = None if snapshot is None else snapshot.fullest_device
    return None if snapshot is None or device is None else (snapshot, device)


def _listed(name: str, parts: Mapping[str, int] | None, definition: str) -> Iterator[Evidence]:
    """Yield the categories of memory, the largest first, as evidence in words."""
    if parts and (text := megabytes(parts)):
        yield Evidence(name, text, "", definition)


@rule("memory-growth")
def memory_growth(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """Memory grows from step to step.

    Needs a memory snapshot with two complete steps, or memory events of three steps. In a snapshot, memory that a
    line allocated in half of the complete steps, and in two or more, is in use at the end, and the line had less
    in use half-way. In a trace, the allocated bytes grow from the end of each step to the end of the next. In all,
    they grow by at least ``share``: the program keeps tensors, such as a list of losses with their graphs.
    """
    recorded = _snapshot(facts)
    if recorded is not None and (
        recorded[0].complete_steps(recorded[1]) >= LEAST_STEPS or not facts.memory_events
    ):
        yield from _growing_lines(facts, *recorded, share)
        return
    rows = _on_gpu(facts)
    ends = facts.trace.steps.end_ns
    require(len(ends) >= 3, "fewer than three steps are recorded")
    last = np.searchsorted(rows.start_ns, ends, "right") - 1
    if (last < 0).any():
        raise MissingEvidenceError("a step has no memory events")
    allocated = rows.allocated_bytes[last]
    grown = int(allocated[-1] - allocated[0])
    if (np.diff(allocated) <= 0).any() or grown < share * max(int(allocated[0]), 1):
        return
    per_step, use = grown / (len(ends) - 1), facts.memory_use
    yield facts.finding(
        f"Memory grows by {per_step / _MEGABYTES:.1f} MB per step",
        Evidence("bytes_per_step", round(per_step), "bytes", "Growth of the allocated bytes per step."),
        Evidence("allocated", int(allocated[-1]), "bytes", "Allocated bytes at the end of the last step."),
        *_listed("growing", use.growth_bytes if use else None, "Growth per step by category."),
        severity="medium",
        fix=_DETACH,
    )


def _growing_lines(facts: TraceFacts, snapshot: MemorySnapshot, device: int, share: float) -> Iterator[Finding]:
    require(
        snapshot.complete_steps(device) >= LEAST_STEPS,
        "fewer than two complete steps are in the history of the memory snapshot",
    )
    breakdown = snapshot.break_down(device)
    at_peak = Counter[Place]()
    for (place, _), (number, _) in breakdown.by_line().items():
        at_peak[place] += number
    for place, growth in snapshot.growth(device):
        if growth.bytes < share * breakdown.peak.bytes:
            continue
        per_step = growth.bytes / growth.steps
        yield facts.finding(
            f"Memory grows by {size(per_step)} per step: {counted(growth.steps, 'step')} left behind what {place} "
            "allocated",
            Evidence("bytes_per_step", round(per_step), "bytes", "What each of these steps left behind."),
            Evidence("kept", growth.bytes, "bytes", "Memory of this line in use at the end."),
            Evidence("blocks", growth.blocks, "events", "Its blocks."),
            severity="medium",
            fix=Fix(
                "Release what the program keeps from step to step: lists, caches and objects that hold tensors."
            ),
            win_bytes=min(growth.bytes, at_peak[place]),
            site=site_of(place),
        )


@rule("fragmented-memory")
def fragmented_memory(facts: TraceFacts, *, share: float = 0.3, gigabytes: float = 1) -> Iterator[Finding]:
    """The allocator has reserved much more memory than is in use at the peak.

    Needs a memory snapshot, or memory events with totals. Memory that is reserved but not allocated is fragmented,
    or was in use before. 30 % and 1 GB are this library's choice.
    """
    reserved, allocated = _at_peak(facts)
    free = reserved - allocated
    if free < share * reserved or free < gigabytes * _GIGABYTES:
        return
    yield facts.finding(
        f"At the peak, {free / _GIGABYTES:.1f} of {reserved / _GIGABYTES:.1f} GB of reserved memory are unused",
        Evidence("reserved", reserved, "bytes", "Reserved by the allocator at the peak of allocated bytes."),
        Evidence("allocated", allocated, "bytes", "Allocated at that time."),
        severity="low",
        confidence="medium",
        win_bytes=free,
        fix=expandable_fix(facts.snapshot),
    )


def _at_peak(facts: TraceFacts) -> tuple[int, int]:
    """Return the reserved and the allocated bytes at the peak of the latter."""
    if (recorded := _snapshot(facts)) is not None:
        snapshot, device = recorded
        breakdown = snapshot.break_down(device)
        require(breakdown.recorded, "the memory snapshot has no history, and so no peak")
        return breakdown.reserved_bytes, breakdown.peak.bytes
    rows = _on_gpu(facts)
    rows = rows.where(rows.reserved_bytes >= 0)
    require(rows, "the memory events have no totals")
    peak = int(np.argmax(rows.allocated_bytes))
    return int(rows.reserved_bytes[peak]), int(rows.allocated_bytes[peak])


@rule("memory-nearly-full")
def memory_nearly_full(facts: TraceFacts, *, share: float = 0.9) -> Iterator[Finding]:
    """Memory is nearly full at its peak.

    Needs a memory snapshot or memory events, and the size of the GPU's memory: of the GPU in the trace, or what
    the snapshot says that the program had. 90 % is the threshold of torch_tb_profiler.
    """
    peak, parts = _most(facts)
    whole = _whole(facts)
    if peak < share * whole:
        return
    yield facts.finding(
        f"Memory is nearly full: {peak / _GIGABYTES:.1f} of {whole / _GIGABYTES:.1f} GB",
        Evidence("peak", peak, "bytes", "Highest value of allocated or reserved bytes."),
        Evidence("memory", whole, "bytes", "Memory that the GPU has, or had for the program."),
        *_listed("used", parts, "Allocated memory at the peak by category."),
        severity="medium",
        fix=Fix("Recompute activations in the backward pass, or split the batch.", *CHECKPOINT),
    )


def _most(facts: TraceFacts) -> tuple[int, Mapping[str, int] | None]:
    """Return the highest value of allocated or reserved bytes, and the allocated bytes by category."""
    if (recorded := _snapshot(facts)) is not None:
        snapshot, device = recorded
        timeline = snapshot.timeline(device)
        breakdown = snapshot.break_down(device)
        parts = {name: sum(both) for name, both in breakdown.by_category().items()} if breakdown.recorded else None
        return int(max(timeline.reserved_bytes.max(), timeline.used_bytes.max())), parts
    rows, use = _on_gpu(facts), facts.memory_use
    return int(np.maximum(rows.allocated_bytes, rows.reserved_bytes).max()), use.by_category if use else None


def _whole(facts: TraceFacts) -> int:
    """Return the size of the memory of the GPU, or abstain."""
    sizes = {device.memory_bytes for device in facts.trace.devices if device.memory_bytes}
    if len(sizes) == 1:
        return sizes.pop()
    recorded = _snapshot(facts)
    limit = recorded[0].known_limit(recorded[1]) if recorded else None
    if limit is None:
        raise MissingEvidenceError("the size of the GPU's memory is not known")
    return limit
