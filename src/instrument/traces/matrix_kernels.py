"""Short names for the kernels of matrix libraries: kind, architecture, type, tile, layout, alignment."""

from __future__ import annotations

import re

_SHORT = 32  # characters; names up to this length, such as "volta_sgemm_128x64_nt", are known as they are

_MATRIX = re.compile(r"gemm|nvjet|[sh]cudnn|fprop|dgrad|wgrad")
_CONVOLUTION = re.compile(r"(fprop|dgrad|wgrad|winograd)|[sh]cudnn|igemm_(fwd|bwd|wrw)")
_ARCHITECTURE = re.compile(r"sm_?(\d+)|cutlass_(\d+)_|(volta|turing|ampere|hopper|blackwell|maxwell)")
_GENERATIONS = {
    "maxwell": "sm50", "volta": "sm70", "turing": "sm75", "ampere": "sm80", "hopper": "sm90", "blackwell": "sm100",
}  # fmt: skip
_TILE = re.compile(r"(?:tilesize|_bt|_)(\d+x\d+(?:x\d+)?)(?:_(\d+)x\d+(?=_|$))?")
_LAYOUT = re.compile(r"_([nt]{2}|[NT]{3}|nhwc|nchw)(?:_|$)")
_ALIGNMENT = re.compile(r"_(align\d+)")

_NAMED_TYPE = re.compile(r"(?<![a-z])(bf16|fp?16|tf32|fp?32|fp?64|e4m3|e5m2|fp8|[is]8)")
_TF32 = re.compile(r"_s1688(?:gemm|fprop|dgrad|wgrad)")
_F16 = re.compile(r"_h\d+(?:gemm|fprop|dgrad|wgrad)")
_LETTER = re.compile(r"(?:^|_)([shdcz])(?:gemm|cudnn)")
_BLAS = {"s": "f32", "h": "f16", "d": "f64", "c": "c64", "z": "c128"}
_NVJET = {"t": "bf16", "h": "f16", "s": "f32", "d": "f64", "q": "fp8"}

_TENSILE = re.compile(r"Cijk_(\w+?_\w+?)_(I8|F8|[SDHB])\w*?_(MT\d+x\d+x\d+)")
_TENSILE_TYPES = {"S": "f32", "D": "f64", "H": "f16", "B": "bf16", "I8": "i8", "F8": "fp8"}


def matrix_kernel(base: str) -> str:
    """Return a short name such as "gemm sm90 bf16 128x256x64 tn", or "" for kernels of other kinds.

    The names are those of cuBLAS, cuDNN, CUTLASS, MIOpen and Tensile.

    Args:
        base: the name of a kernel without namespaces and template arguments.
    """
    if tensile := _TENSILE.match(base):
        return f"Cijk {tensile[1]} {tensile[3]} {_TENSILE_TYPES[tensile[2]]}"
    if len(base) <= _SHORT or base.startswith("triton_") or not _MATRIX.search(base):
        return ""
    convolution = _CONVOLUTION.search(base)
    words = ["conv", convolution[1] or convolution[2] or ""] if convolution else ["gemm"]
    architecture = _ARCHITECTURE.search(base)
    if base.startswith("nvjet"):
        words.append("nvjet")
    elif architecture:
        words.append(_GENERATIONS.get(architecture[3] or "", f"sm{architecture[1] or architecture[2]}"))
    words.append(_type(base))
    if tile := _TILE.search(base):
        depth = f"x{tile[2]}" if tile[2] and tile[1].count("x") == 1 else ""
        words.append(tile[1] + depth)
    words += [found[1] for found in (_LAYOUT.search(base), _ALIGNMENT.search(base)) if found]
    known = [word for word in words if word]
    return " ".join(known) if len(known) > 2 else ""


def _type(base: str) -> str:
    """Return the type of the inputs; "" if the name does not say."""
    if base.startswith("nvjet_"):
        return _NVJET.get(base[6:7], "")
    if found := _NAMED_TYPE.search(base):
        return "i8" if found[1] == "s8" else found[1].replace("fp", "f") if found[1] != "fp8" else "fp8"
    if _TF32.search(base):
        return "tf32"
    if _F16.search(base):
        return "f16"
    letter = _LETTER.search(base)
    return _BLAS[letter[1]] if letter else ""
