"""Rules on attention: whether it is fused, and how well the fused kernels run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted, duration
from ...read.tables.table import Array, Table
from ..metrics.roofline import RooflineRow
from ..metrics.tables import one_of
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data")
_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_FUSED_SHARE = 0.5  # of the peak; FlashAttention-2 (Dao 2023) reports 50 to 73 % on an A100
_SHORT = 512  # queries
_HEAD_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)  # for which FlashAttention has kernels

_SDPA = Fix(
    "Use scaled_dot_product_attention: its fused kernels do not write the scores to memory.",
    "scores = (q @ k.transpose(-2, -1)) * scale + mask\nout = scores.softmax(-1) @ v",
    "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)\n"
    '# transformers: from_pretrained(..., attn_implementation="sdpa")',
)


@rule("unfused-attention", gpu=True, share=0.02, of="compute")
def unfused_attention(facts: TraceFacts) -> Iterator[Finding]:
    """Attention runs as separate kernels: a batched matmul, a softmax, and another batched matmul.

    Needs operators; shapes raise the confidence. All GPU work that the thread launches from the start of the first
    matmul to the end of the second counts. The time to win is the time of this work minus the time of a fused
    kernel: the operations of both matmuls at half of the peak or, if the peak is unknown, the time of the matmuls.
    """
    operators = facts.trace.operators
    chosen = facts.rows(operators, *_SOFTMAX, *_PRODUCTS)
    softmax = one_of(operators, "name", _SOFTMAX)[chosen]
    if not softmax.any():
        return
    order = np.lexsort((operators.start_ns[chosen], operators.thread[chosen]))
    chosen, softmax = chosen[order], softmax[order]
    thread = operators.thread[chosen]
    middle = np.flatnonzero(softmax[1:-1] & ~softmax[:-2] & ~softmax[2:]) + 1
    middle = middle[(thread[middle - 1] == thread[middle]) & (thread[middle + 1] == thread[middle])]
    shapes = [tuple(operators.shapes[chosen[place - 1 : place + 2]].tolist()) for place in middle.tolist()]
    fits = {codes: _fits(*(operators.strings[code] for code in codes)) for codes in set(shapes)}
    at = middle[np.array([fits[codes] for codes in shapes], bool)]
    if not len(at):
        return
    first, last, scores = chosen[at - 1], chosen[at + 1], chosen[at]
    rows = _launched_between(facts, operators, first, last)
    gpu_ns = int(facts.gpu.duration_ns[rows].sum())
    products = np.isin(facts.gpu.operator[rows], np.concatenate((first, last)))
    matmul_ns = int(facts.gpu.duration_ns[rows[products]].sum())
    fused_ns = _fused_ns(facts, np.concatenate((first, last)))
    left_ns = matmul_ns if fused_ns is None else min(fused_ns, gpu_ns)
    win = facts.gpu_win(rows, 1 - left_ns / max(gpu_ns, 1))
    softmax_ns = int(facts.gpu.duration_ns[rows[np.isin(facts.gpu.operator[rows], scores)]].sum())
    yield facts.finding(
        "Attention is not fused: softmax and its matmuls take "
        f"{duration(facts.per_gpu(gpu_ns))} {facts.each_gpu_step}",
        facts.gpu_count("calls", len(at), "Calls of unfused attention per step."),
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time per step, both matmuls included."),
        facts.gpu_time("softmax_ns", softmax_ns, "Part of it in the softmax."),
        facts.gpu_time("fused_ns", fused_ns, "Time of a fused kernel at half of the GPU's peak."),
        win_ns=win,
        operator="aten::_softmax",
        fix=_SDPA,
        confidence="high" if operators.shapes.any() else "medium",
        at=facts.place_of_operator(int(scores[0])),
    )


def _fits(first: str, scores: str, last: str) -> bool:
    """Return whether the shapes of the operators fit attention; True if a shape is unknown."""
    try:
        product, softmax, second = (json.loads(text) for text in (first, scores, last))
        product, second = (dims[-2:] if len(dims) < 3 else dims[:2] for dims in (product, second))
        keys = softmax[0][-1]
        return bool(keys > 1) and keys in product[1][-1:] + product[0][-2:] and keys in second[0] + second[1]
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
        return not (first and scores and last)


def _launched_between(facts: TraceFacts, operators: Table, first: Array, last: Array) -> Array:
    """Return the rows of the GPU work that threads launched from the start of ``first`` to the end of ``last``."""
    gpu = facts.gpu
    linked = np.flatnonzero(gpu.operator >= 0)
    at, thread = operators.start_ns[gpu.operator[linked]], operators.thread[gpu.operator[linked]]
    order = np.argsort(operators.start_ns[first], kind="stable")
    starts, ends = operators.start_ns[first][order], operators.end_ns[last][order]
    of = np.searchsorted(starts, at, "right") - 1
    inside = (of >= 0) & (at < ends[of]) & (thread == operators.thread[first][order][of])
    rows: Array = linked[inside]
    return rows


def _fused_ns(facts: TraceFacts, products: Array) -> int | None:
    """Return how long a fused kernel would take for the operations of these matmuls; None if that is unknown."""
    peak, total, seen = facts.peak, 0.0, 0
    if peak is None:
        return None
    for row in facts.roofline.rows:
        if row.work.kind == "matmul" and row.name in _PRODUCTS:
            calls = int(np.isin(row.rows, products).sum())
            flops = peak.flops_per_s.get(row.kind)
            if calls and not flops:
                return None
            total += calls * row.work.flops / ((flops or 1) * _FUSED_SHARE)
            seen += calls
    return round(total * 1e9) if seen else None


def _attention(facts: TraceFacts) -> dict[int, RooflineRow]:
    """Return the fused attentions by their index in the rows of the roofline."""
    facts.require_gpu()
    facts.require_shapes()
    return facts.roofline.of_kind("attention")


def _below(facts: TraceFacts, of_peak: float, fits: Callable[[int], bool]) -> tuple[list[RooflineRow], int]:
    """Return the attentions below this share of the peak, and the time to win above the roofline.

    Args:
        facts: the facts.
        of_peak: the share.
        fits: takes the number of queries of an attention, and returns whether it counts.
    """
    chosen = {index: row for index, row in _attention(facts).items() if fits(row.work.sizes[2])}
    if chosen and facts.peak is None:
        raise MissingEvidenceError("the peaks of the GPU are not known")
    slow = {index: row for index, row in chosen.items() if row.share is not None and row.share < of_peak}
    win = facts.roofline_win({index: 1 - (row.share or 0) for index, row in slow.items()})
    return list(slow.values()), win


@rule("slow-attention", share=0.02, of="compute")
def slow_attention(facts: TraceFacts, *, of_peak: float = 0.3) -> Iterator[Finding]:
    """Fused attention over long sequences stays far below the peak.

    Needs shapes and the peaks of the GPU. FlashAttention-2 reaches 50 to 73 % of an A100's peak (Dao 2023); below
    30 %, another backend or a newer library may be faster. The time to win is the time above the roofline.
    """
    slow, win = _below(facts, of_peak, lambda queries: queries > _SHORT)
    if not slow:
        return
    row = slow[0]
    batch, heads, queries, keys, size, _ = row.work.sizes
    backend = next((name for name in ("flash", "efficient", "cudnn") if name in row.name), row.name)
    yield facts.finding(
        f"Fused attention reaches {100 * (row.share or 0):.0f} % of the peak: "
        f"{batch} x {heads} heads, {queries} queries, {keys} keys, head size {size}",
        Evidence("share_of_peak", row.share, "1", "Share of the roofline, counted without a causal mask."),
        facts.gpu_time("gpu_ns", sum(each.gpu_ns for each in slow), "GPU time of such calls per step."),
        Evidence("backend", backend, "", "Backend that ran."),
        win_ns=win,
        operator=row.name,
        confidence="medium",
        fix=Fix(
            "Try the other backends of scaled_dot_product_attention, or a newer FlashAttention (3 on Hopper, "
            "CK or AITER on AMD).",
            "out = F.scaled_dot_product_attention(q, k, v)",
            "with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # on NVIDIA also CUDNN_ATTENTION\n"
            "    out = F.scaled_dot_product_attention(q, k, v)",
        ),
        at=facts.place_of_operator(int(row.rows[0])),
    )


@rule("short-attention", share=0.02, of="compute")
def short_attention(facts: TraceFacts, *, of_peak: float = 0.2) -> Iterator[Finding]:
    """Fused attention over short sequences spends most of its time outside its operations.

    Needs shapes and the peaks of the GPU. Up to 512 queries a tile of FlashAttention holds a large part of the
    sequence, and setting it up costs as much as computing it. The time to win is the time above the roofline.
    """
    slow, win = _below(facts, of_peak, lambda queries: queries <= _SHORT)
    if not slow:
        return
    row = slow[0]
    batch, heads, queries, *_ = row.work.sizes
    yield facts.finding(
        f"Attention over only {queries} queries: its fused kernel "
        f"reaches {100 * (row.share or 0):.0f} % of the peak",
        Evidence("share_of_peak", row.share, "1", "Share of the roofline that the longest reaches."),
        Evidence("tiles", batch * heads * -(-queries // 128), "events", "Batch x heads x (queries / 128)."),
        facts.gpu_time("gpu_ns", sum(each.gpu_ns for each in slow), "GPU time of such calls per step."),
        win_ns=win,
        operator=row.name,
        confidence="medium",
        fix=Fix(
            "Pack several sequences into one, with a mask that keeps them apart.",
            "out = F.scaled_dot_product_attention(q, k, v)  # batch x heads x 128 x size",
            "out = flex_attention(q, k, v, block_mask=create_block_mask(same_document, ...))",
        ),
        at=facts.place_of_operator(int(row.rows[0])),
    )


@rule("padded-heads", share=0.01, of="compute")
def padded_heads(facts: TraceFacts) -> Iterator[Finding]:
    """Fused attention has no kernel for the head size, and pads it to the next size.

    Needs shapes. FlashAttention has kernels for 32, 64, 96, 128, 160, 192, 224 and 256. The time to win is the
    share of the operations that compute padding.
    """
    widened, saved, all_ns = [], dict[int, float](), 0
    for index, row in _attention(facts).items():
        size = row.work.sizes[4]
        padded = next((supported for supported in _HEAD_SIZES if supported >= size), size)
        if padded > size:
            saved[index] = 1 - size / padded
            widened.append((row, size, padded))
            all_ns += row.gpu_ns
    win = facts.roofline_win(saved)
    if not widened:
        return
    row, size, padded = widened[0]
    yield facts.finding(
        f"Heads of size {size} are padded to {padded}"
        + (f", and {counted(len(widened) - 1, 'other shape')}" if len(widened) > 1 else ""),
        Evidence("head_size", size, "events", "Head size."),
        Evidence("padded", padded, "events", "Head size that the kernel computes."),
        facts.gpu_time("gpu_ns", all_ns, "GPU time of attention with padded heads per step."),
        win_ns=win,
        operator=row.name,
        confidence="medium",
        fix=Fix(f"For a new model, choose a head size of {padded}: it takes the same time."),
        at=facts.place_of_operator(int(row.rows[0])),
    )
