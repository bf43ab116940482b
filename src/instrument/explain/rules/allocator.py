"""Rules on torch's allocator, from a memory snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.findings import Evidence, Finding, Fix, Site
from ...base.units import counted, percentage, size
from ...read.memory.breakdown import Breakdown, Place
from ...read.memory.passes import FORWARD_PASS, OPTIMIZER_STEP
from ...read.memory.shortage import RETURN_REASONS, FailedAllocation
from ...read.memory.snapshot import MemorySnapshot
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, require

_EXPANDABLE = 'PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"'
_LISTED = 3  # places
CHECKPOINT = "out = block(x)", "out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
"""Code that keeps activations, and code that computes them again."""

_FIXES = {
    "full": Fix(
        "Use less memory: recompute activations in the backward pass, split the batch, or shard the optimizer. "
        "instrument memory shows what the peak is.",
        *CHECKPOINT,
    ),
    "fragmented": Fix(
        "Use expandable segments, which grow instead of leaving free pieces between blocks.", "", _EXPANDABLE
    ),
    "other pool": Fix(
        "Memory that one stream or CUDA graph freed is not given to another: allocate on the stream that uses the "
        "memory, and let graphs share a pool.",
        "torch.cuda.graph(graph)",
        "torch.cuda.graph(graph, pool=other.pool())",
    ),
    "unknown": Fix("Use less memory: instrument memory shows what the peak is."),
    "limited": Fix("Raise the limit of the process.", "", "torch.cuda.set_per_process_memory_fraction(1.0)"),
}


_KEEP_CACHE = Fix(
    "Remove the call from the loop: the allocator uses what is free again.", "torch.cuda.empty_cache()"
)
_FEWER_SIZES = Fix("Use fewer different sizes: pad batches to a few lengths.")


def site_of(place: Place | None) -> Site | None:
    """Return a place as the site of a finding."""
    return None if place is None else Site(*place)


def expandable_fix(snapshot: MemorySnapshot | None) -> Fix:
    """Return the fix for fragmentation: expandable segments or, where the snapshot has them, fewer sizes."""
    on = snapshot is not None and (
        snapshot.settings.get("expandable_segments") or snapshot.segments.expandable.any()
    )
    return _FEWER_SIZES if on else _FIXES["fragmented"]


def _history(facts: TraceFacts) -> MemorySnapshot:
    """Return the snapshot; abstain if there is none, or if it has no events."""
    if facts.snapshot is None:
        raise MissingEvidenceError('no memory snapshot was recorded: memory="snapshot" records one')
    require(facts.snapshot.events, "the memory snapshot has no events: it has no history")
    return facts.snapshot


def _peak(facts: TraceFacts) -> tuple[MemorySnapshot, Breakdown, int]:
    """Return the snapshot, the peak of the GPU with the highest one, and the pass in which it is."""
    snapshot = _history(facts)
    device = snapshot.fullest_device
    assert device is not None  # there are events
    breakdown = snapshot.break_down(device)
    require(breakdown.peak.event >= 0, "the peak in the memory snapshot is before all events of its history")
    return snapshot, breakdown, int(snapshot.passes.kind[breakdown.peak.event])


def _bytes(breakdown: Breakdown, category: str) -> int:
    return sum(breakdown.by_category()[category])


def _in_use(breakdown: Breakdown) -> Evidence:
    return Evidence("peak", breakdown.peak.bytes, "bytes", "Memory in use at the peak.")


@rule("failed-allocation")
def failed_allocation(facts: TraceFacts) -> Iterator[Finding]:
    """An allocation failed: the GPU was out of memory.

    Needs a memory snapshot in whose history it failed. Whether memory was lacking, or only a piece that is large
    enough, follows from the segments and blocks of that time, on each GPU.
    """
    snapshot = _history(facts)
    for device in snapshot.devices:
        last = {(each.place, each.reason): each for each in snapshot.failures(device)}
        for each in last.values():
            yield facts.finding(
                each.text + _gpu(snapshot, device),
                *_about(each),
                severity="high",
                fix=expandable_fix(snapshot) if each.reason == "fragmented" else _FIXES[each.reason],
                site=site_of(each.place),
            )


def _gpu(snapshot: MemorySnapshot, device: int) -> str:
    return f" (GPU {device})" if len(snapshot.devices) > 1 else ""


def _about(failed: FailedAllocation) -> Iterator[Evidence]:
    left = None if failed.device_free_bytes < 0 else failed.device_free_bytes
    yield Evidence("asked", failed.bytes, "bytes", "Size of the allocation that failed.")
    yield Evidence("used", failed.used_bytes, "bytes", "Memory in use then.")
    yield Evidence("reserved", failed.reserved_bytes, "bytes", "Memory that the allocator had from the driver.")
    yield Evidence(
        "largest_piece", failed.largest_hole_bytes, "bytes", "Largest free piece of this for the stream."
    )
    yield Evidence("left", left, "bytes", "Memory that the driver had left.")


@rule("returned-memory")
def returned_memory(facts: TraceFacts, *, times: float = 2) -> Iterator[Finding]:
    """The allocator gives memory back to the driver again and again.

    Needs a memory snapshot with a history. The CPU waits for the driver each time. Either the program calls
    ``empty_cache()``, or an allocation finds no memory left: the allocator then gives back what is free before it
    tries again. The first recorded step does not count.
    """
    snapshot = _history(facts)
    for device in snapshot.devices:
        for each in snapshot.driver_traffic(device).returns:
            if each.times_later < times:
                continue
            often = counted(each.times_later, "time") + _gpu(snapshot, device)
            yield facts.finding(
                f"Memory goes back to the driver {often}: {RETURN_REASONS[each.reason]}",
                Evidence("times", each.times_later, "events", "How often, after the first recorded step."),
                Evidence("bytes", each.bytes, "bytes", "How much went back in all recorded events."),
                severity="medium",
                fix=_KEEP_CACHE if each.reason == "empty_cache" else expandable_fix(snapshot),
                site=site_of(each.place),
            )


@rule("activation-memory")
def activation_memory(facts: TraceFacts, *, share: float = 0.4) -> Iterator[Finding]:
    """Activations are much of the memory at the peak.

    Needs a memory snapshot with a history. What is kept for the backward pass can be computed again there, which
    costs up to a third more time. 40 % is this library's choice.
    """
    _, breakdown, _ = _peak(facts)
    kept = _bytes(breakdown, "activations")
    if kept < share * breakdown.peak.bytes:
        return
    by_line = [
        (place, number)
        for (place, category), (number, _) in breakdown.by_line().items()
        if category == "activations"
    ]
    listed = ", ".join(f"{place} {size(number)}" for place, number in by_line[:_LISTED])
    yield facts.finding(
        f"Activations are {percentage(kept / breakdown.peak.bytes)} of the memory at the peak",
        Evidence("activations", kept, "bytes", "Activations at the peak: the most that recomputing saves."),
        _in_use(breakdown),
        Evidence("lines", listed or None, "", "The lines that allocate most of them."),
        severity="low",
        confidence="medium",
        coverage=1 - breakdown.unknown_bytes / breakdown.peak.bytes,
        win_bytes=kept,
        fix=Fix("Recompute activations in the backward pass.", *CHECKPOINT),
        site=site_of(by_line[0][0]) if by_line else None,
    )


@rule("optimizer-temporaries")
def optimizer_temporaries(facts: TraceFacts, *, share: float = 0.1) -> Iterator[Finding]:
    """The peak is in the step of the optimizer, and temporaries are much of it.

    Needs a memory snapshot with a history. Optimizers that compute for all parameters at once (``foreach``) hold
    temporaries as large as the parameters; fused ones need none. 10 % is this library's choice.
    """
    _, breakdown, pass_ = _peak(facts)
    temporary = _bytes(breakdown, "temporaries")
    if pass_ != OPTIMIZER_STEP or temporary < share * breakdown.peak.bytes:
        return
    lines = [place for (place, category), _ in breakdown.by_line().items() if category == "temporaries"]
    yield facts.finding(
        f"The step of the optimizer holds {size(temporary)} of temporaries at the peak",
        Evidence("temporaries", temporary, "bytes", "Temporaries at the peak."),
        _in_use(breakdown),
        severity="medium",
        win_bytes=temporary,
        fix=Fix(
            "Use a fused optimizer, or one that updates a parameter at a time (foreach=False).",
            "torch.optim.AdamW(model.parameters())",
            "torch.optim.AdamW(model.parameters(), fused=True)",
        ),
        site=site_of(lines[0]) if lines else None,
    )


@rule("kept-gradients")
def kept_gradients(facts: TraceFacts, *, share: float = 0.1) -> Iterator[Finding]:
    """Gradients of the step before are in use at the peak, which is in the forward pass.

    Needs a memory snapshot with a history. Gradients that are set to None before the forward pass need no memory
    in it; those that are accumulated over micro-steps are meant to stay. 10 % is this library's choice.
    """
    _, breakdown, pass_ = _peak(facts)
    kept = _bytes(breakdown, "gradients")
    if pass_ != FORWARD_PASS or kept < share * breakdown.peak.bytes:
        return
    yield facts.finding(
        f"Gradients of the step before, {size(kept)}, are in use at the peak of the forward pass",
        Evidence("gradients", kept, "bytes", "Gradients at the peak."),
        _in_use(breakdown),
        severity="medium",
        confidence="medium",
        win_bytes=kept,
        fix=Fix(
            "Set gradients to None right after the step, unless they accumulate over several backward passes.",
            "loss.backward()\noptimizer.step()",
            "loss.backward()\noptimizer.step()\noptimizer.zero_grad(set_to_none=True)",
        ),
    )
