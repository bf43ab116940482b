"""Rules on matmuls: the types and generations of their kernels, alignment, tiles, and sides that are too short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted, duration
from ...read.tables.table import KERNEL, Array, Table
from ..metrics.matmul_table import on_matrix_units, tile_of
from ..metrics.roofline import RooflineRow
from ..metrics.tables import one_of
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts

_SINGLE = re.compile(r"\btf32\b|\bf32\b|sgemm|scudnn|<f32>|<float\b")
_TF32 = re.compile(r"\btf32\b")
_HALF = re.compile(r"\b(?:b?f16|half)\b")
_HELPER = re.compile(r"split_?k|reduce|post_?gsu|offsets|transform|winograd", re.IGNORECASE)
_GENERATION = re.compile(r"\bsm_?(\d{2,3})(?!\d)|cutlass_(\d{2})_|(maxwell|volta|turing|ampere|hopper)_")
_GENERATIONS = {"maxwell": 50, "volta": 70, "turing": 75, "ampere": 80, "hopper": 90}
_REDUCTION = re.compile(r"split_?k_?reduce|post_?gsu", re.IGNORECASE)  # adds up parts in 32 bits, for any type
_MATMUL_FAMILIES = ("gemm", "convolution")


def pad(multiple: int, bits: int) -> Fix:
    """Return the fix for dimensions that are not multiples of so many elements of so many bits."""
    return Fix(
        f"Pad the dimensions to multiples of {multiple} elements ({multiple * bits // 8} bytes) once, when the "
        "tensor is created.",
        "tokens = 5185  # odd: the alignment differs from row to row",
        f"tokens = {-(-5185 // multiple) * multiple}  # pad, and mask what was added",
    )


def _matmul_kernels(facts: TraceFacts) -> Array:
    """Return the rows of `TraceFacts.gpu` that are matmuls or convolutions."""
    return np.flatnonzero((facts.gpu.category == KERNEL) & one_of(facts.gpu, "family", _MATMUL_FAMILIES))


def _named(gpu: Table, rows: Array, pattern: re.Pattern[str]) -> Array:
    """Return the rows whose short or full name matches."""
    part = gpu.where(rows)
    chosen: Array = rows[part.matching("short_name", pattern) | part.matching("name", pattern)]
    return chosen


def longest(facts: TraceFacts, rows: Array) -> str:
    """Return the short name of the kernel that takes the most time in these rows."""
    gpu = facts.gpu
    names, of = np.unique(gpu.short_name[rows], return_inverse=True)
    name: str = gpu.strings[names[np.argmax(np.bincount(of, gpu.duration_ns[rows]))]]
    return name


@rule("fp32-matmuls", gpu=True, share=0.03, of="compute")
def fp32_matmuls(facts: TraceFacts) -> Iterator[Finding]:
    """Matmuls and convolutions compute in FP32 or TF32 where a 16-bit type would do.

    Found by the names of kernels. The time to win follows from the peaks of the types; it is half of the time if
    the peaks are unknown, or if memory limits the operator, because half of the bytes move. TF32 keeps 10 bits of
    each input's mantissa, and bf16 keeps 7: check that training still converges.
    """
    gpu = facts.gpu
    rows = _named(gpu, _matmul_kernels(facts), _SINGLE)
    rows = rows[~np.isin(rows, _named(gpu, rows, _REDUCTION))]
    if not len(rows):
        return
    tf32 = np.isin(rows, _named(gpu, rows, _TF32))
    peak = facts.peak
    flops = peak.flops_per_s if peak else {}
    half = "bf16" if not peak or "bf16" in flops else "fp16"
    ratios = np.full(len(rows), 2.0)
    by_memory = facts.by_memory[rows]
    for kind, chosen in (("tf32", tf32), ("fp32", ~tf32)):
        ratio = flops.get(half, 2.0) / flops.get(kind, 1.0) if half in flops and kind in flops else 2.0
        ratios[chosen & ~by_memory] = ratio
    win = facts.gpu_win(rows, 1 - 1 / ratios)
    gpu_ns = int(gpu.duration_ns[rows].sum())
    tf32_ns = float(gpu.duration_ns[rows[tf32]].sum())
    kinds = " and ".join(name for name, some in (("TF32", tf32.any()), ("FP32", (~tf32).any())) if some)
    yield facts.finding(
        f"Matmuls and convolutions in {kinds} take {duration(facts.per_gpu(gpu_ns))} {facts.each_gpu_step}",
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these kernels per step."),
        Evidence("tf32_share", tf32_ns / max(gpu_ns, 1), "1", "Share of it in TF32."),
        Evidence("peak", peak.name if peak else None, "", "GPU whose peaks are compared."),
        win_ns=win,
        kernel=longest(facts, rows),
        confidence="medium",
        fix=Fix(
            f"Run the forward pass in {half} with autocast. TF32 alone helps FP32 matmuls on Ampere and later.",
            "loss = model(batch)",
            'scaler = torch.amp.GradScaler()\nwith torch.autocast("cuda", torch.float16): loss = model(batch)'
            if half == "fp16"
            else 'with torch.autocast("cuda", torch.bfloat16): loss = model(batch)',
        ),
        coverage=1.0,
        at=facts.place_of(gpu.where(rows)),
    )


@rule("tensor-cores-unused", gpu=True, share=0.02, of="compute")
def tensor_cores_unused(facts: TraceFacts) -> Iterator[Finding]:
    """A 16-bit matmul or convolution does not use the matrix units (Tensor Cores).

    Found by the names of kernels, as torch_tb_profiler does. The time to win follows from the peaks of the GPU.
    """
    gpu = facts.gpu
    candidates = _named(gpu, _matmul_kernels(facts), _HALF)
    helpers = _named(gpu, candidates, _HELPER)
    rows = candidates[~on_matrix_units(gpu)[candidates] & ~np.isin(candidates, helpers)]
    named = np.array(["Cijk" not in word and "gemv" not in word.lower() for word in gpu.strings], bool)
    rows = rows[named[gpu.name[rows]]]
    peak = facts.peak
    if peak is None or not {"fp16", "fp32"} <= peak.flops_per_s.keys():
        raise MissingEvidenceError("the peaks of the GPU are not known")
    ratio = peak.flops_per_s["fp16"] / peak.flops_per_s["fp32"]
    win = facts.gpu_win(rows, 1 - 1 / ratio)
    if len(rows):
        yield facts.finding(
            "16-bit matmuls or convolutions do not use the matrix units",
            facts.gpu_time("gpu_ns", int(gpu.duration_ns[rows].sum()), "GPU time of them per step."),
            win_ns=win,
            kernel=longest(facts, rows),
            confidence="medium",
            fix=Fix("Make channels and features multiples of 8, and use channels_last for convolutions."),
            at=facts.place_of(gpu.where(rows)),
        )


def generations(facts: TraceFacts) -> Array:
    """Return the GPU generation that each kernel of `TraceFacts.gpu` was written for, such as 80; 0 if unknown."""
    gpu = facts.gpu
    by_name = np.zeros(len(gpu.strings), np.int64)
    for code in np.unique(gpu.name).tolist():
        if match := _GENERATION.search(gpu.strings[code][:512]):
            by_name[code] = int(match[1] or match[2]) if match[1] or match[2] else _GENERATIONS[match[3]]
    generations: Array = by_name[gpu.name]
    return generations


@rule("old-kernels", gpu=True, share=0.02, of="compute")
def old_kernels(facts: TraceFacts) -> Iterator[Finding]:
    """A matmul runs a kernel that was written for an older generation of GPUs.

    Needs the peaks of the GPU. cuBLAS and cuDNN fall back to such kernels for shapes or alignments that their
    newer kernels do not support; kernels with ``align1`` in their names read memory one element at a time. The
    time to win is the time above the roofline or, without shapes, half of the time.
    """
    peak = facts.peak
    if peak is None or not peak.generation:
        raise MissingEvidenceError("the GPU is not an NVIDIA GPU with known peaks")
    gpu, written_for = facts.gpu, generations(facts)
    candidates = _matmul_kernels(facts)
    rows = candidates[(written_for[candidates] > 0) & (written_for[candidates] // 10 < peak.generation // 10)]
    rows = rows[on_matrix_units(gpu)[rows]]
    shares = np.array([row.share or 0.5 for row in facts.roofline.rows] + [0.5])
    win = facts.gpu_win(rows, 1 - np.minimum(shares[facts.roofline.of_work[rows]], 1))
    if not len(rows):
        return
    oldest = int(np.bincount(written_for[rows], gpu.duration_ns[rows]).argmax())
    unaligned = _named(gpu, rows, re.compile(r"align1\b"))
    gpu_ns = int(gpu.duration_ns[rows].sum())
    unaligned_ns = int(gpu.duration_ns[unaligned].sum())
    misaligned = 2 * unaligned_ns > gpu_ns
    yield facts.finding(
        f"Matmuls of {duration(facts.per_gpu(gpu_ns))} {facts.each_gpu_step} run kernels written for sm{oldest} "
        f"on an sm{peak.generation} GPU" + (", with alignment 1: a dimension is odd" if misaligned else ""),
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these kernels per step."),
        facts.gpu_time("align1_ns", unaligned_ns, "Part of it in kernels that read one element at a time."),
        *_shapes(facts, rows),
        win_ns=win,
        kernel=longest(facts, rows),
        confidence="medium",
        fix=pad(8, 16)
        if misaligned
        else Fix("Update CUDA and cuDNN; pad dimensions to multiples of 8 (16 for 8 bits)."),
        coverage=float(np.mean(facts.roofline.of_work[rows] >= 0)),
        at=facts.place_of(gpu.where(rows)),
    )


def _shapes(facts: TraceFacts, rows: Array) -> Iterator[Evidence]:
    """Yield the sizes of the matmul that takes the most time in these rows."""
    of = facts.roofline.of_work[rows]
    priced = of >= 0
    if priced.any():
        sums = np.bincount(of[priced], facts.gpu.duration_ns[rows[priced]])
        row = facts.roofline.rows[int(np.argmax(sums))]
        text = " x ".join(map(str, row.work.sizes))
        yield Evidence("sizes", text, "", "Sizes of the longest (for matmuls: batch x m x n x k).")


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


@rule("misaligned-matmuls", gpu=True, share=0.01, of="compute")
def misaligned_matmuls(facts: TraceFacts) -> Iterator[Finding]:
    """The dimensions of a matmul are not multiples of 16 bytes, which matrix units load at once.

    Needs shapes. The guides of NVIDIA and AMD ask for multiples of 8 elements of 16 bits. The time to win is the
    time above the roofline or, without the peaks of the GPU, the part of the tiles that lies outside the result.
    Matmuls of `old-kernels` do not count.
    """
    facts.require_shapes()
    gpu, peak = facts.gpu, facts.peak
    written_for = generations(facts)
    misaligned, saved = [], dict[int, float]()
    for index, row in facts.roofline.of_kind("matmul").items():
        multiple = _ALIGNMENT.get(row.kind)
        m, n, k = row.work.sizes[1:]
        if multiple is None or min(m, n, k) < 2 * multiple or not any(size % multiple for size in (m, n, k)):
            continue
        rows = np.flatnonzero(facts.roofline.of_work == index)
        targets = written_for[rows][written_for[rows] > 0]
        if peak and peak.generation and (targets // 10 < peak.generation // 10).any():
            continue
        waste = 1 - row.share if row.share else _tile_waste(gpu, rows, m, n)
        if waste > 0:
            saved[index] = waste
            misaligned.append((row, rows))
    win = facts.roofline_win(saved)
    if not misaligned:
        return
    row, rows = misaligned[0]
    m, n, k = row.work.sizes[1:]
    gpu_ns = sum(each.gpu_ns for each, _ in misaligned)
    yield facts.finding(
        f"Matmuls of {m} x {n} x {k} are not aligned to {_ALIGNMENT[row.kind]} elements"
        + (f", and {counted(len(misaligned) - 1, 'other shape')}" if len(misaligned) > 1 else ""),
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these matmuls per step."),
        Evidence("share_of_peak", row.share, "1", "Share of the roofline that the longest reaches."),
        win_ns=win,
        operator=row.name,
        kernel=longest(facts, rows),
        confidence="medium",
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


@rule("few-tiles", gpu=True, share=0.01, of="compute")
def few_tiles(facts: TraceFacts) -> Iterator[Finding]:
    """A matmul has fewer tiles than the GPU has multiprocessors, so that some multiprocessors are unused.

    Needs shapes and the grid of the kernel, or the tile in its name. The time to win is its time times the share
    of multiprocessors without a tile. If the trace does not give their number, 40 are assumed, the number of a
    T4.
    """
    facts.require_shapes()
    gpu = facts.gpu
    sms = {device.sms for device in facts.trace.devices}
    size = sms.pop() if len(sms) == 1 else 0
    most, saved, small = size or _FEWEST_SMS, dict[int, float](), []
    for index, row in facts.roofline.of_kind("matmul").items():
        rows = np.flatnonzero(facts.roofline.of_work == index)
        tiles = _tiles(gpu, rows, row)
        if tiles is None or tiles >= most:
            continue
        saved[index] = 1 - tiles / most
        small.append((row, rows, tiles))
    win = facts.roofline_win(saved)
    if not small:
        return
    row, rows, tiles = max(small, key=lambda each: each[0].gpu_ns * (1 - each[2] / most))
    m, n, k = row.work.sizes[1:]
    yield facts.finding(
        f"A matmul of {m} x {n} x {k} has {counted(tiles, 'tile')} for {most} multiprocessors"
        + ("" if size else " or more")
        + (f", and {counted(len(small) - 1, 'other shape')} as well" if len(small) > 1 else ""),
        Evidence("tiles", tiles, "events", "Tiles: thread blocks of the kernel, or result / tile in its name."),
        Evidence("multiprocessors", size or None, "events", "Multiprocessors of the GPU."),
        facts.gpu_time("gpu_ns", row.gpu_ns, "GPU time of this matmul per step."),
        facts.gpu_time("all_ns", sum(each.gpu_ns for each, *_ in small), "GPU time of all such matmuls per step."),
        Evidence("long_side", k / max(m, n), "1", "k / the larger of m and n; if above 1, splitting k can help."),
        win_ns=win,
        operator=row.name,
        kernel=longest(facts, rows),
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


@rule("thin-matmuls", gpu=True, share=0.03, of="compute")
def thin_matmuls(facts: TraceFacts, *, thin: int = 16) -> Iterator[Finding]:
    """One side of a matmul is so short that reading the other factor takes almost all of the time.

    Needs shapes. A matmul with a side of 16 or less does about 16 operations, or fewer, for each byte that it
    reads in 16 bits: far below the ridge point of any GPU. Decoding one token at a time does this. The time to win
    is half of the time of such matmuls, as if pairs of them were batched.
    """
    facts.require_shapes()
    matmuls = facts.roofline.of_kind("matmul").items()
    narrow = {index: row for index, row in matmuls if min(row.work.sizes[1:3]) <= thin}
    win = facts.roofline_win(dict.fromkeys(narrow, 0.5))
    if not narrow:
        return
    row, gpu_ns = next(iter(narrow.values())), sum(each.gpu_ns for each in narrow.values())
    m, n, k = row.work.sizes[1:]
    yield facts.finding(
        f"Matmuls with a side of {min(m, n)} mostly read their weights: {m} x {n} x {k}"
        + (f", and {counted(len(narrow) - 1, 'other shape')}" if len(narrow) > 1 else ""),
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these matmuls per step."),
        Evidence("share_of_peak", row.share, "1", "Share of the roofline that the longest reaches."),
        win_ns=win,
        operator=row.name,
        confidence="low",
        fix=Fix("Batch several inputs, or quantize the weights to read fewer bytes."),
        coverage=facts.roofline.coverage,
        at=facts.place_of_operator(int(row.rows[0])),
    )
