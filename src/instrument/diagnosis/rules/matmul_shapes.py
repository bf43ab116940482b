"""Rules on the shapes of matmuls: alignment, tiles, and sides that are too short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

import numpy as np

from ...findings import Evidence, Finding, Fix
from ...traces.table import Array, Table
from ...units import counted
from ..matmul import tile_of
from ..roofline import RooflineRow
from ..rule import rule
from ..trace_facts import TraceFacts
from .matmul_kernels import generations, longest, pad

_SPLIT = re.compile(r"GSU(\d+)")
_FEWEST_SMS = 40  # of a T4: data-center GPUs have at least as many
_LONG_SIDE = 8  # times the larger side of the result: enough parts of k to fill the GPU
_ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}
_BATCH = Fix(
    "Batch several such matmuls, or enlarge the batch.",
    "outs = [x @ w for x in xs]",
    "outs = torch.bmm(torch.stack(xs), w.expand(len(xs), -1, -1))",
)
_SPLIT_K = Fix(
    "Split the long k into parts, and add up their products: a library with split-k kernels does so by itself.",
    "out = x @ w  # few rows and columns, a long k",
    "out = torch.bmm(x.unflatten(1, (16, -1)).transpose(0, 1), w.unflatten(0, (16, -1))).sum(0)",
)


@rule("misaligned-matmuls")
def misaligned_matmuls(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """The dimensions of a matmul are not multiples of 16 bytes, which matrix units load at once.

    Needs shapes. The guides of NVIDIA and AMD ask for multiples of 8 elements of 16 bits. The time to win is the
    time above the roofline or, without the peaks of the GPU, the part of the tiles that lies outside the result.
    Matmuls of `old-kernels` do not count.
    """
    facts.require_gpu()
    facts.require_shapes()
    gpu, peak = facts.gpu, facts.peak
    written_for = generations(facts)
    found, saved = [], dict[int, float]()
    for index, row in facts.roofline.of_kind("matmul").items():
        multiple = _ALIGNMENT.get(row.kind)
        m, n, k = row.work.sizes[1:]
        if multiple is None or min(m, n, k) < 2 * multiple or not any(size % multiple for size in (m, n, k)):
            continue
        rows = np.flatnonzero(facts.roofline.of_work == index)
        known = written_for[rows][written_for[rows] > 0]
        if peak and peak.generation and (known // 10 < peak.generation // 10).any():
            continue
        waste = 1 - row.share if row.share else _tile_waste(gpu, rows, m, n)
        if waste > 0:
            saved[index] = waste
            found.append((row, rows))
    win = facts.roofline_win(saved)
    if not found or facts.share(win) < share:
        return
    row, rows = found[0]
    m, n, k = row.work.sizes[1:]
    gpu_ns = sum(each.gpu_ns for each, _ in found)
    yield facts.finding(
        f"Matmuls of {m} x {n} x {k} are not aligned to {_ALIGNMENT[row.kind]} elements"
        + (f", and {counted(len(found) - 1, 'other shape')}" if len(found) > 1 else ""),
        win_ns=win,
        operator=row.name,
        kernel=longest(facts, rows),
        confidence="medium",
        evidence=(
            facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these matmuls per step."),
            Evidence("share_of_peak", row.share, "1", "Share of the roofline that the longest reaches."),
        ),
        fix=pad(_ALIGNMENT[row.kind], 128 // _ALIGNMENT[row.kind]),
        coverage=facts.roofline.coverage,
        at=facts.place_of_operator(int(row.rows[0])),
    )


def _tile_waste(gpu: Table, rows: Array, m: int, n: int) -> float:
    """Return the part of the tiles that lies outside an m x n result; 0 if the kernel's name has no tile."""
    if (tile := _tile(gpu, rows)) is None:
        return 0.0
    one, two = tile
    padded = min(ceil(m / a) * a * ceil(n / b) * b for a, b in ((one, two), (two, one)))
    return 1 - m * n / padded


def _tile(gpu: Table, rows: Array) -> tuple[int, int] | None:
    """Return the tile in the name of the longest of these kernels."""
    if not len(rows):
        return None
    longest = rows[np.argmax(gpu.duration_ns[rows])]
    return tile_of(gpu.strings[gpu.short_name[longest]])


@rule("few-tiles")
def few_tiles(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """A matmul has fewer tiles than the GPU has multiprocessors, so that some multiprocessors are unused.

    Needs shapes and the grid of the kernel, or the tile in its name. The time to win is its time times the share
    of multiprocessors without a tile. If the trace does not give their number, 40 are assumed, the number of a
    T4.
    """
    facts.require_gpu()
    facts.require_shapes()
    gpu = facts.gpu
    sms = {device.sms for device in facts.trace.devices}
    size = sms.pop() if len(sms) == 1 else 0
    most, saved, found = size or _FEWEST_SMS, dict[int, float](), []
    for index, row in facts.roofline.of_kind("matmul").items():
        rows = np.flatnonzero(facts.roofline.of_work == index)
        tiles = _tiles(gpu, rows, row)
        if tiles is None or tiles >= most:
            continue
        saved[index] = 1 - tiles / most
        found.append((row, rows, tiles))
    win = facts.roofline_win(saved)
    if not found or facts.share(win) < share:
        return
    row, rows, tiles = max(found, key=lambda each: each[0].gpu_ns * (1 - each[2] / most))
    m, n, k = row.work.sizes[1:]
    yield facts.finding(
        f"A matmul of {m} x {n} x {k} has {counted(tiles, 'tile')} for {most} multiprocessors"
        + ("" if size else " or more")
        + (f", and {counted(len(found) - 1, 'other shape')} as well" if len(found) > 1 else ""),
        win_ns=win,
        operator=row.name,
        kernel=longest(facts, rows),
        evidence=(
            Evidence(
                "tiles", tiles, "events", "Tiles: thread blocks of the kernel, or result / tile in its name."
            ),
            Evidence("multiprocessors", size or None, "events", "Multiprocessors of the GPU."),
            facts.gpu_time("gpu_ns", row.gpu_ns, "GPU time of this matmul per step."),
            facts.gpu_time(
                "all_ns", sum(each.gpu_ns for each, *_ in found), "GPU time of all such matmuls per step."
            ),
            Evidence(
                "long_side", k / max(m, n), "1", "k / the larger of m and n; if above 1, splitting k can help."
            ),
        ),
        fix=_SPLIT_K if k > max(m, n) * _LONG_SIDE else _BATCH,
        coverage=facts.roofline.coverage,
        at=facts.place_of_operator(int(row.rows[0])),
    )


def _tiles(gpu: Table, rows: Array, row: RooflineRow) -> int | None:
    """Return the thread blocks of the longest kernel of a matmul; None if neither grid nor tile is known."""
    longest = rows[np.argmax(gpu.duration_ns[rows])]
    if gpu.blocks[longest] > 0:
        return int(gpu.blocks[longest])
    if (tile := _tile(gpu, rows)) is None:
        return None
    batch, m, n, _ = row.work.sizes
    split = _SPLIT.search(gpu.strings[gpu.name[longest]])
    tiles = max(ceil(m / a) * ceil(n / b) for a, b in (tile, tile[::-1]))
    return batch * tiles * (int(split[1]) if split else 1)


@rule("thin-matmuls")
def thin_matmuls(facts: TraceFacts, *, thin: int = 16, share: float = 0.03) -> Iterator[Finding]:
    """One side of a matmul is so short that reading the other factor takes almost all of the time.

    Needs shapes. A matmul with a side of 16 or less does about 16 operations, or fewer, for each byte that it
    reads in 16 bits: far below the ridge point of any GPU. Decoding one token at a time does this. The time to win
    is half of the time of such matmuls, as if pairs of them were batched.
    """
    facts.require_gpu()
    facts.require_shapes()
    matmuls = facts.roofline.of_kind("matmul").items()
    found = {index: row for index, row in matmuls if min(row.work.sizes[1:3]) <= thin}
    win = facts.roofline_win(dict.fromkeys(found, 0.5))
    if not found or facts.share(win) < share:
        return
    row = next(iter(found.values()))
    m, n, k = row.work.sizes[1:]
    yield facts.finding(
        f"Matmuls with a side of {min(m, n)} mostly read their weights: {m} x {n} x {k}"
        + (f", and {counted(len(found) - 1, 'other shape')}" if len(found) > 1 else ""),
        win_ns=win,
        operator=row.name,
        confidence="low",
        evidence=(
            facts.gpu_time(
                "gpu_ns", sum(each.gpu_ns for each in found.values()), "GPU time of these matmuls per step."
            ),
            Evidence("share_of_peak", row.share, "1", "Share of the roofline that the longest reaches."),
        ),
        fix=Fix("Batch several inputs, or quantize the weights to read fewer bytes."),
        coverage=facts.roofline.coverage,
        at=facts.place_of_operator(int(row.rows[0])),
    )
