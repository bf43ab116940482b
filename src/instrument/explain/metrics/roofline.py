"""The roofline: how close operators come to what the GPU can do, and whether compute or memory limits them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from ...read.tables.nest import ancestor_levels, inside_rows, rows_with_inner
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import Trace
from .groups import distinct_values, sum_by_group
from .operator_work import BACKWARD, FORWARD, Work, operator_work, results_of
from .peaks import Peak, peak_of

HEAVY = frozenset(("matmul", "attention", "convolution"))
"""The kinds of operators that compute most, and whose operations count as useful."""

_TF32 = re.compile(r"tf32|xf32|s1688gemm_(?!f16|bf16)", re.IGNORECASE)
_KINDS = {
    "float": "fp32", "double": "fp64", "c10::half": "fp16", "half": "fp16", "c10::bfloat16": "bf16",
    "bfloat16": "bf16", "signed char": "int8",
}  # fmt: skip
_ENGINE = re.compile("^autograd::engine::evaluate_function")
_FORWARD = frozenset((
    FORWARD, "aten::linear", "aten::matmul", "aten::addmm", "aten::baddbmm", "aten::scaled_dot_product_attention",
))  # fmt: skip
_PLAUSIBLE = 1.05  # of the peak: clocks above the data sheet's


class RooflineRow(NamedTuple):
    """All calls of one operator with the same shapes and types.

    Attributes:
        name: the operator.
        work: what one call computes.
        calls: the calls that launched kernels.
        gpu_ns: the sum of the durations of these kernels; memcpys and memsets do not count.
        kind: the type that the matrix or the ordinary units computed in: "bf16", "tf32".
        bound: "compute" or "memory", by the operations per byte; None if the peak is not known.
        share: operations or bytes per second, as a share of the peak of that side; None like `bound`.
        rows: the rows of `Trace.operators`.
    """

    name: str
    work: Work
    calls: int
    gpu_ns: int
    kind: str
    bound: Literal["compute", "memory"] | None
    share: float | None
    rows: Array

    @property
    def implausible(self) -> bool:
        """Whether it is faster than the peak, so that the figures or the peak cannot be right."""
        return self.share is not None and self.share > _PLAUSIBLE


@dataclass(frozen=True)
class Roofline:
    """The operators whose operations are known.

    Attributes:
        rows: the longest on the GPU first.
        covered_ns: the time of the kernels that these operators launched.
        of_ns: the time of all kernels.
        peak: the peaks of the GPU; None if they are not known.
        flops: the operations of matmuls, attention and convolutions.
        peak_ns: how long those would take at the peak of their types; None if a peak is not known.
        recomputed_flops: the part of ``flops`` that the backward pass computes again, as with checkpointing.
        recomputed_peak_ns: the same part of ``peak_ns``.
        of_work: for each row of the GPU work, the index in ``rows`` of the operator of a kernel, or -1.
    """

    rows: list[RooflineRow]
    covered_ns: int
    of_ns: int
    peak: Peak | None
    flops: int
    peak_ns: float | None
    recomputed_flops: int
    recomputed_peak_ns: float | None
    of_work: Array

    @property
    def coverage(self) -> float | None:
        """The share of the kernels' time that the rows cover."""
        return self.covered_ns / self.of_ns if self.of_ns else None

    def of_kind(self, kind: str) -> dict[int, RooflineRow]:
        """Return the operators of this kind by their index in ``rows``, the longest first."""
        return {index: row for index, row in enumerate(self.rows) if row.work.kind == kind}

    def bound_ns(self, bound: str) -> int:
        """Return the GPU time of the operators with this bound."""
        return sum(row.gpu_ns for row in self.rows if row.bound == bound)


def roofline(trace: Trace) -> Roofline:
    """Return the roofline of a trace: for each operator with known operations, its share of the peak.

    Matmuls, attention and convolutions count wherever they are called; other operators only outside of these.
    The operations are those of `operator_work`. Convolutions need their other inputs, which torch records with the
    shapes since 2.1, or a backward pass in the trace, which shows the shape of their result.
    """
    operators, gpu = trace.operators, trace.gpu
    names = {device.name for device in trace.devices}
    peak = peak_of(names.pop()) if len(names) == 1 else None
    kernel = gpu.category == KERNEL
    of_ns = int(gpu.duration_ns[kernel].sum())
    rows, works, which = _priced(operators)
    call = _call_of_work(gpu, operators, rows)
    launched = np.flatnonzero((call >= 0) & kernel)
    tf32 = np.zeros(len(rows), np.int64)
    tf32[call[launched[gpu.matching("name", _TF32)[launched]]]] = 1
    groups, of_call = np.unique(np.stack((which, tf32), axis=1), axis=0, return_inverse=True)
    of_call = of_call.reshape(-1)
    of_work = np.full(len(gpu), -1)
    of_work[launched] = of_call[call[launched]]
    sums = sum_by_group(gpu.duration_ns[launched], of_work[launched], len(groups))
    calls = np.unique(call[launched])
    result = {}
    for group in np.unique(of_call[calls]).tolist():
        mine = rows[calls[of_call[calls] == group]]
        name, (work, uses_tf32) = operators.strings[operators.name[mine[0]]], groups[group].tolist()
        result[group] = _row(name, works[work], mine, int(sums[group]), bool(uses_tf32), peak)
    order = sorted(result, key=lambda group: (-result[group].gpu_ns, result[group].name, result[group].work.sizes))
    place = np.full(len(groups) + 1, -1)
    place[order] = np.arange(len(order))
    heavy = [row for row in result.values() if row.work.kind in HEAVY]
    covered_ns = int(gpu.duration_ns[of_work >= 0].sum())
    again = _recomputed(operators)
    counts = {id(row): (row.calls, int(again[row.rows].sum())) for row in heavy}
    totals = [
        (
            sum(row.work.flops * counts[id(row)][which] for row in heavy),
            _peak_ns([(row, counts[id(row)][which]) for row in heavy], peak),
        )
        for which in (0, 1)
    ]
    rows_in_order = [result[group] for group in order]
    return Roofline(rows_in_order, covered_ns, of_ns, peak, *totals[0], *totals[1], place[of_work])


def counted_calls(trace: Trace) -> Array:
    """Return the rows of the operators that the roofline counts: those with known work that launched GPU work."""
    rows, _, _ = _priced(trace.operators)
    call = _call_of_work(trace.gpu, trace.operators, rows)
    found: Array = rows[np.unique(call[call >= 0])]
    return found


def _row(name: str, work: Work, rows: Array, gpu_ns: int, tf32: bool, peak: Peak | None) -> RooflineRow:
    kind = _KINDS.get(work.dtype.lower(), work.dtype)
    if kind == "fp32" and tf32:
        kind = "tf32"
    bound: Literal["compute", "memory"] | None = None
    share = None
    if peak is not None and work.bytes and gpu_ns:
        matrix = work.kind in HEAVY
        flops = peak.flops_per_s.get(kind if matrix else "fp32")
        if flops:
            seconds = gpu_ns / 1e9 / len(rows)
            by_compute, by_memory = work.flops / flops, work.bytes / peak.memory_bytes_per_s
            bound = "compute" if by_compute > by_memory else "memory"
            share = max(by_compute, by_memory) / seconds
    return RooflineRow(name, work, len(rows), gpu_ns, kind, bound, share, rows)


def _peak_ns(calls: list[tuple[RooflineRow, int]], peak: Peak | None) -> float | None:
    if peak is None or any(row.kind not in peak.flops_per_s for row, _ in calls):
        return None
    return math.fsum(1e9 * row.work.flops * count / peak.flops_per_s[row.kind] for row, count in calls)


def _recomputed(operators: Table) -> Array:
    """Return a mask of the operators of a forward pass that the backward pass runs again.

    They are inside a node of autograd's engine, and are either operators that no gradient uses, or inside one.
    """
    engine = np.flatnonzero(operators.matching("name", _ENGINE))
    forward = np.flatnonzero(np.array([word in _FORWARD for word in operators.strings], bool)[operators.name])
    mask: Array = inside_rows(engine, operators.parent) & inside_rows(forward, operators.parent)
    return mask


def _priced(operators: Table) -> tuple[Array, list[Work], Array]:
    """Return the rows of the calls that count, the distinct works, and the index of the work of each call."""
    strings = operators.strings
    keys = np.stack((operators.name, operators.shapes, operators.types, operators.scalars), axis=1)
    known = np.flatnonzero(operators.shapes)
    backward = known[np.array([word == BACKWARD for word in strings], bool)[operators.name[known]]]
    results = results_of(strings[shapes] for shapes in np.unique(operators.shapes[backward]).tolist())
    work_of = partial(operator_work, results=results)
    works, of_row = distinct_values(keys[known], lambda *codes: work_of(*(strings[code] for code in codes)))
    rows, of_row = known[of_row >= 0], of_row[of_row >= 0]
    heavy = np.array([work.kind in HEAVY for work in works], bool)
    counts = _innermost(rows, heavy[of_row] if len(rows) else np.zeros(0, bool), operators.parent)
    return rows[counts], works, of_row[counts]


def _innermost(rows: Array, heavy: Array, parents: Array) -> Array:
    """Return a mask of the rows that count: heavy ones without a heavy one inside, others outside of those."""
    calls_heavy, calls_another = (rows_with_inner(chosen, parents)[rows] for chosen in (rows[heavy], rows))
    in_heavy = inside_rows(rows[heavy], parents)[rows]
    mask: Array = np.where(heavy, ~calls_heavy, ~in_heavy & ~calls_another)
    return mask


def _call_of_work(gpu: Table, operators: Table, rows: Array) -> Array:
    """Return for each row of the GPU work the index in ``rows`` of the call that launched it, or -1."""
    number = np.full(len(operators), -1)
    number[rows] = np.arange(len(rows))
    result = np.full(len(gpu), -1)
    for work, above in ancestor_levels(gpu.operator, operators.parent):
        unknown = result[work] < 0
        result[work[unknown]] = number[above[unknown]]
    return result
