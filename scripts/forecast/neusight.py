"""Reads the latencies that NeuSight published: single operators, the operators of models, and whole steps.

The files are those of https://github.com/sitar-lab/NeuSight (MIT), measured with torch 2.1 in FP32 without TF32.
In the files of matmuls N is the length of the sums and K the number of columns of the result: the grids of the
kernels fit that alone.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import re
import statistics
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from instrument.explain.metrics.matmul_table import tile_of
from instrument.forecast.content import Measured
from instrument.forecast.operations import Operation, Tensor, matmul, operation_of

SOURCE = (
    "NeuSight (https://github.com/sitar-lab/NeuSight, Lee, Phanishayee and Mahajan, ASPLOS 2025), licence: MIT, "
    "Copyright (c) its authors; torch 2.1, FP32 without TF32"
)
DEVICES = {"h100": "h100", "a100_80": "a100", "l4": "l4", "v100": "v100", "t4": "t4"}
"""The names of the GPUs here, by their names there."""

_READS = {"add": 2, "mul": 2, "div": 2, "pow": 2}
_OVERHEAD = 0.0095  # ms: above, an operator launched a kernel


class Sum(NamedTuple):
    """Operators of a model that were measured together, such as both matmuls of a backward pass."""

    operations: tuple[Operation, ...]
    ns: float


class Step(NamedTuple):
    """A measured step of a model, or a forward pass alone ("inf"); ms."""

    gpu: str
    model: str
    kind: str
    sequence: int
    batch: int
    parallel: str
    forward_ms: float
    backward_ms: float
    ms: float


def steps(folder: Path) -> list[Step]:
    """Return the measured steps."""
    return [
        Step(
            DEVICES[row["device"]], row["model"], row["kind"], row["sequence"], row["batch"], row["parallel"],
            row["fw_latency"], row["bwall_latency"], row["e2e_latency"],
        )
        for row in json.loads((folder / "labels.json").read_text())
    ]  # fmt: skip


def operators(folder: Path) -> Iterator[tuple[str, Measured]]:
    """Yield the operators that were measured alone, with their GPU."""
    for family, file in (("batched matmul", "bmm"), ("linear", "linear")):
        for row in _rows(folder / "operators" / f"{file}.csv.gz"):
            batch, rows, sums, columns = (int(row[name]) for name in "BMNK")
            operation = matmul(family, "fp32", batch, rows, columns, sums)
            yield DEVICES[row["device"]], Measured(operation, _ns(row), tile_of(row["kernel"]))
    for family, file in (("element-wise", "elem"), ("softmax", "softmax"), ("layer norm", "ln")):
        for row in _rows(folder / "operators" / f"{file}.csv.gz"):
            elements = int(row["B"]) * int(row["H"])
            moved = 4 * elements * (_READS.get(row["operator"], 1) + 1)
            width = 0 if family == "element-wise" else int(row["H"])
            yield DEVICES[row["device"]], Measured(Operation(family, "fp32", 0, moved, (width,)), _ns(row))


def model_operators(folder: Path, without: str | None = None) -> Iterator[tuple[str, Sum]]:
    """Yield the operators of the models that were measured in place, with their GPU, but those of one model.

    What a call without a kernel took is subtracted: the files have the time between two events on the host's side.
    """
    for path in sorted((folder / "labels").glob("*.csv.gz")):
        device, model, _, _ = path.name.removesuffix(".csv.gz").split("-")
        if model == without:
            continue
        rows = list(_rows(path))
        idle = statistics.median(float(row["forward_ms"]) for row in rows if row["target"] == "view")
        for row in rows:
            forward, backward = _passes(row)
            for operations, column in ((forward, "forward_ms"), (backward, "backward_ms")):
                if operations and float(row[column]) > max(_OVERHEAD, 1.5 * idle):
                    yield DEVICES[device], Sum(tuple(operations), 1e6 * (float(row[column]) - idle))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        yield from csv.DictReader(file)


def _ns(row: dict[str, str]) -> float:
    return float(row["latency_us"]) * 1e3


_MATMUL = re.compile(r"matmul|bmm")
_LINEAR = re.compile(r"self_(query|key|value)$|dense$|decoder$|_proj$|fc\d$|lm_head$|seq_relationship$")
_WITHOUT_BIAS = re.compile(r"lm_head$")


def _passes(row: dict[str, str]) -> tuple[list[Operation], list[Operation]]:
    """Return what the forward and the backward pass of an operator compute; empty where it is not known."""
    shapes = [tuple(each) for each in ast.literal_eval(row["input_shapes"])]
    result = ast.literal_eval(row["output_shape"])
    if not isinstance(result, tuple) or len(result) < 2 or prod(result) < 1 << 18:
        return [], []
    target = row["target"]
    if _LINEAR.search(row["name"]) and len(shapes) == 1:
        return _linear(shapes[0][-1], result, not _WITHOUT_BIAS.search(row["name"]))
    if "addmm" in target:
        _, (rows, sums), (_, columns) = shapes
        return [_matmul(1, rows, columns, sums)], _backward(1, rows, columns, sums)
    if _MATMUL.search(target) and len(shapes) == 2:
        (*batch, rows, sums), columns = shapes[0], shapes[1][-1]
        return [_matmul(prod(batch), rows, columns, sums)], _backward(prod(batch), rows, columns, sums)
    return _memory_bound(row["name"], [each for each in shapes if each and each != (1,)], result)


def _linear(sums: int, result: tuple[int, ...], bias: bool) -> tuple[list[Operation], list[Operation]]:
    rows, columns = prod(result[:-1]), result[-1]
    forward = _matmul(1, rows, columns, sums)
    return [forward._replace(family="linear") if bias else forward], _backward(1, rows, columns, sums)


def _matmul(batch: int, rows: int, columns: int, sums: int) -> Operation:
    return matmul("batched matmul" if batch > 1 else "matmul", "fp32", batch, rows, columns, sums)


def _backward(batch: int, rows: int, columns: int, sums: int) -> list[Operation]:
    return [_matmul(batch, rows, sums, columns), _matmul(batch, sums, columns, rows)]


_MOVING = (
    ("softmax", "_softmax", 1, "_softmax_backward_data", 2),
    ("norm", "native_layer_norm", 1, "native_layer_norm_backward", 2),
    ("dropout", "native_dropout", 1, "", 0),
    ("gelu", "gelu", 1, "gelu_backward", 2),
    ("activation_fn", "relu", 1, "threshold_backward", 2),
    ("tanh", "tanh", 1, "tanh_backward", 2),
    ("truediv", "div", 1, "div", 1),
    ("contiguous", "clone", 1, "", 0),
)
"""What is in the name of an operator that moves bytes; the operators of its passes, and their full-sized inputs.

Dropout's backward pass was measured with the three kernels of one that can be differentiated again; a step runs
one.
"""


def _memory_bound(
    name: str, shapes: list[tuple[int, ...]], result: tuple[int, ...]
) -> tuple[list[Operation], list[Operation]]:
    """Return the passes of an operator that moves bytes."""
    for word, forward, forward_inputs, backward, backward_inputs in _MOVING:
        if word in name:
            swapped = (1, *result[:0:-1]) if word == "contiguous" else None
            of = Tensor(result, swapped, "fp32")
            return _moved(forward, [of] * forward_inputs, result), _moved(backward, [of] * backward_inputs, result)
    if name.startswith(("add", "mul", "where")):
        return _moved(name.partition("_")[0], [Tensor(each, None, "fp32") for each in shapes], result), []
    return [], []


def _moved(name: str, inputs: list[Tensor], result: tuple[int, ...]) -> list[Operation]:
    results = [Tensor(result, None, "fp32")]
    if name == "native_dropout":
        results.append(Tensor(result, None, "bool"))
    operation = operation_of(name, inputs, results) if inputs else None
    return [operation] if operation else []
