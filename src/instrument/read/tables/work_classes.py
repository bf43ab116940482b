"""Classifies GPU work: on which GPU it ran, whether it communicates, and the class and name in charts."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from .table import KERNEL, MEMCPY, Array, Table


def gpu_numbers(gpu: Table) -> Array:
    """Return the GPU of each row; -1 for rows that do not name it, unless the trace has only one GPU."""
    numbered = np.unique(gpu.device[gpu.device >= 0])
    return np.where(gpu.device >= 0, gpu.device, numbered[0] if len(numbered) == 1 else -1)


def count_gpus(gpu: Table) -> int:
    """Return the number of GPUs with work; work of unknown GPUs counts as one GPU if no other is known."""
    numbers = np.unique(gpu_numbers(gpu))
    return int((numbers >= 0).sum()) or len(numbers)


FAMILIES = {
    "NCCL, RCCL": r"nccl|rccl",
    "NVSHMEM, rocSHMEM": r"nvshmem|roc_?shmem",
    "MSCCL, MSCCL++": r"msccl",
    # dispatch, combine, notify and barrier; kernels that only plan these compute
    "DeepEP": r"(?:inter|intra)node(?:_ll)?(?:::|\d+)(?!get_)\w*(?:dispatch|combine|notify|barrier)",
    "MoRI": r"ep(?:dispatch|combine)(?:inter|intra)node",
    # of vLLM, SGLang, TensorRT-LLM, FlashInfer, aiter and torch's symmetric memory; operations of one warp or
    # thread block are parts of other kernels
    "all-reduce and the like": r"(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?<!index_)"
    r"(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    "custom all-reduce": r"cross_device_(?:reduce|store|load)",
    "symmetric memory": r"symm(?:etric)?_?mem|multimem_|(?:put|wait)_signal",
    "oneCCL, HCCL": r"oneccl|hccl",
    "pplx": r"a2a_kernels",
    "Transformer Engine": r"userbuffers",
}
"""Names of kernels that communicate, as regular expressions of names in lower case."""

# Inductor names fused kernels after the operators around them; FSDP's copies only rearrange tensors.
_COMPUTE_NAMES = re.compile(r"^triton_(?:poi|red|per|tem|for|mm)_|copy_(?:in|out)")
_AUTO = re.compile("|".join(FAMILIES.values()))
_SEARCHED = 2048  # characters of a name

Collectives = str | re.Pattern[str]
"""Which kernels communicate: "auto", or a regular expression that is searched in their names."""


def communication_mask(gpu: Table, collectives: Collectives = "auto") -> Array:
    """Return a mask of the kernels that communicate.

    Args:
        gpu: the GPU work.
        collectives: a regular expression that is searched in the names of kernels; text ignores case. "auto"
            selects the kernels of `FAMILIES` and those that the trace marks as collectives.

    Raises:
        ValueError: ``collectives`` is not a regular expression.
    """
    pattern = compile_collectives(collectives)
    if pattern == "auto":
        named = [code for code in np.unique(gpu.name).tolist() if communicates(gpu.strings[code])]
        mask: Array = np.isin(gpu.name, named) | (gpu.collective != 0)
    else:
        mask = gpu.matching("name", pattern)
    mask &= gpu.category == KERNEL
    return mask


@lru_cache(4096)
def communicates(name: str) -> bool:
    """Return whether a kernel with this name communicates."""
    text = name[:_SEARCHED].lower()  # a regular expression that ignores case takes six times as long
    return bool(_AUTO.search(text)) and not _COMPUTE_NAMES.search(text)


def compile_collectives(collectives: Collectives) -> Collectives:
    """Return "auto" or a compiled pattern unchanged, and other text as a pattern that ignores case.

    Raises:
        ValueError: the text is not a regular expression.
    """
    if collectives == "auto" or (isinstance(collectives, re.Pattern) and isinstance(collectives.pattern, str)):
        return collectives
    try:
        pattern = re.compile(collectives, re.IGNORECASE)
    except (re.error, TypeError, ValueError) as error:
        raise ValueError(
            f'"collectives" must be "auto" or a regular expression: {collectives!r} ({error})'
        ) from None
    if not collectives:
        raise ValueError(
            f'"collectives" must be "auto" or a regular expression that is not empty: {collectives!r}'
        )
    return pattern


CLASSES = ("compute", "communication", "copies")
"""The classes: kernels and memsets, kernels that communicate, memcpys."""


def work_names(gpu: Table) -> Array:
    """Return the numbers of the names of GPU work: the short ones of kernels."""
    return np.where(gpu.short_name > 0, gpu.short_name, gpu.name)


def work_classes(gpu: Table, communication: Array) -> Array:
    """Return the index in `CLASSES` of each GPU work.

    Args:
        gpu: the work.
        communication: a mask of the work that communicates.
    """
    return np.where(gpu.category == MEMCPY, 2, communication.astype(np.int64))
