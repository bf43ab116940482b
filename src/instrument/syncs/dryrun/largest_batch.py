"""Finds the largest batch with which a training step fits into the memory of a GPU, by dry runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from copy import copy

import numpy as np

from ..counting.memory import MemoryRecord
from ..counting.memory_use import replayed


def search(run: Callable[[int], MemoryRecord], limit: Callable[[int], int], start: int) -> int:
    """Return the largest batch that fits; 0 if not even one sample does.

    Allocations grow with the batch along straight lines, so two runs tell where it ends, and two more confirm it.

    Args:
        run: runs a batch; returns what it allocates.
        limit: returns the memory that there is for a batch that ran, in bytes.
        start: the first batch to try.

    Raises:
        ValueError: ``start`` is less than 1.
    """
    if start < 1:
        raise ValueError(f'"start" must be at least 1: {start}')
    records: dict[int, MemoryRecord] = {}
    fitting, failing, batch = 0, None, start
    while failing is None or failing - fitting > 1:
        records[batch] = run(batch)
        if replayed(records[batch], limit(batch)) is not None:
            fitting = batch
        else:
            failing = batch
        batch = _next(records, fitting, failing, limit)
    return fitting


def _next(records: dict[int, MemoryRecord], fitting: int, failing: int | None, limit: Callable[[int], int]) -> int:
    """Return the batch to try next: the one that is expected to be the last that fits, or the one after it.

    Args:
        records: by batch tried, what it allocates.
        fitting: the largest one that fits; 0 if none is known.
        failing: the smallest one that does not; None if none is known.
        limit: as in `search`.
    """
    tried = sorted(records)
    if len(tried) < 2 or (failing is not None and len(tried) > _TRIES):
        return 2 * fitting if failing is None else (fitting + failing) // 2
    near = tried[-2:] if failing is None else tried[max(tried.index(failing) - 1, 0) :][:2]
    most = min(_LONGEST * tried[-1], failing - 1 if failing is not None else _LONGEST * tried[-1])
    return max(_last_expected(records, (near[0], near[1]), (fitting, most), limit(near[1])), fitting + 1)


def _last_expected(
    records: dict[int, MemoryRecord], near: tuple[int, int], between: tuple[int, int], limit: int
) -> int:
    """Return the largest batch that is expected to fit, as allocations grow along straight lines.

    Where the two batches allocate differently, their peaks stand for the allocations.

    Args:
        records: by batch tried, what it allocates.
        near: two batches that were tried.
        between: a batch that fits, and the largest one that may.
        limit: the memory that there is.
    """
    (least, most), (one, two) = between, near
    first, second = (np.asarray(records[each].sizes, np.int64) for each in near)
    if _until_last(records[one]) != _until_last(records[two]):
        begin, end = (_peak(records[each]) for each in near)
        expected_last = one + (limit - begin) * (two - one) // max(end - begin, 1)
        return min(max(expected_last, least), most)
    while least < most:
        middle = (least + most + 1) // 2
        sizes = first + (second - first) * (middle - one) // (two - one)
        expected = copy(records[one])
        expected.sizes = array("q", np.maximum(sizes, 0).tolist())
        if replayed(expected, limit) is not None:
            least = middle
        else:
            most = middle - 1
    return least


def _until_last(record: MemoryRecord) -> array[int]:
    """Return the events up to the last allocation; what is freed later is the garbage collector's choice."""
    end = len(record.events)
    while end and record.events[end - 1] < 0:
        end -= 1
    return record.events[:end]


def _peak(record: MemoryRecord) -> int:
    allocator = replayed(record)
    assert allocator is not None  # there was no limit
    return allocator.max_reserved


_LONGEST = 32  # times the largest batch that was tried: small ones may run other kernels
_TRIES = 8  # after so many, halve what is left
