"""Rules on memory of the GPU, from the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...findings import Evidence, Finding, Fix
from ...traces.table import Table
from ..memory_use import megabytes
from ..rule import rule
from ..trace_facts import MissingEvidenceError, TraceFacts

_MEGABYTES, _GIGABYTES = 1e6, 1e9


def _on_gpu(facts: TraceFacts) -> Table:
    """Return the allocations and frees on GPUs; abstain if none are recorded."""
    rows = facts.memory_events.where(facts.memory_events.allocated_bytes >= 0)
    if not rows:
        raise MissingEvidenceError("the trace has no memory events: record with profile_memory=True")
    return rows


def _listed(name: str, parts: Mapping[str, int] | None, definition: str) -> Iterator[Evidence]:
    """Yield the categories of memory, the largest first, as evidence in words."""
    if parts and (text := megabytes(parts)):
        yield Evidence(name, text, "", definition)


@rule("memory-growth")
def memory_growth(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """Memory grows from step to step.

    Needs memory events and three steps. The allocated bytes grow from the end of each step to the end of the
    next, in all by at least ``share``: the program keeps tensors, such as a list of losses with their graphs.
    """
    rows = _on_gpu(facts)
    ends = facts.trace.steps.end_ns
    if len(ends) < 3:
        raise MissingEvidenceError("fewer than three steps are recorded")
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
        win_ns=None,
        severity="medium",
        evidence=(
            Evidence("bytes_per_step", round(per_step), "bytes", "Growth of the allocated bytes per step."),
            Evidence("allocated", int(allocated[-1]), "bytes", "Allocated bytes at the end of the last step."),
            *_listed("growing", use.growth_bytes if use else None, "Growth per step by category."),
        ),
        fix=Fix(
            "Detach the tensors that the program keeps from their graphs.",
            "losses.append(loss)",
            "losses.append(loss.detach())",
        ),
    )


@rule("fragmented-memory")
def fragmented_memory(facts: TraceFacts, *, share: float = 0.3, gigabytes: float = 1) -> Iterator[Finding]:
    """The allocator has reserved much more memory than is in use at the peak.

    Needs memory events with totals. Memory that is reserved but not allocated is fragmented, or was in use
    before. 30 % and 1 GB are this library's choice.
    """
    rows = _on_gpu(facts)
    known = rows.where(rows.reserved_bytes >= 0)
    if not known:
        raise MissingEvidenceError("the memory events have no totals")
    peak = int(np.argmax(known.allocated_bytes))
    reserved, allocated = int(known.reserved_bytes[peak]), int(known.allocated_bytes[peak])
    free = reserved - allocated
    if free < share * reserved or free < gigabytes * _GIGABYTES:
        return
    yield facts.finding(
        f"At the peak, {free / _GIGABYTES:.1f} of {reserved / _GIGABYTES:.1f} GB of reserved memory are unused",
        win_ns=None,
        severity="low",
        confidence="medium",
        evidence=(
            Evidence("reserved", reserved, "bytes", "Reserved by the allocator at the peak of allocated bytes."),
            Evidence("allocated", allocated, "bytes", "Allocated at that time."),
        ),
        fix=Fix(
            "Use expandable segments, which grow instead of reserving new ones.",
            "",
            'PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"',
        ),
    )


@rule("memory-nearly-full")
def memory_nearly_full(facts: TraceFacts, *, share: float = 0.9) -> Iterator[Finding]:
    """Memory is nearly full at its peak.

    Needs memory events and the size of the GPU's memory. 90 % is the threshold of torch_tb_profiler.
    """
    rows = _on_gpu(facts)
    sizes = {device.memory_bytes for device in facts.trace.devices if device.memory_bytes}
    if len(sizes) != 1:
        raise MissingEvidenceError("the size of the GPU's memory is not known")
    size = sizes.pop()
    peak = int(np.maximum(rows.allocated_bytes, rows.reserved_bytes).max())
    if peak < share * size:
        return
    use = facts.memory_use
    yield facts.finding(
        f"Memory is nearly full: {peak / _GIGABYTES:.1f} of {size / _GIGABYTES:.1f} GB",
        win_ns=None,
        severity="medium",
        evidence=(
            Evidence("peak", peak, "bytes", "Highest value of allocated or reserved bytes."),
            Evidence("memory", size, "bytes", "Memory of the GPU."),
            *_listed("used", use.by_category if use else None, "Allocated memory at the peak by category."),
        ),
        fix=Fix(
            "Recompute activations in the backward pass, or split the batch.",
            "out = block(x)",
            "out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        ),
    )
