"""Reads the operators of traces with recorded shapes, and what their kernels took, for the table of a type."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from instrument.explain.metrics.matmul_table import tile_of
from instrument.forecast.ideal import Tile
from instrument.forecast.operations import MATMULS, Operation, Tensor, operation_of
from instrument.read.jobs.read import read_trace
from instrument.read.tables.table import KERNEL
from instrument.read.tables.trace import Trace

SOURCE = (
    "AMD-AGI/TraceLens (https://github.com/AMD-AGI/TraceLens, MIT), tests/traces/h100: torch.profiler's traces of "
    "BERT-small, Qwen1.5-0.5B and OWLv2-large in BF16"
)
GPU = "h100"
TRACES = ("tl_h100_bert_small", "tl_h100_qwen05b", "tl_h100_owlv2")

_TYPES = {
    "float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16", "long int": "int64",
    "int": "int32", "bool": "bool", "signed char": "int8", "unsigned char": "int8",
}  # fmt: skip
_SAME_SHAPE = frozenset(("_softmax", "native_layer_norm", "_flash_attention_forward"))


class Traced(NamedTuple):
    """An operator of a trace: the median of what its kernels took, in how many calls; ns."""

    operation: Operation
    ns: float
    calls: int
    tile: Tile | None


def operators(path: Path) -> list[Traced]:
    """Return the operators of a trace whose work is known, those with the same sizes as one."""
    return [
        Traced(operation, median(ns for ns, _ in calls), len(calls), calls[0][1])
        for operation, calls in _calls(read_trace(path)).items()
    ]


def _calls(trace: Trace) -> dict[Operation, list[tuple[float, Tile | None]]]:
    table, gpu = trace.operators, trace.gpu
    launched = np.flatnonzero((gpu.category == KERNEL) & (gpu.operator >= 0))
    by_row: dict[int, list[int]] = defaultdict(list)
    for work in launched.tolist():
        by_row[int(gpu.operator[work])].append(work)
    found: dict[Operation, list[tuple[float, Tile | None]]] = defaultdict(list)
    for row, works in by_row.items():
        operation = _operation(*(table.strings[column[row]] for column in (table.name, table.shapes, table.types)))
        if operation is None:
            continue
        longest = max(works, key=lambda work: int(gpu.duration_ns[work]))
        tile = tile_of(gpu.strings[gpu.name[longest]]) if operation.family in MATMULS else None
        found[operation].append((float(gpu.duration_ns[works].sum()), tile))
    return dict(found)


def _operation(name: str, shapes: str, types: str) -> Operation | None:
    """Return what an operator with these inputs computes; a trace has neither its results nor strides."""
    if not shapes or not types:
        return None
    inputs = list(_inputs(json.loads(shapes), json.loads(types)))
    name = name.removeprefix("aten::")
    if not inputs:
        return None
    if name == "addmm":
        inputs[-1] = inputs[-1]._replace(stride=(1, inputs[-1].shape[0]))  # as torch.nn.Linear calls it
    if name == "copy_" and len({each.type for each in inputs}) == 1 and len(inputs[0].shape) > 1:
        steps = tuple(
            np.cumprod((1, *inputs[0].shape[:-1])).tolist()
        )  # a copy within a type is there for the order
        inputs[1:] = [each._replace(stride=steps) for each in inputs[1:] if each.shape == inputs[0].shape]
    kind = inputs[0].type
    if name in _SAME_SHAPE:
        shape = inputs[0].shape
    elif name == "cat":
        shape = (sum(prod(each.shape) for each in inputs),)
    elif name in ("mean", "sum", "all", "any", "_local_scalar_dense", "index_select", "embedding"):
        shape = inputs[-1].shape if name in ("index_select", "embedding") else ()
        if shape:
            shape = (*shape, inputs[0].shape[-1])
    elif "mm" in name:
        shape = ()
    else:
        try:
            shape = tuple(np.broadcast_shapes(*(each.shape for each in inputs)))
        except ValueError:
            return None  # a convolution, and the like
    return operation_of(name, inputs, [Tensor(shape, None, kind)])


def _inputs(shapes: list[Any], types: list[Any]) -> Iterator[Tensor]:
    for shape, kind in zip(shapes, types, strict=False):
        if kind == "TensorList":
            yield from (Tensor(tuple(each), None, "bf16") for each in shape)
        elif kind in _TYPES and (shape or kind != "double"):
            yield Tensor(tuple(shape), None, _TYPES[kind])
