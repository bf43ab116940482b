"""What an operation would take if a GPU did nothing but it at its peaks: the yardstick of the efficiency.

A matmul is cut into tiles, each computed by a block of threads; the multiprocessors take one wave of blocks after
the other, and the last wave may leave some of them idle (NVIDIA, Matrix Multiplication Background User's Guide).
"""

from __future__ import annotations

from math import ceil

from .gpus import Gpu
from .operations import MATMULS, Operation

KERNEL_NS = 1500.0
"""The least time that a kernel takes on the GPU, whatever it does."""

_TILES = (128, 128)
_QUERIES = _KEYS = (
    128  # in a block of flash attention, and in each round of it; one more round fills and empties it
)
_PROLOGUE = 16  # steps of the loop over the sums that pass before the first products, and after the last
_SPLITS = (1, 2, 3, 4, 5, 6, 8)
_LEAST_SUM = 256  # which cuBLAS still splits

Tile = tuple[int, int]
TileCosts = dict[Tile, tuple[float, float]]
"""By tile: the ns of a wave of blocks for each step of the sums, and for a whole block."""


def blocks(rows: int, columns: int, tile: Tile) -> int:
    """Return how many tiles cover a result, the tile lying along or across."""
    one, other = tile
    return min(ceil(rows / one) * ceil(columns / other), ceil(rows / other) * ceil(columns / one))


def ideal_ns(operation: Operation, gpu: Gpu, tile: Tile | None = None) -> float:
    """Return the time at the peaks of a GPU, of a matmul with all waves of its tiles."""
    seconds = operation.bytes / gpu.peak.memory_bytes_per_s
    if operation.family.startswith("attention"):
        heads, queries, keys, _ = operation.sizes
        waves = ceil(heads * ceil(queries / _QUERIES) / gpu.multiprocessors)
        rounds = (
            waves * (ceil(keys / _KEYS) + 1) * _QUERIES * _KEYS * gpu.multiprocessors / (heads * queries * keys)
        )
        return KERNEL_NS + 1e9 * max(seconds, operation.flops * rounds / flops_per_s(operation, gpu))
    if operation.family not in MATMULS:
        return KERNEL_NS + seconds * 1e9
    batch, rows, columns, sums = operation.sizes
    one, other = tile or _TILES
    waves = ceil(batch * blocks(rows, columns, (one, other)) / gpu.multiprocessors)
    flops = waves * gpu.multiprocessors * 2 * one * other * (sums + _PROLOGUE)
    computed = flops / flops_per_s(operation, gpu)
    return KERNEL_NS + 1e9 * float((computed**2 + seconds**2) ** 0.5)


def flops_per_s(operation: Operation, gpu: Gpu) -> float:
    """Return the peak for the type of an operation.

    It is that of FP32 for a type for which the GPU has no units, such as BF16 on a V100, which computes in FP32.
    """
    peaks = gpu.peak.flops_per_s
    return peaks.get(operation.type) or peaks["fp32"]


def bound_ns(operation: Operation, gpu: Gpu) -> float:
    """Return the roofline: the least time that the data sheet allows."""
    computed = operation.flops / flops_per_s(operation, gpu)
    return max(KERNEL_NS, 1e9 * max(computed, operation.bytes / gpu.peak.memory_bytes_per_s))


def best_tile_ns(operation: Operation, gpu: Gpu, tiles: TileCosts) -> float:
    """Return the time of a matmul with the best of the measured tiles; blocks share the sums where that wins."""
    batch, rows, columns, sums = operation.sizes
    moved = operation.bytes / gpu.peak.memory_bytes_per_s * 1e9
    result = rows * columns * batch * 4 / gpu.peak.memory_bytes_per_s * 1e9
    best = float("inf")
    for tile, (step, whole) in tiles.items():
        count = batch * blocks(rows, columns, tile)
        for parts in _SPLITS:
            if parts > 1 and sums / parts < _LEAST_SUM:
                break
            computed = ceil(count * parts / gpu.multiprocessors) * (step * sums / parts + whole)
            added = (parts + 1) * result / 2 + KERNEL_NS if parts > 1 else 0.0  # half of it stays in the cache
            best = min(best, (((computed + added) ** 2) + moved**2) ** 0.5)
    return best
