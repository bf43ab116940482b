"""The families of kernels, and which one a kernel belongs to by its name."""

from __future__ import annotations

import re
from functools import lru_cache

from .kernel_names import parse

FAMILIES = (
    "gemm", "attention", "convolution", "normalization", "softmax", "reduction", "elementwise", "copy", "fill",
    "index", "sort", "random", "optimizer", "recurrent", "resample", "collective", "other", "memcpy", "memset",
)  # fmt: skip
"""All families; the last two are no kernels.

"copy" are kernels that copy, convert or concatenate; "fill" those that write one value; "index" gathers, scatters
and embeddings; "sort" also scans; "optimizer" the kernels over lists of tensors, as of optimizers and of clipping;
"resample" pooling and interpolation.
"""

_BY_NAME = tuple((family, re.compile(pattern)) for family, pattern in (
    ("collective", r"^nccl"),
    ("attention", r"fmha|flash_(?:fwd|bwd)|[Ff]lash[Aa]tt|sdpa|_attn_|[Aa]ttention"),
    ("convolution", r"fprop|dgrad|wgrad|winograd|convol|_conv\d?d?_|im2col|col2im|vol2col|col2vol|conv_depthwise"),
    ("gemm", r"gemm|gemv|bmm_outer|nvjet|splitK|Sdot|Ddot|dot_kernel|cublas\w*dot|trsm|syrk"),
    ("optimizer", r"multi_tensor_apply|^foreach|amp_update_scale|lpnorm_cleanup"),
    ("normalization", r"norm_|Norm|_norm|RowwiseMoments|GammaBeta|ComputeFusedParams|ComputeInternalGradients"
                      r"|ComputeBackwardFusedParams|^bn_|batchnorm"),
    ("softmax", r"[Ss]oft[Mm]ax"),
    ("recurrent", r"lstm_|gru_|LSTM|GRU|RNN|rnn"),
    ("random", r"distribution|dropout|Random|random|philox|multinomial|bernoulli|randperm"),
    ("index", r"[Gg]ather|[Ss]catter|[Ii]ndex(?!_kernel_impl)|embedding|EmbeddingBag|take|put_|masked_fill_"
              r"|krn_partial|compute_grad_weight|sum_and_scatter|write_num_of_segments|compute_num_of_partial"
              r"|^flip|^roll|repeat_interleave"),
    ("copy", r"CatArray|direct_copy|copy_kernel|bfloat16_copy|float16_copy|convert"),
    ("sort", r"[Ss]ort|[Ss]can|[Tt]op[Kk]|[Uu]nique|Merge|kthvalue|median|mode|histogram|cumul|searchsorted"
             r"|bucketize|DeviceSelect|DeviceRadix|DevicePartition|DeviceCompact|calc_block_sums|compute_agg|flag_kernel"
             r"|write_indices|write_fill_value"),
    ("resample", r"pool|upsample|interpol|grid_sampl|[Aa]daptive_?(?:average|max)"),
    ("reduction", r"reduce|Reduce|reduction|nll_loss|cross_entropy|ctc_loss|[Mm]argin"),
))  # fmt: skip
_FILL = re.compile(r"^elementwise: (?:fill|Fill)|FillFunctor")
_COPY = re.compile(r"^elementwise: (?:direct_copy|copy(?!sign)|float16_copy|bfloat16_copy|float8_copy)")
_ELEMENTWISE = re.compile(
    r"^elementwise|elementwise_kernel|^triton_poi|pointwise|_vectorized\d_kernel$|^(?:gcd|lcm|i0e?|i1e?|digamma|trigamma"
    r"|polygamma|lgamma|sinc|exp2|zeta|entr|erfcx|ndtri|log_ndtr|airy_ai|bessel|glu_backward|cross|rrelu)\w*kernel"
    r"|re(?:flec|plica)tion_pad|triu_tril|tri[lu]_indices"
)


@lru_cache(4096)
def family_of(kernel: str) -> str:
    """Return the family of a kernel, by its full name as a profiler wrote it."""
    parsed = parse(kernel)
    if parsed.short.startswith("elementwise: "):
        operation = parsed.short.removeprefix("elementwise: ")
        if _FILL.search(parsed.short):
            return "fill"
        if _COPY.search(parsed.short):
            return "copy"
        named = _first(operation) if parsed.base in _NOT_PLAIN else ""
        return named or "elementwise"
    if parsed.base == "reduce_kernel":
        return "reduction"
    return (
        _first(parsed.base)
        or _first(parsed.short)
        or ("elementwise" if _ELEMENTWISE.search(parsed.base) else "other")
    )


_NOT_PLAIN = frozenset(("index_elementwise_kernel", "_scatter_gather_elementwise_kernel"))


def _first(name: str) -> str:
    return next((family for family, pattern in _BY_NAME if pattern.search(name)), "")
