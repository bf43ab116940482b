"""Recognizes kernels that run on matrix units: NVIDIA's Tensor Cores, AMD's matrix cores."""

from __future__ import annotations

import re

from ..traces.table import KERNEL, Array, Table

FAMILIES = {
    "instructions": r"hmma|imma|qmma|wgmma|gmma|mfma|_wmma_|tensorop|TensorOp",
    # s884, h1688, i8816, bf16_s16816, sm90's s64x128x16: the shape of one instruction, then the operation
    "shapes of instructions": r"[a-z](?:884|1688|8816|16816|16832|161616)(?:gemm|cudnn|fprop|dgrad|wgrad|_)"
    r"|tensor(?:8x8x4|16x8x8|16x8x16|16x8x32)",
    # cuBLAS and cuDNN since Ampere, without the kernels that multiply on the ordinary units
    "xmma": r"xmma_(?!.*(?:simt|ffma|dfma))",
    "cuBLAS nvjet": r"nvjet_",
    # without kernels that prepare the backward pass, convert its result or combine parts
    "attention": r"flash_fwd_(?!splitkv_combine)|flash_bwd_(?!dot_do_o|convert)|compute_attn_ws"
    r"|FlashAttn(?:Fwd|Bwd)(?!P)|fmha_(?:fwd|bwd|v2)|fmha_cutlass\w*_(?:f16|bf16)"
    r"|cudnn_generated_fort_native_sdpa|Fmha\w*Kernel",
    "8-bit floats": r"fp8\w*::GemmKernel|deep_gemm::|fp8_gemm|mxfp4|mxfp8|nvfp4",
    # Tensile's matrix instruction (MI16x16x16), MIOpen's gtc, composable kernel's xdl
    "AMD": r"Cijk_\w*_MI\d+x\d+|igemm_(?:fwd|bwd|wrw)_gtcx|xdlops|_xdl_|WmmaCshuffle",
}
"""Names of kernels that run on matrix units, as regular expressions."""

MATRIX_UNITS = re.compile("|".join(FAMILIES.values()))
"""What is found in the name of a kernel that runs on matrix units."""


def on_matrix_units(gpu: Table) -> Array:
    """Return a mask of the kernels whose names show that they run on matrix units; Triton's names seldom do."""
    mask: Array = (gpu.category == KERNEL) & gpu.matching("name", MATRIX_UNITS)
    return mask
