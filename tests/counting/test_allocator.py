"""The allocator without memory against torch's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from instrument.syncs.counting.allocator import Block, CachingAllocator, NoMemoryLeftError
from tests import simgpu
from tests.simgpu.programs import output

KIB, MIB = 1 << 10, 1 << 20
CONTEXT = 500 * MIB  # which the simulated driver takes itself

# Prints, after each of some allocations and frees, what torch's allocator has.
PROGRAM = """
import json, sys, torch
from tests.counting.test_allocator import requests

held, rows = {}, []
for key, size in requests(int(sys.argv[1])):
    failed = False
    if size:
        try:
            held[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            failed = True
    else:
        held.pop(key, None)
    rows.append([
        failed, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(),
        torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved(),
    ])
print(json.dumps(rows))
"""


def requests(seed: int) -> Iterator[tuple[int, int]]:
    """Yield allocations (a key and a size) and frees (a key and 0)."""
    chosen, keys = random.Random(seed), []
    sizes: list[Callable[[], int]] = [
        lambda: chosen.randint(1, 4 * KIB), lambda: chosen.randint(1, MIB), lambda: chosen.randint(MIB, 10 * MIB),
        lambda: chosen.randint(10 * MIB - KIB, 70 * MIB), lambda: 512 * chosen.randint(2040, 2056),
        lambda: chosen.choice((MIB, 10 * MIB, 20 * MIB, 19 * MIB, 2 * MIB)),
    ]  # fmt: skip
    for key in range(400):
        if keys and chosen.random() < 0.48:
            yield keys.pop(chosen.randrange(len(keys))), 0
        else:
            keys.append(key)
            yield key, chosen.choice(sizes)()


def rows_of(seed: int, limit: int | None) -> list[Any]:
    """Return what `PROGRAM` prints, without torch."""
    allocator, held, rows = CachingAllocator(limit), dict[int, Block](), []
    for key, size in requests(seed):
        failed = False
        try:
            if size:
                held[key] = allocator.allocate(size)
            elif key in held:
                allocator.free(held.pop(key))
        except NoMemoryLeftError:
            failed = True
        rows.append(
            [failed, allocator.allocated, allocator.max_allocated, allocator.reserved, allocator.max_reserved]
        )
    return rows


# By seed and limit: how often memory ran out, and the last numbers of torch's allocator.
RECORDED: dict[tuple[int, int | None], list[int]] = {
    (0, None): [0, 246017536, 476036096, 612368384, 612368384],
    (3, None): [0, 287342080, 611289088, 710934528, 710934528],
    (1, 200 * MIB): [32, 185646592, 206121984, 207618048, 209715200],
    (4, 250 * MIB): [36, 136169984, 254999552, 195035136, 262144000],
}


@pytest.mark.gpu_sim
@pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim")
@pytest.mark.parametrize(("seed", "limit"), [(0, None), (1, 200 * MIB), (2, 301 * MIB)])
def test_the_numbers_are_those_of_torch(seed: int, limit: int | None) -> None:
    """After each allocation and free, also where memory runs out."""
    settings = {} if limit is None else {"memory": limit + CONTEXT}
    recorded = json.loads(output(PROGRAM, str(seed), **settings))
    assert rows_of(seed, limit) == recorded


@pytest.mark.parametrize(("seed", "limit"), RECORDED)
def test_the_numbers_are_those_of_torch_as_recorded(seed: int, limit: int | None) -> None:
    """The same at the end, without torch's allocator at hand."""
    rows = rows_of(seed, limit)
    assert [sum(row[0] for row in rows), *rows[-1][1:]] == RECORDED[seed, limit]


def test_what_is_cached_goes_back() -> None:
    """Only segments that are free as a whole."""
    allocator = CachingAllocator()
    kept, gone = allocator.allocate(5 * MIB), allocator.allocate(30 * MIB)
    allocator.free(gone)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved, allocator.max_reserved) == (5 * MIB, 20 * MIB, 50 * MIB)
    allocator.free(kept)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
