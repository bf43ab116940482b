"""The memory of a step on a GPU, by a dry run with the GPU's allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from instrument.syncs.budget import Budget
from instrument.syncs.counting.calls import CallRecord
from instrument.syncs.counting.cuda_memory import A100, Gpu
from instrument.syncs.counting.memory import MemoryRecord
from instrument.syncs.counting.memory_use import MemoryUse, memory_use
from instrument.syncs.dryrun.largest_batch import search
from instrument.syncs.dryrun.run import dry_run_context


def largest_batch(
    step: Callable[[int], object], limit_bytes: int, *, fake: bool = False, gpu: Gpu = A100, start: int = 1
) -> int:
    """Return the largest batch with which ``step(batch)`` fits into a limit."""
    return search(lambda batch: _recorded(partial(step, batch), fake, gpu)[0], lambda _: limit_bytes, start)


def memory_of_step(
    step: Callable[[], object], *, fake: bool = False, gpu: Gpu = A100, limit_bytes: int | None = None
) -> MemoryUse:
    """Return the memory that ``step`` would use on a GPU."""
    return memory_use(*_recorded(step, fake, gpu), limit_bytes)


def _recorded(step: Callable[[], object], fake: bool, gpu: Gpu) -> tuple[MemoryRecord, CallRecord]:
    """Return what a step allocates, and its operators."""
    with dry_run_context(fake, Budget(None)) as run:
        run.state.code_ran_before = True
        run.state.allocations.gpu = gpu
        run.call(step)
    if run.error is not None:
        raise run.error
    assert run.state.calls is not None
    return run.state.allocations.record, run.state.calls.record
