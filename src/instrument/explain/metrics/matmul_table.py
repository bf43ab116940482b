"""The table of matmuls of a trace: operators, sizes and throughput; which kernels run on matrix units."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...read.tables.nest import rows_with_inner
from ...read.tables.table import KERNEL, Array, Table
from .operator_work import INPUTS, matmul_of
from .tables import GroupedEvents, ancestor_pairs, distinct_values, one_of, sum_by_group
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


_ORDER = ("name", "batch", "m", "n", "k", "dtype")  # of matmuls that take equally long
_TILE = re.compile(r"(?<![\dx])(\d{1,3})x(\d{1,3})(?![\d])")


def matmul_table(operators: Table, gpu: Table, work: GroupedEvents) -> list[dict[str, Any]]:
    """Return the matmuls by operator, shapes and type, the longest on the GPU first.

    ``flops`` is 2*m*n*k for each matrix of the batch in one call; ``bytes`` counts each input and the result once.
    ``gpu_ns`` adds up the GPU work under ``gpu_calls`` of the ``calls``, and ``flops_per_s`` is their throughput.
    An operator that calls another matmul is excluded.
    """
    rows, strings = innermost_matmuls(operators), operators.strings
    keys = np.stack((operators.name[rows], operators.shapes[rows], operators.types[rows]), axis=1)
    matmuls, which = distinct_values(keys, lambda *codes: matmul_of(*(strings[code] for code in codes)))
    rows, which = rows[which >= 0], which[which >= 0]
    number = np.full(len(operators), -1)
    number[rows] = np.arange(len(rows))
    pairs = ((launched, number[above]) for launched, above in ancestor_pairs(gpu.operator, operators.parent))
    done = work.totals(((launched[of >= 0], of[of >= 0]) for launched, of in pairs), len(rows))
    calls = sum_by_group(np.ones_like(which), which, len(matmuls)).tolist()
    gpu_calls = sum_by_group(done.count > 0, which, len(matmuls)).tolist()
    gpu_ns = sum_by_group(done.sum, which, len(matmuls)).tolist()
    table = [
        matmul._asdict()
        | {
            "calls": calls[place],
            "gpu_calls": gpu_calls[place],
            "gpu_ns": gpu_ns[place],
            "flops_per_s": ratio(matmul.flops * gpu_calls[place] * 1e9, gpu_ns[place]),
        }
        for place, matmul in enumerate(matmuls)
    ]
    return sorted(table, key=lambda row: (-row["gpu_ns"], *(row[name] for name in _ORDER)))


def tile_of(kernel: str) -> tuple[int, int] | None:
    """Return the rows and columns of the result that a block computes, by the name of its kernel."""
    tile = _TILE.search(kernel)
    return (int(tile[1]), int(tile[2])) if tile else None


def matmul_rows(operators: Table) -> Array:
    """Return the rows of all matmuls."""
    return np.flatnonzero(one_of(operators, "name", INPUTS))


def innermost_matmuls(operators: Table) -> Array:
    """Return the rows of the matmuls that call no other matmul, which are those that count."""
    rows = matmul_rows(operators)
    return rows[~rows_with_inner(rows, operators.parent)[rows]]
