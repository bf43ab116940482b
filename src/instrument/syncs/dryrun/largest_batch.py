"""Finds the largest batch with which a training step fits into the memory of a GPU, by dry runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..budget import Budget
from ..counting.cuda_memory import A100, Gpu
from ..counting.memory_use import MemoryUse, memory_use
from .run import dry_run_context


def largest_batch(
    step: Callable[[int], object], limit_bytes: int, *, fake: bool = False, gpu: Gpu = A100, start: int = 1
) -> int:
    """Return the largest batch that fits: the step runs out of memory with one more.

    Memory grows with the batch along straight lines, so two dry runs tell about where it ends, and a few more
    confirm it to one.

    Args:
        step: makes the model and trains it with a batch of that many samples; called once for each batch tried.
        limit_bytes: the memory that the GPU has for torch.
        fake: as in `dry_run`.
        gpu: the GPU.
        start: the first batch to try.

    Returns:
        The batch; 0 if not even one sample fits.

    Raises:
        ValueError: ``start`` is less than 1.
        Exception: what the step raises.
    """
    if start < 1:
        raise ValueError(f'"start" must be at least 1: {start}')
    needs: dict[int, int] = {}

    def fits(batch: int) -> bool:
        use, needed = _use(partial(step, batch), fake, gpu, limit_bytes)
        needs[batch] = needed
        return use.fits

    fitting, failing, batch = 0, None, start
    while failing is None or failing - fitting > 1:
        if fits(batch):
            fitting = batch
        else:
            failing = batch
        batch = _next(needs, fitting, failing, limit_bytes)
    return fitting


def _next(needs: dict[int, int], fitting: int, failing: int | None, limit: int) -> int:
    """Return the batch to try next: where the line through two batches reaches the limit.

    Args:
        needs: by batch tried, the memory that it needs without a limit.
        fitting: the largest one that fits; 0 if none is known.
        failing: the smallest one that does not; None if none is known.
        limit: the memory that there is.
    """
    below = sorted(batch for batch in needs if batch <= fitting)[-2:]
    if failing is None:
        if len(below) < 2 or needs[below[1]] <= needs[below[0]]:
            return 2 * fitting
        slope = (needs[below[1]] - needs[below[0]]) / (below[1] - below[0])
        return fitting + min(max(int((limit - needs[fitting]) / slope), 1), _LONGEST * fitting)
    if fitting not in needs or needs[failing] <= needs[fitting]:
        return (fitting + failing) // 2
    part = (limit - needs[fitting]) / (needs[failing] - needs[fitting])
    guess = fitting + round(part * (failing - fitting))
    tried = len(needs) > _TRIES and failing - fitting > _NEAR
    return (fitting + failing) // 2 if tried else min(max(guess, fitting + 1), failing - 1)


_LONGEST = 8  # times the largest batch that fits: the first line may be that of another part of the step
_TRIES, _NEAR = 8, 8  # after so many tries, halve what is left unless it is less than so many batches


def memory_of_step(
    step: Callable[[], object], *, fake: bool = False, gpu: Gpu = A100, limit_bytes: int | None = None
) -> MemoryUse:
    """Return the memory that ``step`` would use on a GPU, from a dry run.

    Args:
        step: as in `dry_run`.
        fake: as in `dry_run`.
        gpu: the GPU.
        limit_bytes: as ``limit`` of `memory_use`.

    Raises:
        Exception: what the step raises.
    """
    return _use(step, fake, gpu, limit_bytes)[0]


def _use(step: Callable[[], object], fake: bool, gpu: Gpu, limit_bytes: int | None) -> tuple[MemoryUse, int]:
    """Return the memory that a step uses, and what it would take from the driver without a limit."""
    with dry_run_context(fake, Budget(None)) as run:
        run.state.code_ran_before = True
        run.state.allocations.gpu = gpu
        run.call(step)
    if run.error is not None:
        raise run.error
    assert run.state.calls is not None
    record, calls = run.state.allocations.record, run.state.calls.record
    use = memory_use(record, calls, limit_bytes)
    return use, use.reserved_bytes if limit_bytes is None else memory_use(record, calls).reserved_bytes
