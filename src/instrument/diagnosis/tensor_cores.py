"""Recognizes kernels that run on matrix units: NVIDIA's Tensor Cores, AMD's matrix cores, Intel's XMX."""

from __future__ import annotations

import re

from ..traces.table import KERNEL, Array, Table

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
