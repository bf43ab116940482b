"""Which kernels communicate between GPUs, and how well what they do is hidden."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..traces.intervals import Intervals, covered
from ..traces.table import KERNEL, Array, Table
from .activity import ratio
from .groups import sums

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

_BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int", "int32"), 4),
    **dict.fromkeys(("double", "long", "int64", "complexfloat"), 8),
    "complexdouble": 16,
}
"""Bytes an element, by the names of types, in small letters, that torch.profiler gives collectives."""


Collectives = str | re.Pattern[str]
"""Which kernels communicate: "auto", or a regular expression that is found in their names."""


def communicates(gpu: Table, collectives: Collectives = "auto") -> Array:
    """Return a mask of the kernels that communicate.

    Args:
        gpu: the work on the GPU.
        collectives: a regular expression that is found in the names of such kernels; text ignores case. "auto"
            takes the kernels of `FAMILIES` and those that the trace says belong to a collective.

    Raises:
        ValueError: if ``collectives`` is no regular expression.
    """
    mask: Array
    pattern = compiled(collectives)
    mask = _auto(gpu) if pattern == "auto" else gpu.matching("name", pattern)
    mask &= gpu.category == KERNEL
    return mask


def _auto(gpu: Table) -> Array:
    named: Array = gpu.matching("name", _AUTO) & ~gpu.matching("name", _COMPUTES)
    named |= gpu.collective != 0
    return named


def compiled(collectives: Collectives) -> Collectives:
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


def collective_table(gpu: Table, mask: Array, compute: Intervals) -> list[dict[str, Any]]:
    """Return the kernels that communicate, by collective (or kernel name), process group and type.

    ``exposed_ns`` is the time of each kernel at which nothing computes, added up: kernels that communicate at
    the same time count each. ``bytes`` are those of the larger of input and output, as in nccl-tests.
    """
    part, words = gpu.where(mask), gpu.words
    label = np.where(part.collective != 0, part.collective, part.name)
    keys, which = np.unique(np.stack((label, part.group, part.dtype), axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    exposed = part.duration_ns - covered(compute, part.start_ns, part.end_ns)
    elements = np.maximum(part.elements_in, part.elements_out)
    rows = []
    columns = (np.ones_like(which), elements, elements < 0, part.duration_ns, exposed)
    totals = zip(*(sums(column, which, len(keys)).tolist() for column in columns), strict=True)
    for (name, group, dtype), (count, size, unknown, duration, alone) in zip(keys.tolist(), totals, strict=True):
        each = _BYTES.get(words[dtype].lower())
        total = None if each is None or unknown else size * each
        rows.append(
            {
                "name": words[name],
                "group": words[group],
                "dtype": words[dtype],
                "count": count,
                "bytes": total,
                "sum_ns": duration,
                "exposed_ns": alone,
                "bytes_per_s": None if total is None else ratio(total * 1e9, duration),
            }
        )
    return sorted(rows, key=lambda row: -row["sum_ns"])
