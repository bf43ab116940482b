"""Rules on the kernels that run matmuls and convolutions: their types, and the GPUs they were written for."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...findings import Evidence, Finding, Fix
from ...traces.table import KERNEL, Array, Table
from ...units import duration
from ..rule import rule
from ..tensor_cores import on_matrix_units
from ..trace_facts import MissingEvidenceError, TraceFacts

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
    gpu = facts.gpu
    family = np.array([word in _MATMUL_FAMILIES for word in gpu.strings], bool)
    return np.flatnonzero((gpu.category == KERNEL) & family[gpu.family])


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


@rule("fp32-matmuls")
def fp32_matmuls(facts: TraceFacts, *, share: float = 0.03) -> Iterator[Finding]:
    """Matmuls and convolutions compute in FP32 or TF32 where a 16-bit type would do.

    Found by the names of kernels. The time to win follows from the peaks of the types; it is half of the time if
    the peaks are unknown, or if memory limits the operator, because half of the bytes move. TF32 keeps 10 bits of
    each input's mantissa, and bf16 keeps 7: check that training still converges.
    """
    facts.require_gpu()
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
    bounds = np.array([row.bound == "memory" for row in facts.roofline.rows] + [False])
    by_memory = bounds[facts.roofline.of_work[rows]]
    for kind, chosen in (("tf32", tf32), ("fp32", ~tf32)):
        ratio = flops.get(half, 2.0) / flops.get(kind, 1.0) if half in flops and kind in flops else 2.0
        ratios[chosen & ~by_memory] = ratio
    win = facts.gpu_win(rows, 1 - 1 / ratios)
    if facts.share(win) < share:
        return
    gpu_ns = int(gpu.duration_ns[rows].sum())
    kinds = " and ".join(name for name, some in (("TF32", tf32.any()), ("FP32", (~tf32).any())) if some)
    yield facts.finding(
        f"Matmuls and convolutions in {kinds} take {duration(facts.per_gpu(gpu_ns))} {facts.each_gpu_step}",
        win_ns=win,
        kernel=longest(facts, rows),
        confidence="medium",
        evidence=(
            facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these kernels per step."),
            Evidence("tf32_share", float(gpu.duration_ns[rows[tf32]].sum()) / gpu_ns, "1", "Share of it in TF32."),
            Evidence("peak", peak.name if peak else None, "", "GPU whose peaks are compared."),
        ),
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


@rule("tensor-cores-unused")
def tensor_cores_unused(facts: TraceFacts, *, share: float = 0.02) -> Iterator[Finding]:
    """A 16-bit matmul or convolution does not use the matrix units (Tensor Cores).

    Found by the names of kernels, as torch_tb_profiler does. The time to win follows from the peaks of the GPU.
    """
    facts.require_gpu()
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
    if len(rows) and facts.share(win) >= share:
        yield facts.finding(
            "16-bit matmuls or convolutions do not use the matrix units",
            win_ns=win,
            kernel=longest(facts, rows),
            confidence="medium",
            evidence=(facts.gpu_time("gpu_ns", int(gpu.duration_ns[rows].sum()), "GPU time of them per step."),),
            fix=Fix("Make channels and features multiples of 8, and use channels_last for convolutions."),
            at=facts.place_of(gpu.where(rows)),
        )


def generations(facts: TraceFacts) -> Array:
    """Return the GPU generation that each kernel of `TraceFacts.gpu` was written for, such as 80; 0 if unknown."""
    gpu = facts.gpu
    known = np.zeros(len(gpu.strings), np.int64)
    for code in np.unique(gpu.name).tolist():
        if found := _GENERATION.search(gpu.strings[code][:512]):
            known[code] = int(found[1] or found[2]) if found[1] or found[2] else _GENERATIONS[found[3]]
    generations: Array = known[gpu.name]
    return generations


@rule("old-kernels")
def old_kernels(facts: TraceFacts, *, share: float = 0.02) -> Iterator[Finding]:
    """A matmul runs a kernel that was written for an older generation of GPUs.

    Needs the peaks of the GPU. cuBLAS and cuDNN fall back to such kernels for shapes or alignments that their
    newer kernels do not support; kernels with ``align1`` in their names read memory one element at a time. The
    time to win is the time above the roofline or, without shapes, half of the time.
    """
    facts.require_gpu()
    peak = facts.peak
    if peak is None or not peak.generation:
        raise MissingEvidenceError("the GPU is not an NVIDIA GPU with known peaks")
    gpu, written_for = facts.gpu, generations(facts)
    candidates = _matmul_kernels(facts)
    rows = candidates[(written_for[candidates] > 0) & (written_for[candidates] // 10 < peak.generation // 10)]
    rows = rows[on_matrix_units(gpu)[rows]]
    shares = np.array([row.share or 0.5 for row in facts.roofline.rows] + [0.5])
    win = facts.gpu_win(rows, 1 - np.minimum(shares[facts.roofline.of_work[rows]], 1))
    if not len(rows) or facts.share(win) < share:
        return
    oldest = int(np.bincount(written_for[rows], gpu.duration_ns[rows]).argmax())
    unaligned = _named(gpu, rows, re.compile(r"align1\b"))
    gpu_ns = int(gpu.duration_ns[rows].sum())
    misaligned = bool(2 * gpu.duration_ns[unaligned].sum() > gpu_ns)
    yield facts.finding(
        f"Matmuls of {duration(facts.per_gpu(gpu_ns))} {facts.each_gpu_step} run kernels written for sm{oldest} "
        f"on an sm{peak.generation} GPU" + (", with alignment 1: a dimension is odd" if misaligned else ""),
        win_ns=win,
        kernel=longest(facts, rows),
        confidence="medium",
        evidence=(
            facts.gpu_time("gpu_ns", gpu_ns, "GPU time of these kernels per step."),
            facts.gpu_time(
                "align1_ns",
                int(gpu.duration_ns[unaligned].sum()),
                "Part of it in kernels that read one element at a time.",
            ),
            *_shapes(facts, rows),
        ),
        fix=pad(8, 16)
        if misaligned
        else Fix("Update CUDA and cuDNN; pad dimensions to multiples of 8 (16 for 8 bits)."),
        coverage=float(np.mean(facts.roofline.of_work[rows] >= 0)),
        at=facts.place_of(gpu.where(rows)),
    )


def _shapes(facts: TraceFacts, rows: Array) -> Iterator[Evidence]:
    """Yield the sizes of the matmul that takes the most time in these rows."""
    of = facts.roofline.of_work[rows]
    known = of >= 0
    if known.any():
        sums = np.bincount(of[known], facts.gpu.duration_ns[rows[known]])
        row = facts.roofline.rows[int(np.argmax(sums))]
        text = " x ".join(map(str, row.work.sizes))
        yield Evidence("sizes", text, "", "Sizes of the longest (for matmuls: batch x m x n x k).")
