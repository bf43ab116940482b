"""Turns measured operators of one GPU into the content of a table: by family and type, with the error of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import log2
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from .gpus import Gpu
from .ideal import Tile, blocks
from .measurements import Measurements
from .operations import MATMULS, UNKNOWN_FAMILY, Operation
from .table import ANY_TYPE

_LEAST = 3  # measurements, of a family
_SAMPLE = 300  # measurements of a family that are left out, one at a time, for its error
_BINS = 4  # of bytes, per doubling, of which the median is kept
_UNKNOWN = 0.5  # the error of a family with a single measurement
_TYPED = (*MATMULS, "attention", "attention backward")
_MANY_WAVES = 5
_LEAST_TILE = 64
_OF_A_TILE = 20  # measurements


class Measured(NamedTuple):
    """An operator that was measured alone, and the tile of its kernel if it is a matmul and that is known."""

    operation: Operation
    ns: float
    tile: Tile | None = None


def content_of(gpu: Gpu, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the content of the table for one GPU, without whole steps."""
    families = []
    for row in _families(measured):
        row["error"] = round(_left_out(Measurements(gpu, row), gpu), 4)
        families.append(row)
    kernels = {}
    for kind in dict.fromkeys(each.operation.type for each in measured if each.tile):
        if tiles := _tiles(gpu, measured, kind):
            linear = [row["error"] for row in families if (row["family"], row["type"]) == ("linear", kind)]
            kernels[kind] = {"tiles": tiles, "scale": 1.0, "error": linear[0] if linear else _UNKNOWN}
    return {"families": families, "kernels": kernels, "steps": None}


def _families(measured: Iterable[Measured]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table by family and type."""
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for each in measured:
        operation = each.operation
        if operation.family != UNKNOWN_FAMILY:
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
            yield row


def _medians(measured: list[Measured]) -> tuple[list[list[int]], list[int]]:
    """Return the median bytes and times of operators that move about the same bytes, in rows of one length."""
    bins: dict[tuple[int, ...], list[Measured]] = defaultdict(list)
    for each in measured:
        key = (round(_BINS * log2(each.operation.bytes)), *each.operation.sizes)
        bins[key].append(each)
    middle = [sorted(of, key=lambda each: each.ns / each.operation.bytes)[len(of) // 2] for of in bins.values()]
    return [[each.operation.bytes, *each.operation.sizes] for each in middle], [round(each.ns) for each in middle]


def _tiles(gpu: Gpu, measured: Iterable[Measured], kind: str) -> list[list[float]]:
    """Return the costs of the tiles of matmul kernels: ns of a wave by the length of the sums, and the rest."""
    by_tile: dict[Tile, list[tuple[int, float]]] = defaultdict(list)
    for each in measured:
        if each.operation.family not in MATMULS or each.operation.type != kind or each.tile is None:
            continue
        batch, rows, columns, sums = each.operation.sizes
        waves = batch * blocks(rows, columns, each.tile) / gpu.multiprocessors
        if waves > _MANY_WAVES and min(each.tile) >= _LEAST_TILE:
            by_tile[each.tile].append((sums, each.ns / np.ceil(waves)))
    rows_of = []
    for tile, points in sorted(by_tile.items()):
        step, whole = _line(points)
        peak = 2 * tile[0] * tile[1] * gpu.multiprocessors / gpu.peak.flops_per_s[kind] * 1e9
        if len(points) >= _OF_A_TILE and step >= peak:  # a faster one is not the tile that its name says
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


def _left_out(measured: Measurements, gpu: Gpu) -> float:
    """Return the mean error of operators of a family, each left out of the measurements."""
    if len(measured) == 1:
        return _UNKNOWN
    errors = []
    for row in np.random.default_rng(0).permutation(len(measured))[:_SAMPLE].tolist():
        ns, _ = measured.ns(measured.operation(row), gpu, leave_out=row)
        errors.append(abs(ns / measured.measured_ns(row) - 1))
    return mean(errors)
