"""Turns measured operators into the content of the table: by GPU, family and type, with the error of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import exp, log, prod
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from instrument.forecast.gpus import GPUS
from instrument.forecast.ideal import Tile, blocks
from instrument.forecast.operations import FULLY_ALIGNED, MATMULS, alignment, matmul
from instrument.forecast.operator_time import aligned_and_fp32, operator_time
from instrument.forecast.table import ANY_TYPE, Table, table_of

from . import neusight, traces
from .neusight import Measured, Sum

_LEAST = 3  # measurements, of a family
_SAMPLE = 300  # measurements of a family that are left out, one at a time, for its error
_TYPED = (*MATMULS, "attention", "attention backward")
_HALFWAY = 0.5
_BUSY = 1 << 32  # products in a matmul that is not over before the tensor cores are busy
_COLUMNS = ("sizes", "ns", "tiles")
_BINS = 4  # of bytes, per doubling, of which the median is kept where row lengths do not matter
_MANY_WAVES = 5
_LEAST_TILE = 64


def build(folder: Path, trace_folder: Path, without: str | None = None) -> dict[str, Any]:
    """Return the content of the table, without its steps; nothing of the model or trace ``without`` is in it."""
    alone = neusight.by_gpu(neusight.operators(folder))
    for name in traces.TRACES:
        if name != without:
            alone["h100"] += _traced(traces.operators(trace_folder / f"{name}.json.gz"))
    in_models = neusight.by_gpu(neusight.model_operators(folder, without))
    gpus = {}
    for name in dict.fromkeys([*alone, *in_models]):
        gpus[name] = _of_gpu(name, alone.get(name, []), in_models.get(name, []))
    data: dict[str, Any] = {"source": f"{neusight.SOURCE}; {traces.SOURCE}", "gpus": gpus}
    data["borrowed"] = _borrowed(table_of(data))
    gpus["h100"]["misaligned"] = _misaligned(data, "h100")
    return data


def _traced(operators: list[traces.Traced]) -> list[Measured]:
    """Return the operators of a trace; its few matmuls are one family."""
    return [
        Measured(
            "h100", each.operation._replace(family="matmul") if each.tile else each.operation, each.ns, each.tile
        )
        for each in operators
        if each.operation.family in (*MATMULS, "attention") or each.operation.type != "fp32"
    ]


def _of_gpu(name: str, alone: list[Measured], in_models: list[Sum]) -> dict[str, Any]:
    single = [Measured(each.gpu, each.operations[0], each.ns) for each in in_models if len(each.operations) == 1]
    moving = [each for each in single if each.operation.family not in MATMULS]
    families = dict(_families([*alone, *moving]))
    data = {
        "families": list(families.values()),
        "kernels": {"fp32": {"tiles": _tiles(name, alone), "scale": 1.0, "error": 0.0}},
        "steps": None,
    }
    table = table_of({"source": "", "gpus": {name: data}})
    for (family, kind), row in families.items():
        row["error"] = round(_left_out(table, name, family, kind), 4)
    ratios = _ratios(table, name, in_models)
    kernels = data["kernels"]["fp32"]
    if len(ratios) >= _LEAST:
        kernels["scale"] = round(exp(mean(ratios)), 4)
    spread = mean(abs(each - mean(ratios)) for each in ratios) if ratios else 0.0
    kernels["error"] = round(max(spread, families["linear", "fp32"]["error"]), 4)
    return data


def _families(measured: Iterable[Measured]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield the rows of the table by family and type."""
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for each in measured:
        operation = each.operation
        groups[operation.family, operation.type if operation.family in _TYPED else ANY_TYPE].append(each)
    for (family, kind), of in groups.items():
        row: dict[str, Any] = {"family": family, "type": kind, "error": 0.0}
        if family in _TYPED:
            row["sizes"] = [list(each.operation.sizes) for each in of]
            row["ns"] = [round(each.ns) for each in of]
            if family in MATMULS:
                row["tiles"] = [list(each.tile or (0, 0)) for each in of]
        else:
            row["sizes"], row["ns"] = _medians(of)
        if len(row["ns"]) >= (1 if family == "attention" else _LEAST):
            yield (family, kind), row


def _medians(measured: list[Measured]) -> tuple[list[list[int]], list[int]]:
    """Return the median bytes and times of operators that move about the same bytes, in rows of one length."""
    bins: dict[tuple[int, ...], list[Measured]] = defaultdict(list)
    for each in measured:
        bins[(round(_BINS * log(each.operation.bytes, 2)), *each.operation.sizes)].append(each)
    middle = [sorted(of, key=lambda each: each.ns / each.operation.bytes)[len(of) // 2] for of in bins.values()]
    return [[each.operation.bytes, *each.operation.sizes] for each in middle], [round(each.ns) for each in middle]


def _tiles(name: str, measured: list[Measured]) -> list[list[float]]:
    """Return the costs of the tiles of matmul kernels: ns of a wave by the length of the sums, and the rest."""
    multiprocessors = GPUS[name].multiprocessors
    by_tile: dict[Tile, list[tuple[int, float]]] = defaultdict(list)
    for each in measured:
        if each.operation.family not in MATMULS or each.operation.type != "fp32" or each.tile is None:
            continue
        batch, rows, columns, sums = each.operation.sizes
        waves = batch * blocks(rows, columns, each.tile) / multiprocessors
        if waves > _MANY_WAVES and min(each.tile) >= _LEAST_TILE:
            by_tile[each.tile].append((sums, each.ns / np.ceil(waves)))
    rows_of = []
    for tile, points in sorted(by_tile.items()):
        step, whole = _line(points)
        peak = 2 * tile[0] * tile[1] * multiprocessors / GPUS[name].peak.flops_per_s["fp32"] * 1e9
        if len(points) >= 20 and step >= peak:  # a faster one is not the tile that its name says
            rows_of.append([*tile, round(step, 4), round(whole, 1)])
    return rows_of


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the line through times by sums with the least relative errors, outliers counting little."""
    sums, ns = np.array(points, float).T
    terms = np.stack((sums / ns, 1 / ns), axis=1)
    weights = np.ones(len(ns))
    for _ in range(5):
        found = np.linalg.lstsq(terms * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(terms @ found - 1), 0.02)
    return float(found[0]), max(float(found[1]), 0.0)


def _left_out(table: Table, name: str, family: str, kind: str) -> float:
    """Return the mean error of operators of a family, each left out of the measurements."""
    measured = table.gpus[name].families[family, kind]
    if len(measured) == 1:
        return 0.5
    rows = np.random.default_rng(0).permutation(len(measured))[:_SAMPLE].tolist()
    errors = []
    for row in rows:
        ns, _ = measured.ns(measured.operation(row), GPUS[name], leave_out=row)
        errors.append(abs(ns / measured.measured_ns(row) - 1))
    return mean(errors)


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
