"""Which suggestion suits a finding: by the operation, the line of a library that did it, and the cause."""

from __future__ import annotations

import re

from ..findings import Finding, Fix
from . import suggestions
from .suggestions import BY_OP

# The line of a library tells more than the operation that it did there
_BY_VIA = (
    ("torch/amp/grad_scaler.py", "get_scale", suggestions.SCALE),
    ("torch/amp/grad_scaler.py", "", suggestions.SCALER),
    ("torch/nn/utils/clip_grad.py", "", BY_OP["clip_grad_norm_"]),
    ("torch/nn/utils/rnn.py", "", suggestions.PACK),
    ("torch/distributions/", "", suggestions.VALIDATE),
    ("torch/testing/", "", suggestions.TESTING),
    ("torch/serialization.py", "save", BY_OP["save"]),
    ("torch/nn/init.py", "", suggestions.INIT),
)
_SAME = {
    "is_nonzero": "bool", "str": "print", "repr": "print", "array": "cpu", "numpy": "cpu", "asarray": "tensor",
    "as_tensor": "tensor", "from_numpy": "tensor", "argwhere": "nonzero", "inverse": "inv", "dumps": "save",
    "dump": "save", "reduce_ex": "save", "complex": "float", "pickle": "save", "get_total_norm": "clip_grad_norm_",
}  # fmt: skip
_BY_DIRECTION = {
    None: Fix("Move it out of the step; where it must stay, instrument.allow_sync says why."),
    "H2D": suggestions.TO_GPU,
    "D2H": BY_OP["cpu"],
}


_GUARDS = re.compile(r"\bis(nan|inf|finite)\b")
_CREATES = re.compile(
    r"\btorch\.(?:zeros|ones|full|empty|eye|arange|linspace|rand|randn|randint|randperm)\([^()]*\)\.(?:to|cuda)\("
)


def fix_of(found: Finding) -> Fix:
    """Return what to write instead of ``found``."""
    via = f"/{found.via.file}".replace("\\", "/") if found.via else ""
    for path, function, fix in _BY_VIA:
        if f"/{path}" in via and found.via and function in found.via.function:
            return fix
    if "/site-packages/" in via and "/site-packages/torch/" not in via and found.op not in ("to", "cuda"):
        return suggestions.LIBRARY
    op = found.op if found.op in BY_OP else found.op.removeprefix("linalg_").strip("_")
    op = _SAME.get(op, op)
    return _by_cause(op, found) or BY_OP.get(op) or _BY_DIRECTION[found.direction]


def _by_cause(op: str, found: Finding) -> Fix | None:
    """Return the fix where the operation alone does not tell what is done."""
    cause, up = found.cause.lower().replace("-", "_"), found.direction == "H2D"
    code = found.site.code if found.site else ""
    if op == "bool" and _GUARDS.search(code):
        return suggestions.GUARD
    if op in ("to", "cuda") and up and _CREATES.search(code):
        return suggestions.CREATED
    if op in ("to", "cuda") and up and "from pinned" in cause:
        return suggestions.PINNED
    if op in ("to", "cuda", "pin_memory") and up:
        return suggestions.PAGEABLE if "non_blocking" in cause else suggestions.TO_GPU
    if op == "copy":
        return suggestions.FILL if up else suggestions.EMPTY
    if op == "setitem" and found.backward:  # of a mask that chose elements
        return BY_OP["getitem"]
    if op == "getitem":
        return suggestions.CPU_INDEX if up else suggestions.SLICE if "value" in cause else None
    if op == "where" and up:
        return suggestions.NUMBER
    if op == "setitem" and up:
        if "number" in cause:
            return suggestions.ELEMENT if "one element" in cause else suggestions.INDEX_FILL
        return suggestions.CPU_INDEX if "index" in cause else suggestions.FILL
    if op == "synchronize":
        kinds = {"event": suggestions.EVENT, "stream": suggestions.STREAM}
        return next((fix for word, fix in kinds.items() if word in cause), suggestions.DEVICE)
    return None
