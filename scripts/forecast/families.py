"""Turns measured operators into the content of the table: by GPU, family and type, with the error of each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import exp, log, prod
from pathlib import Path
from statistics import mean, median
from typing import Any

from instrument.forecast.content import Measured, content_of
from instrument.forecast.gpus import GPUS
from instrument.forecast.operations import FULLY_ALIGNED, MATMULS, alignment, matmul
from instrument.forecast.operator_time import aligned_and_fp32, operator_time
from instrument.forecast.table import ANY_TYPE, Table, table_of

from . import neusight, traces
from .neusight import Sum

_LEAST = 3  # measurements that a correction takes
_HALFWAY = 0.5
_BUSY = 1 << 32  # products in a matmul that is not over before the tensor cores are busy
_COLUMNS = ("sizes", "ns", "tiles")
_LEAST_TILE = 64


def build(folder: Path, trace_folder: Path, without: str | None = None) -> dict[str, Any]:
    """Return the content of the table, without its steps; nothing of the model or trace ``without`` is in it."""
    measured: dict[str, list[Measured]] = defaultdict(list)
    for name, each in neusight.operators(folder):
        measured[name].append(each)
    for trace in traces.TRACES:
        if trace != without:
            measured[traces.GPU] += _traced(traces.operators(trace_folder / f"{trace}.json.gz"))
    in_models: dict[str, list[Sum]] = defaultdict(list)
    for name, total in neusight.model_operators(folder, without):
        in_models[name].append(total)
        if len(total.operations) == 1 and total.operations[0].family not in MATMULS:
            measured[name].append(Measured(total.operations[0], total.ns))
    gpus = {name: content_of(GPUS[name], of) for name, of in measured.items()}
    data: dict[str, Any] = {"source": f"{neusight.SOURCE}; {traces.SOURCE}", "gpus": gpus}
    data["borrowed"] = _borrowed(table_of(data))
    for name, totals in in_models.items():
        _scale(gpus[name]["kernels"].get("fp32"), _ratios(table_of(data), name, totals))
    gpus[traces.GPU]["misaligned"] = _misaligned(data, traces.GPU)
    return data


def _traced(operators: list[traces.Traced]) -> list[Measured]:
    """Return the operators of a trace, its few matmuls as one family, and only what FP32 was not measured for."""
    return [
        Measured(each.operation._replace(family="matmul") if each.tile else each.operation, each.ns, each.tile)
        for each in operators
        if each.operation.family in (*MATMULS, "attention") or each.operation.type != "fp32"
    ]


def _scale(kernels: dict[str, Any] | None, ratios: list[float]) -> None:
    """Correct the matmuls without a bias of a GPU by those that were measured in models."""
    if kernels is not None and len(ratios) >= _LEAST:
        spread = mean(abs(each - mean(ratios)) for each in ratios)
        kernels["scale"] = round(exp(mean(ratios)), 4)
        kernels["error"] = round(max(spread, kernels["error"]), 4)


def _ratios(table: Table, name: str, in_models: list[Sum]) -> list[float]:
    """Return the logarithms of measured by forecast times of the matmuls without a bias in models."""
    return [
        log(each.ns / sum(operator_time(operation, GPUS[name], table).ns for operation in each.operations))
        for each in in_models
        if all(operation.family == "matmul" for operation in each.operations)
    ]


def _misaligned(data: dict[str, Any], name: str) -> float:
    """Return how far misaligned matmuls of 16-bit types are from aligned ones, towards FP32."""
    row = next(
        (of for of in data["gpus"][name]["families"] if of["type"] == "bf16" and of["family"] == "matmul"), None
    )
    if row is None:
        return _HALFWAY
    lost = [1 - log(alignment(tuple(sizes), "bf16"), FULLY_ALIGNED) for sizes in row["sizes"]]
    kept = {key: [value for value, each in zip(row[key], lost, strict=True) if not each] for key in _COLUMNS}
    others = [of for of in data["gpus"][name]["families"] if of is not row]
    gpus = data["gpus"] | {name: data["gpus"][name] | {"families": [*others, row | kept]}}
    table = table_of(data | {"gpus": gpus})
    shares = []
    for sizes, ns, each in zip(row["sizes"], row["ns"], lost, strict=True):
        if each and prod(sizes) >= _BUSY:
            aligned, in_fp32 = aligned_and_fp32(matmul("matmul", "bf16", *sizes), GPUS[name], table)
            shares.append(log(ns / aligned) / log(in_fp32 / aligned) / each)
    return round(median(shares), 3) if shares else _HALFWAY


def _borrowed(table: Table) -> dict[str, float]:
    """Return by family the mean error of operators whose GPU is left out, so that they borrow from the others."""
    errors: dict[str, list[float]] = defaultdict(list)
    for name, of in table.gpus.items():
        rest = replace(table, gpus={other: each for other, each in table.gpus.items() if other != name})
        for (family, kind), measured in of.families.items():
            others = [rest.measurements(measured.operation(0), other) for other in rest.gpus]
            if kind != ANY_TYPE or not any(others):
                continue
            for row in range(len(measured)):
                operation = measured.operation(row)
                logs = [log(each.ns(operation, GPUS[name])[0]) for each in others if each]
                errors[family].append(abs(exp(mean(logs)) / measured.measured_ns(row) - 1))
    return {family: round(mean(of), 4) for family, of in errors.items()}
