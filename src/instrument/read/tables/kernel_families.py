"""Sorts kernels into families, such as matmuls, softmax and copies, by their names."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from .kernel_names import KernelName, parse, short_names
from .table import KERNEL, Strings, Table
from .work_classes import communication_mask

FAMILIES = (
    "gemm", "attention", "convolution", "normalization", "softmax", "elementwise", "reduction", "copy",
    "optimizer", "embedding", "sort", "routing", "epilogue", "collective", "memory", "other",
)  # fmt: skip
"""The families. "sort" sorts, scans and selects; "routing" assigns tokens to experts; "epilogue" is what cuBLAS
and cuDNN run beside a matmul or convolution; "memory" is memcpys, memsets and the kernels that a driver runs for
them."""

_SEARCHED = 512  # characters of a name
_NAMES = 10_000  # distinct names that are parsed, at 0.1 ms each; real traces have hundreds

# The first that is found decides. Names are in lower case.
_PATTERNS = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("copy", r"reshape_and_cache"),
        # foreach kernels update parameters and clip gradients
        ("optimizer", r"foreach|multi_tensor|adam|adagrad|lamb_|(?:^|_)sgd"),
        ("attention", r"flash|fmha|attention|attn|sdpa|mha_(?:fwd|bwd)|bwd_kernel_fuse"),
        (
            "convolution",
            r"^conv |[sh]cudnn|conv(?!ert)|wgrad|dgrad|fprop|winograd|im2col|col2im|fft2d|bwd_(?:weight|data)"
            r"|igemm_(?:fwd|bwd|wrw)|compute\w*offsetskernel",
        ),
        (
            "gemm",
            r"(?<!fb)gemm|gemv|cijk_?|nvjet|matmul|splitk|dot_kernel|(?:^|_)fc-|reduce_1block|_moe_kernel",
        ),
        ("softmax", r"soft_?max"),
        ("reduction", r"lp_?norm|norm_two|vector_norm|pool"),
        ("normalization", r"norm(?!al)|(?:^|_)bn_(?:bw|fw)|(?:^|_)ln_(?:fwd|bwd)|gammabeta|welford"),
        ("elementwise", r"rotary|rope_|swiglu|silu|gelu|relu|dropout|distribution_elementwise"),
        (
            "embedding",
            r"embedding|index_?select|gather(?!topk)|scatter|^elementwise: index|index_(?:put|add)|indexfunc"
            r"|indexing_backward|compute_grad_weight|krn_partial|segment|bounds_check_ind|linearize_index"
            r"|offsets_range",
        ),
        (
            "reduction",
            r"reduce|(?:^|_|: )(?:sum|mean|arg_?max|arg_?min)|nll_?loss|nllcriterion|cross_entropy|m(?:ax|in)_dim",
        ),
        (
            "copy",
            r"copy|catarray|(?:^|::)cat\W|transpose|nchw|nhwc|permute|cast|(?:^|_)(?:roll|flip)_|to_dense"
            r"|transdata|tensormove",
        ),
        ("epilogue", r"scalepackedtensor|globalkernel"),
        (
            "elementwise",
            r"elementwise|-dtype_|subtensorop|(?:mul|add|sub|div|fill|oneslike|equal)aicore|transform_kernel",
        ),
        ("routing", r"routing|expert|moe_?(?:align|sort)|dispatch_layout|expand_to_fused|fused_mapping"),
        (
            "sort",
            r"(?:radix|merge|block|bitonic)_?sort|block_merge|devicescan|devicecompact|lookback_scan|top_?k"
            r"|partition_kernel|searchsorted|(?:^|_)unique",
        ),
        ("memory", r"^__amd_rocclr_"),
    )
)
# Inductor names a kernel after all operators around it: only its kind and few words say what it does.
_INDUCTOR = re.compile(r"triton_(poi|red|per|tem|for)_")
_INDUCTOR_COPY = re.compile(r"triton_poi_fused_(?:_?(?:to_copy|clone|cat|copy|view|permute|transpose|t)_)+\d+")
_INDUCTOR_NORM = re.compile(r"norm|rsqrt|var_mean")


@lru_cache(4096)
def family(name: KernelName) -> str:
    """Return the family of a kernel that does not communicate."""
    short = name.short[:_SEARCHED].lower()
    if kind := _INDUCTOR.match(short):
        return _inductor(kind[1], short)
    composed = ": " in short or short.startswith(("conv ", "gemm "))
    text = short if composed else f"{short} {name.base[:_SEARCHED].lower()}"
    return next((found for found, pattern in _PATTERNS if pattern.search(text)), "other")


def _inductor(kind: str, name: str) -> str:
    if kind in ("red", "per"):
        return "softmax" if "softmax" in name else "normalization" if _INDUCTOR_NORM.search(name) else "reduction"
    if kind == "tem":
        return "attention" if "attention" in name else "gemm"
    return "copy" if _INDUCTOR_COPY.fullmatch(name) else "elementwise"


def add_names(gpu: Table, strings: Strings, texts: list[str]) -> None:
    """Fill the columns ``short_name`` and ``family`` of GPU work, and append their strings to ``texts``."""
    codes, rows = np.unique(gpu.name, return_inverse=True)
    kernel = np.zeros(len(codes), bool)
    kernel[rows[gpu.category == KERNEL]] = True
    named = codes[kernel][:_NAMES].tolist()
    shorts = short_names(texts[code] for code in named)
    short, kind = codes.copy(), np.where(kernel, strings["other"], strings["memory"])
    at = np.searchsorted(codes, named)
    short[at] = [strings[shorts[texts[code]]] for code in named]
    kind[at] = [strings[family(parse(texts[code]))] for code in named]
    gpu.short_name[:], gpu.family[:] = short[rows], kind[rows]
    gpu.family[communication_mask(gpu)] = strings["collective"]
    texts.extend(list(strings)[len(texts) :])
