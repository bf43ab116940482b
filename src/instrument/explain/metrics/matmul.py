"""Matmuls: their shapes, operations, bytes and throughput, and which kernels run on matrix units."""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...read.tables.nest import rows_with_inner
from ...read.tables.table import KERNEL, Array, Table
from .groups import GroupedEvents, ancestor_pairs, distinct_values, sum_by_group
from .utilization import ratio

VENDORS = {
    "any": (
        r"tensorop|TensorOp",
        # attention, without kernels that prepare the backward pass, convert its result or combine parts
        r"flash_fwd_(?!splitkv_combine)|flash_bwd_(?!dot_do_o|convert)|compute_attn_ws",
        r"FlashAttn(?:Fwd|Bwd)(?!P)|fmha_(?:fwd|bwd|v2)|Fmha\w*Kernel",
        r"mxfp4|mxfp8",
    ),
    "NVIDIA": (
        r"hmma|imma|qmma|wgmma|gmma|_wmma_",
        # s884, h1688, i8816, bf16_s16816, sm90's s64x128x16: the shape of one instruction, then the operation
        r"[a-z](?:884|1688|8816|16816|16832|161616)(?:gemm|cudnn|fprop|dgrad|wgrad|_)",
        r"tensor(?:8x8x4|16x8x8|16x8x16|16x8x32)",
        # cuBLAS and cuDNN since Ampere, without the kernels that multiply on the ordinary units
        r"xmma_(?!.*(?:simt|ffma|dfma))|nvjet_",
        r"fmha_cutlass\w*_(?:f16|bf16)|cudnn_generated_fort_native_sdpa",
        r"fp8\w*::GemmKernel|deep_gemm::|fp8_gemm|nvfp4",
    ),
    "AMD": (
        r"mfma|WmmaCshuffle",
        # Tensile's matrix instruction (MI16x16x16), MIOpen's gtc
        r"Cijk_\w*_MI\d+x\d+|igemm_(?:fwd|bwd|wrw)_gtcx",
        # composable kernel, demangled or mangled, without its kernels of dot products (dl)
        r"xdlops|_xdl_|(?:\bck(?:_tile)?::|N2ck|N7ck_tile)(?!.*(?:_dl_|GemmDl)).*?(?:[Gg]emm|[Cc]onv(?!ert)|Fmha|Attn)",
        r"aiter\w*gemm",
    ),
    "Intel": (r"dpas|_xmx_",),
}
"""Names of kernels that run on matrix units, as regular expressions, by the vendor of the units."""

MATRIX_UNITS = re.compile("|".join(pattern for patterns in VENDORS.values() for pattern in patterns))
"""What is found in the name of a kernel that runs on matrix units."""


def on_matrix_units(gpu: Table) -> Array:
    """Return a mask of the kernels whose names show that they run on matrix units; Triton's names seldom do."""
    mask: Array = (gpu.category == KERNEL) & gpu.matching("name", MATRIX_UNITS)
    return mask


_INPUTS: dict[str, tuple[int, int, int | None]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_int_mm", "aten::matmul"), (0, 1, None)),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"), (1, 2, 0)),
    "aten::_addmm_activation": (1, 2, 0),
    "aten::linear": (0, 1, 2),
}
"""The positions of both factors, and of the input that is added to the result."""

_DIMENSIONS = {name: 3 if "bmm" in name else 2 for name in _INPUTS if name not in ("aten::matmul", "aten::linear")}
"""The dimensions of both factors, of operators that take no others."""

_ORDER = ("name", "batch", "m", "n", "k", "dtype")  # of matmuls that take equally long
_LARGEST = 1 << 48  # elements along one dimension

_OTHER_RESULT = {"aten::_scaled_mm", "aten::_int_mm"}
"""Operators whose result has another type than the factors; the trace does not say which."""

_SIZES = {
    **dict.fromkeys(("signed char", "unsigned char", "bool", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fnuz", "c10::Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long", "long int", "c10::complex<float>"), 8),
    "c10::complex<double>": 16,
}
"""Bytes per element by type, as torch.profiler names the types."""


_TILE = re.compile(r"(?<![\dx])(\d{1,3})x(\d{1,3})(?![\d])")


class Matmul(NamedTuple):
    """A batch of matmuls of an m x k by a k x n matrix; `bytes` is None if a type is unknown."""

    name: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    flops: int
    bytes: int | None


def matmul_table(operators: Table, gpu: Table, work: GroupedEvents) -> list[dict[str, Any]]:
    """Return the matmuls by operator, shapes and type, the longest on the GPU first.

    ``flops`` is 2*m*n*k for each matrix of the batch in one call; ``bytes`` counts each input and the result once.
    ``gpu_ns`` adds up the GPU work under ``gpu_calls`` of the ``calls``, and ``flops_per_s`` is their throughput.
    An operator that calls another matmul is excluded.
    """
    rows, matmuls, which = _matmuls(operators)
    number = np.full(len(operators), -1)
    number[rows] = np.arange(len(rows))
    pairs = ((launched, number[above]) for launched, above in ancestor_pairs(gpu.operator, operators.parent))
    done = work.totals(((launched[of >= 0], of[of >= 0]) for launched, of in pairs), len(rows))
    calls = sum_by_group(np.ones_like(which), which, len(matmuls)).tolist()
    gpu_calls = sum_by_group(done.count > 0, which, len(matmuls)).tolist()
    gpu_ns = sum_by_group(done.sum, which, len(matmuls)).tolist()
    found = [
        matmul._asdict()
        | {
            "calls": calls[place],
            "gpu_calls": gpu_calls[place],
            "gpu_ns": gpu_ns[place],
            "flops_per_s": ratio(matmul.flops * gpu_calls[place] * 1e9, gpu_ns[place]),
        }
        for place, matmul in enumerate(matmuls)
    ]
    return sorted(found, key=lambda row: (-row["gpu_ns"], *(row[name] for name in _ORDER)))


def _matmuls(operators: Table) -> tuple[Array, list[Matmul], Array]:
    """Return the rows of the calls, the distinct matmuls, and the index of the matmul of each call."""
    rows, strings = innermost_matmuls(operators), operators.strings
    keys = np.stack((operators.name[rows], operators.shapes[rows], operators.types[rows]), axis=1)
    matmuls, which = distinct_values(keys, lambda *codes: matmul_of(*(strings[code] for code in codes)))
    return rows[which >= 0], matmuls, which[which >= 0]


def tile_of(kernel: str) -> tuple[int, int] | None:
    """Return the rows and columns of the result that a block computes, by the name of its kernel."""
    found = _TILE.search(kernel)
    return (int(found[1]), int(found[2])) if found else None


def sizes_of(dims: Any) -> tuple[int, ...]:
    """Return the sizes of a tensor as a trace gives them.

    Raises:
        ValueError: one of them is not an integer that a tensor can have.
    """
    sizes = tuple(dims)
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in sizes):
        raise ValueError(f"not the sizes of a tensor: {dims!r:.100}")
    return sizes


def element_size(kind: str) -> int | None:
    """Return the bytes per element of a type as torch.profiler names it; None if it is unknown."""
    return _SIZES.get(kind)


def matmul_rows(operators: Table) -> Array:
    """Return the rows of all matmuls."""
    names = np.array([word in _INPUTS for word in operators.strings], bool)
    return np.flatnonzero(names[operators.name])


def innermost_matmuls(operators: Table) -> Array:
    """Return the rows of the matmuls that call no other matmul, which are those that count."""
    rows = matmul_rows(operators)
    return rows[~rows_with_inner(rows, operators.parent)[rows]]


def matmul_of(name: str, shapes: str, types: str) -> Matmul | None:
    """Return what a call computes; None if the trace does not say, or its shapes do not fit."""
    try:
        dims, kinds = json.loads(shapes), json.loads(types or "[]")
        one, two, added = _INPUTS[name]
        first, second = sizes_of(dims[one]), list(sizes_of(dims[two]))
        if name == "aten::linear":
            second[-2:] = second[:-3:-1]
        if name in _DIMENSIONS and not len(first) == len(second) == _DIMENSIONS[name]:
            return None
        m, k = first[-2] if len(first) > 1 else 1, first[-1]
        rows, n = (second[-2], second[-1]) if len(second) > 1 else (second[0], 1)
        batch = prod(np.broadcast_shapes(tuple(first[:-2]), tuple(second[:-2])))
        if rows != k:
            return None
        kind_of = [str(kinds[place]) if place < len(kinds) else "" for place in (one, two)]
        extra = prod(sizes_of(dims[added])) if added is not None and len(dims) > added and dims[added] else 0
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError):
        return None
    left, right = (element_size(kind) for kind in kind_of)
    moved = None
    if left and right and name not in _OTHER_RESULT:
        moved = prod(first) * left + prod(second) * right + (extra + batch * m * n) * left
    return Matmul(name, batch, m, n, k, kind_of[0], 2 * batch * m * n * k, moved)
