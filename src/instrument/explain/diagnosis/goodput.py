"""Goodput: the useful operations of the recorded steps, as a share of what the GPUs could do."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..metrics.roofline import HEAVY
from ..rules.trace_facts import TraceFacts

_MOSTLY = 0.8  # of the time: with less known, the utilization would say too little


def goodput_of(facts: TraceFacts) -> dict[str, Any]:
    """Return the useful work of the window.

    ``flops`` are the operations of matmuls, attention and convolutions per step, ``recomputed_flops`` those that a
    backward pass computes again, ``mfu`` the time that the others would take at the peak of all GPUs / the time of
    the step, ``hfu`` the same with the recomputed ones, ``coverage`` the share of the kernels' time whose
    operations are known, and ``unknown`` why there is no ``mfu``. Above 1, the figures or the peak are wrong, as
    ``unknown`` says.
    """
    line = facts.roofline
    known, reason = _known_share(facts), None
    if facts.unknown_gpu:
        reason = facts.unknown_gpu
    elif facts.lacks_operators:
        reason = f'{facts.lacks_operators}: record with detail="full"'
    elif not line.flops:
        reason = "no operator with known operations ran on the GPU: record with record_shapes=True"
    elif line.peak_ns is None:
        reason = "the peaks of the GPU are not known" if line.peak is None else "the peak of a type is not known"
    elif known < _MOSTLY:
        reason = f"the operations of only {100 * known:.0f} % of the time of matmuls and the like are known"
    mfu = hfu = None
    if not reason and line.peak_ns and facts.window_ns:
        whole_ns = facts.window_ns * max(len(facts.gpus), 1)
        hfu = line.peak_ns / whole_ns
        mfu = hfu - (line.recomputed_peak_ns or 0) / whole_ns
    if hfu is not None and hfu > 1:
        reason = "more operations than the peak allows: the recorded shapes or the peak cannot be right"
    return {
        "flops": facts.per_step(line.flops),
        "recomputed_flops": facts.per_step(line.recomputed_flops),
        "mfu": mfu,
        "hfu": hfu,
        "coverage": line.coverage,
        "peak": line.peak.name if line.peak else None,
        "unknown": reason,
    }


def _known_share(facts: TraceFacts) -> float:
    """Return the share of the time of matmuls, attention and convolutions whose operations are known."""
    gpu, line = facts.gpu, facts.roofline
    heavy = np.array([row.work.kind in HEAVY for row in line.rows] + [False])
    known = heavy[line.of_work]
    family = np.array([word in ("gemm", "attention", "convolution") for word in gpu.strings], bool)
    either = known | family[gpu.family]
    return float(gpu.duration_ns[known].sum() / max(gpu.duration_ns[either].sum(), 1))
