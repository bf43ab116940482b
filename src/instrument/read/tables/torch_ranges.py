"""Recognizes operators of PyTorch among named ranges: those of `emit_nvtx`, and of NVIDIA's pyprof."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .table import Array, Strings

# What torch appends to the name of an operator or a record_function: getNvtxStr in torch/csrc/profiler/util.cpp.
_BEGIN = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = ")
_SUFFIX = re.compile(
    r"(?:, seq = (?P<seq>\d{1,18}))?(?P<id>, op_id = \d+)?(?:, sizes = (?P<sizes>\[[\d\[\], ]*\]))?"
    r"(?:, input_op_ids = \[.*\])?"
)
# A record_function of a program may have "::" in its name as well: FSDP's begin with a capital.
_OPERATOR = re.compile(r"[a-z_]\w*::[\w.]+|autograd::engine::.*|torch::autograd::.*|record_param_comms|detach_?")
_ALWAYS = re.compile(r"aten::[\w.]+|autograd::engine::evaluate_function: .*")
_MAX_TEXT = 1 << 16  # characters of a range of pyprof


class _Range(NamedTuple):
    """What the text of a range says; ``operator`` tells operators from regions."""

    name: str
    operator: bool
    sequence: int = -1
    shapes: str = ""
    types: str = ""
    payload: str = ""


def split_off_operators(columns: dict[str, dict[str, Array]], strings: Strings) -> None:
    """Move operators out of the regions, and shorten the names of regions that torch or pyprof wrote.

    Args:
        columns: the columns of the tables, as `assemble` takes them; changed in place.
        strings: the numbers of the strings in the columns; new names are added.
    """
    regions = columns.get("regions")
    if regions is None or not len(regions["name"]):
        return
    codes, rows = np.unique(regions["name"], return_inverse=True)
    texts = list(strings)
    found = {index: said for index, code in enumerate(codes.tolist()) if (said := _range(texts[code]))}
    if not found:
        return

    def column(default: Array, value: Callable[[_Range], int]) -> Array:
        values = default.copy()
        for index, said in found.items():
            values[index] = value(said)
        spread: Array = values[rows]
        return spread

    nothing = np.zeros(len(codes), np.int64)
    regions["name"] = column(codes, lambda said: strings[said.name])
    payload = column(nothing, lambda said: strings[said.payload])
    regions["payload"] = np.where(payload, payload, regions.get("payload", 0))
    operator = column(nothing, lambda said: said.operator) > 0
    columns["operators"] = {
        name: regions[name][operator] for name in ("start_ns", "duration_ns", "name", "event", "thread")
    } | {
        "sequence": column(nothing - 1, lambda said: said.sequence)[operator],
        "shapes": column(nothing, lambda said: strings[said.shapes])[operator],
        "types": column(nothing, lambda said: strings[said.types])[operator],
    }
    columns["regions"] = {name: values[~operator] for name, values in regions.items()}


def _range(text: str) -> _Range | None:
    """Return what the text of a range says; None for a range that the program named."""
    if text.startswith("{'"):
        return _pyprof(text)
    begin = _BEGIN.search(text)
    if not begin:
        return _Range(text, True) if _ALWAYS.fullmatch(text) else None
    name, suffix = text[: begin.start()], _SUFFIX.fullmatch(text, begin.start())
    if not suffix or not (suffix["seq"] or suffix["id"]):
        return None
    operator = suffix["seq"] is not None or _OPERATOR.fullmatch(name) is not None
    return _Range(name, operator, int(suffix["seq"] or -1), suffix["sizes"] or "")


def _pyprof(text: str) -> _Range | None:
    """Return what a dictionary of pyprof says: an operator, a module, or the Python stack around them."""
    if len(text) > _MAX_TEXT:
        return None
    try:
        said = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    match said:
        case {"mod": str(module), "op": str(function), "args": list(arguments)}:
            tensors = [each for each in arguments if isinstance(each, dict) and "shape" in each]
            return _Range(
                f"{module}.{function}",
                True,
                shapes=_json([each["shape"] for each in tensors]),
                types=_json([each.get("dtype", "") for each in tensors]),
            )
        case {"mod": str(module), "strRepr": str(arguments)}:
            return _Range(f"{module}({arguments})", False)
        case {"traceMarker": [*_, str(line)]}:  # the innermost frame comes last
            return _Range(line.replace("\\", "/").rpartition("/")[2], False, payload=line)
    return None


def _json(value: Any) -> str:
    try:
        return json.dumps(value) if value else ""
    except (TypeError, ValueError, RecursionError):
        return ""
