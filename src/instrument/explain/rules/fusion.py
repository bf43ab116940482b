"""Rules on kernels that mostly read and write memory, and that one fused kernel could replace."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...base.findings import Finding, Fix
from ...base.units import count, duration
from ...read.tables.table import KERNEL, Array
from ..metrics.tables import one_of
from .rule import rule
from .trace_facts import TraceFacts

_LONG = 3  # kernels, at least, in a chain
_GENERATED = re.compile("^triton_|^fused_|nvfuser")
_NORM = ("aten::pow", "aten::mean", "aten::rsqrt")
_NORM_PARTS = (*_NORM, "aten::add", "aten::mul", "aten::sub", "aten::var", "aten::to", "aten::_to_copy")
_REACH = 8  # operators around a reciprocal square root
_COMPILE = Fix(
    "Fuse the kernels into one with torch.compile.",
    "out = gelu(x @ w + b) * scale",
    "@torch.compile\ndef block(x): return gelu(x @ w + b) * scale",
)


@rule("elementwise-chains", gpu=True, share=0.02, of="compute")
def elementwise_chains(facts: TraceFacts) -> Iterator[Finding]:
    """Element-wise kernels run one after the other on a stream, so that one fused kernel could replace them.

    Needs kernels only. A chain is three or more such kernels in a row on a stream, without another kernel between
    them; kernels that a compiler generated do not count. A fused kernel reads and writes memory about once: the
    time to win is the time of the chain minus that of its longest kernel.
    """
    gpu = facts.gpu
    order = np.flatnonzero(gpu.category == KERNEL)
    order = order[np.lexsort((gpu.start_ns[order], gpu.stream[order], gpu.device[order]))]
    simple = one_of(gpu, "family", ("elementwise",))[order] & ~gpu.where(order).matching("short_name", _GENERATED)
    simple &= ~np.isin(order, _norm_work(facts))
    stream = np.diff(gpu.stream[order], prepend=-1) != 0
    begins = simple & (np.concatenate(([True], ~simple[:-1])) | stream)
    of = np.cumsum(begins)[simple] - 1
    rows = order[simple]
    if not len(rows):
        return
    calls = np.bincount(of)
    sums, longest = np.bincount(of, gpu.duration_ns[rows]), np.zeros(len(calls), np.int64)
    np.maximum.at(longest, of, gpu.duration_ns[rows])
    chains = calls >= _LONG
    saved = np.where(chains, 1 - longest / np.maximum(sums, 1), 0)
    win = facts.gpu_win(rows, saved[of])
    if not chains.any():
        return
    worst = rows[of == np.flatnonzero(chains)[np.argmax(sums[chains])]]
    yield facts.finding(
        f"{count(facts.calls(chains.sum()))} chains of element-wise kernels {facts.each_gpu_step} take "
        f"{duration(facts.per_gpu(float(sums[chains].sum())))}",
        facts.gpu_count("chains", chains.sum(), "Chains of three or more kernels per step."),
        facts.gpu_count("kernels", calls[chains].sum(), "Kernels in these chains per step."),
        facts.gpu_time("gpu_ns", float(sums[chains].sum()), "GPU time of the chains per step."),
        win_ns=win,
        kernel=gpu.strings[gpu.short_name[worst[0]]],
        confidence="medium",
        fix=_COMPILE,
        at=facts.place_of(gpu.where(worst)),
    )


def _norm_work(facts: TraceFacts) -> Array:
    """Return the rows of `TraceFacts.gpu` that belong to normalizations written as several operators."""
    operators = facts.trace.operators
    roots = facts.rows(operators, "aten::rsqrt")
    if not len(roots):
        return np.empty(0, np.int64)
    parts = facts.rows(operators, *_NORM_PARTS)
    parts = parts[np.lexsort((operators.start_ns[parts], operators.thread[parts]))]
    names = operators.name[parts]
    codes = {operators.strings[code]: code for code in np.unique(names).tolist()}
    place = np.full(len(operators), -1)
    place[parts] = np.arange(len(parts))
    chosen = np.zeros(len(parts), bool)
    for at in place[roots].tolist():
        before = names[max(at - _REACH, 0) : at]
        squares = np.flatnonzero(before == codes.get("aten::pow", -1))
        if len(squares) and (before[squares[-1] :] == codes.get("aten::mean", -1)).any():
            first = max(at - _REACH, 0) + int(squares[-1])
            chosen[first : at + 2] = True  # and the multiplication that follows
    mask = np.zeros(len(operators) + 1, bool)
    mask[parts[chosen]] = True
    rows: Array = np.flatnonzero(mask[facts.gpu.operator])
    return rows


@rule("unfused-normalization", gpu=True, share=0.01, of="compute")
def unfused_normalization(facts: TraceFacts) -> Iterator[Finding]:
    """A normalization runs as several operators: a square, a mean, a reciprocal square root, a multiplication.

    Needs operators. The RMSNorm layers of most language models are written this way. A fused kernel reads and
    writes memory once: the time to win is the time of all kernels except the longest of each normalization.
    """
    rows = _norm_work(facts)
    gpu = facts.gpu
    if not len(rows):
        return
    roots = len(facts.rows(facts.trace.operators, "aten::rsqrt"))
    gpu_ns = int(gpu.duration_ns[rows].sum())
    longest = float(np.sort(gpu.duration_ns[rows])[-roots:].sum())
    win = facts.gpu_win(rows, 1 - longest / max(gpu_ns, 1))
    yield facts.finding(
        f"{count(facts.calls(roots))} normalizations {facts.each_gpu_step} run as separate operators and take "
        f"{duration(facts.per_gpu(gpu_ns))}",
        facts.gpu_count("normalizations", roots, "Reciprocal square roots per step."),
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time of their operators per step."),
        win_ns=win,
        operator="aten::rsqrt",
        confidence="medium",
        fix=Fix(
            "Use the fused operator, or fuse the operators with torch.compile.",
            "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight",
            "torch.nn.functional.rms_norm(x, weight.shape, weight, eps)",
        ),
        at=facts.place_of(gpu.where(rows)),
    )
