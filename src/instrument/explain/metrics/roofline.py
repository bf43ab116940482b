"""The roofline: what GPUs can do at best, how close operators come, and whether compute or memory limits them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np

from ...read.tables.lanes import distinct
from ...read.tables.nest import ancestor_levels, inside_rows, rows_with_inner
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import Trace
from .operator_work import BACKWARD, FORWARD, HEAVY, Work, operator_work, results_of
from .tables import distinct_values, one_of, sum_by_group

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class GpuPeak:
    """The peaks of one GPU, as the program sees it: of an MI250, one of its two dies.

    Attributes:
        name: the product.
        architecture: its generation, as in the names of kernels: "sm90", "gfx942".
        memory_bytes_per_s: bytes per second between the GPU and its memory.
        flops_per_s: operations per second by type. "fp32" and "fp64" are the ordinary units; "tf32", "fp16",
            "bf16", "fp8" and "int8" the matrix units without sparsity, adding up in 32 bits (consumer cards run at
            half of the advertised rate then).
        source: where the figures come from.
    """

    name: str
    architecture: str
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    source: str

    @property
    def generation(self) -> int:
        """The compute capability times 10, such as 90; 0 for GPUs that are not NVIDIA's."""
        return int(self.architecture[2:]) if self.architecture.startswith("sm") else 0

    def ridge(self, kind: str) -> float | None:
        """Return the operations per byte from which this type is bound by compute; None if it is unknown."""
        flops = self.flops_per_s.get(kind)
        return flops / self.memory_bytes_per_s if flops else None


def _peak(
    pattern: str, name: str, architecture: str, gigabytes: float, source: str, **teraflops: float
) -> tuple[re.Pattern[str], GpuPeak]:
    """Return a pattern for names of a device, and its peaks; ``source`` is a whitepaper or has a data sheet."""
    maker = "NVIDIA" if architecture.startswith("sm") else "AMD Instinct"
    sheet = "" if source.endswith("whitepaper") else " data sheet"
    flops = {kind: rate * _TERA for kind, rate in teraflops.items()}
    if "fp16" in flops and architecture not in ("sm70", "sm75"):
        flops.setdefault("bf16", flops["fp16"])
    peak = GpuPeak(name, architecture, gigabytes * _GIGA, flops, f"{maker} {source}{sheet}")
    return re.compile(pattern, re.IGNORECASE), peak


_HOPPER = {"fp64": 34, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_CDNA3 = {"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9}
_AMPERE = {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "int8": 624}
_VOLTA = {"fp64": 7.8, "fp32": 15.7, "fp16": 125}

# The first pattern that is found in the name of a device decides.
_PEAKS = (
    _peak(r"GB200", "GB200", "sm100", 8000, "GB200 NVL72", fp32=80, tf32=1250, fp16=2500, fp8=5000),
    _peak(r"\bB200", "B200", "sm100", 8000, "DGX B200", fp32=75, tf32=1100, fp16=2250, fp8=4500),
    _peak(r"\bB100", "B100", "sm100", 8000, "HGX B100", fp32=60, tf32=900, fp16=1750, fp8=3500),
    _peak(r"GH200.*144", "GH200 144GB", "sm90", 4900, "GH200", **_HOPPER),
    _peak(r"GH200", "GH200", "sm90", 4000, "GH200", **_HOPPER),
    _peak(r"\bH200", "H200", "sm90", 4800, "H200", **_HOPPER),
    _peak(r"\bH20\b", "H20", "sm90", 4000, "H20", fp32=44, tf32=74, fp16=148, fp8=296, int8=296),
    _peak(r"H100 PCIe", "H100 PCIe", "sm90", 2000, "H100", fp64=26, fp32=51, tf32=378, fp16=756, fp8=1513),
    _peak(r"H100 NVL", "H100 NVL", "sm90", 3900, "H100 NVL", fp64=30, fp32=60, tf32=417.5, fp16=835.5, fp8=1670.5),
    _peak(r"\bH100", "H100 SXM", "sm90", 3350, "H100", **_HOPPER),
    _peak(r"\bH800", "H800 SXM", "sm90", 3350, "H100", **{**_HOPPER, "fp64": 1}),
    _peak(r"A100.*PCIE-80GB|A100 80GB PCIe", "A100 80GB PCIe", "sm80", 1935, "A100", **_AMPERE),
    _peak(r"A100.*80GB", "A100 80GB SXM", "sm80", 2039, "A100", **_AMPERE),
    _peak(r"\bA100|A800", "A100 40GB", "sm80", 1555, "A100", **_AMPERE),
    _peak(r"\bA30\b", "A30", "sm80", 933, "A30", fp64=5.2, fp32=10.3, tf32=82, fp16=165, int8=330),
    _peak(r"\bA10\b", "A10", "sm86", 600, "A10", fp32=31.2, tf32=62.5, fp16=125, int8=250),
    _peak(r"\bA40\b", "A40", "sm86", 696, "A40", fp32=37.4, tf32=74.8, fp16=149.7, int8=299.3),
    _peak(r"RTX A6000", "RTX A6000", "sm86", 768, "RTX A6000", fp32=38.7, tf32=77.4, fp16=154.8),
    _peak(r"RTX 6000 Ada", "RTX 6000 Ada", "sm89", 960, "RTX 6000 Ada", fp32=91.1, tf32=182.1, fp16=364.2),
    _peak(r"\bL40S", "L40S", "sm89", 864, "L40S", fp32=91.6, tf32=183, fp16=362, fp8=733, int8=733),
    _peak(r"\bL4\b", "L4", "sm89", 300, "L4", fp32=30.3, tf32=60, fp16=121, fp8=242, int8=242),
    _peak(r"RTX 5090", "RTX 5090", "sm120", 1792, "Blackwell whitepaper", fp32=104.8, tf32=104.8, fp16=209.5),
    _peak(r"RTX 4090", "RTX 4090", "sm89", 1008, "Ada whitepaper", fp32=82.6, tf32=82.6, fp16=165.2),
    _peak(r"RTX 3090(?! Ti)", "RTX 3090", "sm86", 936, "Ampere whitepaper", fp32=35.6, tf32=35.6, fp16=71),
    _peak(r"RTX 2080 Ti", "RTX 2080 Ti", "sm75", 616, "Turing whitepaper", fp32=13.4, fp16=53.8),
    _peak(r"\bT4\b", "T4", "sm75", 320, "T4", fp32=8.1, fp16=65, int8=130),
    _peak(r"V100S", "V100S PCIe", "sm70", 1134, "V100S", fp64=8.2, fp32=16.4, fp16=130),
    _peak(r"V100-PCIE", "V100 PCIe", "sm70", 900, "V100", fp64=7, fp32=14, fp16=112),
    _peak(r"V100", "V100 SXM2", "sm70", 900, "V100", **_VOLTA),
    _peak(r"MI355X", "MI355X", "gfx950", 8000, "MI355X", fp64=78.6, fp32=157.3, fp16=2516.6, fp8=5033.2),
    _peak(r"MI350X", "MI350X", "gfx950", 8000, "MI350X", fp64=72.1, fp32=144.2, fp16=2306.9, fp8=4613.7),
    _peak(r"MI325X", "MI325X", "gfx942", 6000, "MI325X", **_CDNA3),
    _peak(r"MI300X", "MI300X", "gfx942", 5300, "MI300X", **_CDNA3),
    _peak(
        r"MI300A", "MI300A", "gfx942", 5300, "MI300A", fp64=61.3, fp32=122.6, tf32=490.3, fp16=980.6, fp8=1961.2
    ),
    _peak(r"MI250X", "MI250X die", "gfx90a", 1638, "MI250X", fp64=23.9, fp32=23.9, fp16=191.5),
    _peak(r"MI250", "MI250 die", "gfx90a", 1638, "MI250", fp64=22.6, fp32=22.6, fp16=181),
    _peak(r"MI210", "MI210", "gfx90a", 1638, "MI210", fp64=22.6, fp32=22.6, fp16=181, int8=181),
)

PRODUCTS: tuple[GpuPeak, ...] = tuple(peak for _, peak in _PEAKS)
"""All GPUs whose peaks are known."""


@lru_cache(64)
def peak_of(device_name: str) -> GpuPeak | None:
    """Return the peaks of the GPU with this name, as CUDA or HIP reports it; None if they are not known."""
    return next((peak for pattern, peak in _PEAKS if pattern.search(device_name)), None)


def peak_of_trace(trace: Trace) -> GpuPeak | None:
    """Return the peaks of the GPUs of a trace; None if they are not known, or not alike."""
    names = {device.name for device in trace.devices}
    return peak_of(names.pop()) if len(names) == 1 else None


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
    peak: GpuPeak | None
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
    peak = peak_of_trace(trace)
    kernel = gpu.category == KERNEL
    of_ns = int(gpu.duration_ns[kernel].sum())
    rows, works, which = _priced(operators)
    call = _call_of_work(gpu, operators, rows)
    launched = np.flatnonzero((call >= 0) & kernel)
    tf32 = np.zeros(len(rows), np.int64)
    tf32[call[launched[gpu.matching("name", _TF32)[launched]]]] = 1
    groups, of_call = distinct(which, tf32)
    of_work = np.full(len(gpu), -1)
    of_work[launched] = of_call[call[launched]]
    sums = sum_by_group(gpu.duration_ns[launched], of_work[launched], len(groups))
    calls = np.unique(call[launched])
    result = {}
    for group in np.unique(of_call[calls]).tolist():
        mine = rows[calls[of_call[calls] == group]]
        name, one = operators.strings[operators.name[mine[0]]], groups[group]
        result[group] = _row(name, works[which[one]], mine, int(sums[group]), bool(tf32[one]), peak)
    order = sorted(result, key=lambda group: (-result[group].gpu_ns, result[group].name, result[group].work.sizes))
    place = np.full(len(groups) + 1, -1)
    place[order] = np.arange(len(order))
    heavy = [row for row in result.values() if row.work.kind in HEAVY]
    covered_ns = int(gpu.duration_ns[of_work >= 0].sum())
    again = _recomputed(operators)
    calls_again = [(row, int(again[row.rows].sum())) for row in heavy]
    useful, recomputed = _work_at_peak([(row, row.calls) for row in heavy], peak), _work_at_peak(calls_again, peak)
    rows_in_order = [result[group] for group in order]
    return Roofline(rows_in_order, covered_ns, of_ns, peak, *useful, *recomputed, place[of_work])


def counted_calls(trace: Trace) -> Array:
    """Return the rows of the operators that the roofline counts: those with known work that launched GPU work."""
    rows, _, _ = _priced(trace.operators)
    call = _call_of_work(trace.gpu, trace.operators, rows)
    counted: Array = rows[np.unique(call[call >= 0])]
    return counted


def _row(name: str, work: Work, rows: Array, gpu_ns: int, tf32: bool, peak: GpuPeak | None) -> RooflineRow:
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


def _work_at_peak(calls: list[tuple[RooflineRow, int]], peak: GpuPeak | None) -> tuple[int, float | None]:
    """Return the operations of so many calls, and how long they would take at the peak of their types."""
    flops = sum(row.work.flops * count for row, count in calls)
    if peak is None or any(row.kind not in peak.flops_per_s for row, _ in calls):
        return flops, None
    return flops, math.fsum(1e9 * row.work.flops * count / peak.flops_per_s[row.kind] for row, count in calls)


def _recomputed(operators: Table) -> Array:
    """Return a mask of the operators of a forward pass that the backward pass runs again.

    They are inside a node of autograd's engine, and are either operators that no gradient uses, or inside one.
    """
    engine = np.flatnonzero(operators.matching("name", _ENGINE))
    forward = np.flatnonzero(one_of(operators, "name", _FORWARD))
    return np.logical_and(inside_rows(engine, operators.parent), inside_rows(forward, operators.parent))


def _priced(operators: Table) -> tuple[Array, list[Work], Array]:
    """Return the rows of the calls that count, the distinct works, and the index of the work of each call."""
    strings = operators.strings
    keys = np.stack((operators.name, operators.shapes, operators.types, operators.scalars), axis=1)
    with_shapes = np.flatnonzero(operators.shapes)
    backward = with_shapes[one_of(operators, "name", (BACKWARD,))[with_shapes]]
    results = results_of(strings[shapes] for shapes in np.unique(operators.shapes[backward]).tolist())
    work_of = partial(operator_work, results=results)
    works, of_row = distinct_values(keys[with_shapes], lambda *codes: work_of(*(strings[code] for code in codes)))
    rows, of_row = with_shapes[of_row >= 0], of_row[of_row >= 0]
    heavy = np.array([work.kind in HEAVY for work in works], bool)
    counts = _innermost(rows, heavy[of_row] if len(rows) else np.zeros(0, bool), operators.parent)
    return rows[counts], works, of_row[counts]


def _innermost(rows: Array, heavy: Array, parents: Array) -> Array:
    """Return a mask of the rows that count: heavy ones without a heavy one inside, others outside of those."""
    calls_heavy, calls_another = (rows_with_inner(chosen, parents)[rows] for chosen in (rows[heavy], rows))
    in_heavy = inside_rows(rows[heavy], parents)[rows]
    return np.where(heavy, ~calls_heavy, ~in_heavy & ~calls_another)


def _call_of_work(gpu: Table, operators: Table, rows: Array) -> Array:
    """Return for each row of the GPU work the index in ``rows`` of the call that launched it, or -1."""
    number = np.full(len(operators), -1)
    number[rows] = np.arange(len(rows))
    result = np.full(len(gpu), -1)
    for work, above in ancestor_levels(gpu.operator, operators.parent):
        unknown = result[work] < 0
        result[work[unknown]] = number[above[unknown]]
    return result
