"""Which kernels communicate between GPUs."""

from __future__ import annotations

import re

from .table import KERNEL, Array, Table

FAMILIES = {
    "NCCL, RCCL": r"nccl|rccl",
    "NVSHMEM, rocSHMEM": r"nvshmem|roc_?shmem",
    "MSCCL, MSCCL++": r"msccl",
    # dispatch, combine, notify and barrier; what only plans them computes
    "DeepEP": r"(?:inter|intra)node(?:_ll)?(?:::|\d+)(?!get_)\w*(?:dispatch|combine|notify|barrier)",
    "MoRI": r"ep(?:dispatch|combine)(?:inter|intra)node",
    # of vLLM, SGLang, TensorRT-LLM, FlashInfer, aiter and torch's symmetric memory; those of one warp or
    # thread block are steps within a kernel
    "all-reduce and the like": r"(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?<!index_)"
    r"(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    "custom all-reduce": r"cross_device_(?:reduce|store|load)",
    "symmetric memory": r"symm(?:etric)?_?mem|multimem_|(?:put|wait)_signal",
    "oneCCL, HCCL": r"oneccl|hccl",
    "pplx": r"a2a_kernels",
    "Transformer Engine": r"userbuffers",
}
"""Names of kernels that communicate, as regular expressions that ignore case."""

# What Inductor fuses is named after the operators around it; FSDP's copies only lay tensors out.
_COMPUTES = re.compile(r"^triton_(?:poi|red|per|tem|for|mm)_|copy_(?:in|out)", re.IGNORECASE)
_AUTO = re.compile("|".join(FAMILIES.values()), re.IGNORECASE)

Collectives = str | re.Pattern[str]
"""Which kernels communicate: "auto", or a regular expression that is found in their names."""


def communication_mask(gpu: Table, collectives: Collectives = "auto") -> Array:
    """Return a mask of the kernels that communicate.

    Args:
        gpu: the work on the GPU.
        collectives: a regular expression that is found in the names of such kernels; text ignores case. "auto"
            takes the kernels of `FAMILIES` and those that the trace says belong to a collective.

    Raises:
        ValueError: if ``collectives`` is no regular expression.
    """
    mask: Array
    pattern = compile_collectives(collectives)
    mask = _auto(gpu) if pattern == "auto" else gpu.matching("name", pattern)
    mask &= gpu.category == KERNEL
    return mask


def _auto(gpu: Table) -> Array:
    named: Array = gpu.matching("name", _AUTO) & ~gpu.matching("name", _COMPUTES)
    named |= gpu.collective != 0
    return named


def compile_collectives(collectives: Collectives) -> Collectives:
    """Return "auto" as it is, and text as a regular expression that ignores case.

    Raises:
        ValueError: if it is none.
    """
    if collectives == "auto" or (isinstance(collectives, re.Pattern) and isinstance(collectives.pattern, str)):
        return collectives
    try:
        return re.compile(collectives, re.IGNORECASE)
    except (re.error, TypeError, ValueError) as error:
        raise ValueError(
            f'"collectives" must be "auto" or a regular expression: {collectives!r} ({error})'
        ) from None
