"""The table of measured operators that ships with the package, and its file format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..read.tables.table import Array
from .gpus import GPUS, Gpu
from .ideal import KERNEL_NS, Tile, TileCosts, ideal_ns
from .operations import MATMULS, Operation, alignment, attention, matmul

PACKAGED = Path(__file__).with_name("efficiency.json.gz")
"""The table that ships with the package; `scripts/efficiency_table.py` makes it and names its sources."""

ANY_TYPE = "any"
"""The type of families that only move bytes: what they take follows from these, whatever they hold."""

_FORMAT = 1
_NEIGHBOURS = 4
_WEIGHTS = np.array((0.5, 1.0, 1.0, 0.7, 2.0))  # of the doublings of batch, rows, columns, sums and alignment
_LEAST_NS = 50.0  # beyond what each kernel takes
_NEAR = 0.1  # doublings: closer measurements count the same


class Measurements:
    """The measured operators of one family on one GPU.

    Attributes:
        error: the mean error of `ns` for operators left out of the measurements, as a share.
    """

    def __init__(
        self,
        sizes: Array,
        ns: Array,
        tiles: Array | None,
        *,
        gpu: Gpu,
        family: str,
        type: str,
        error: float,
    ) -> None:
        """Keep the measurements.

        Args:
            sizes: a row for each operator: of matmuls batch, rows, columns and sums; else bytes and the row length.
            ns: the time of each.
            tiles: of matmuls, rows and columns of the tile of the kernel; 0 if it is not known.
            gpu: the GPU that they are from.
            family: as in `Operation`.
            type: as in `Operation`, or `ANY_TYPE`.
        """
        self.error, self.family, self.type = error, family, type
        self._sizes = sizes.astype(np.int64)
        self._ns = ns.astype(float)
        self._tiles = tiles
        self._gpu = gpu
        self._by_sizes = family in MATMULS or family.startswith("attention")
        self._features = self._coordinates(self._sizes)

    def __len__(self) -> int:
        return len(self._ns)

    def ns(self, operation: Operation, gpu: Gpu, leave_out: int | None = None) -> tuple[float, float]:
        """Return the time of an operation, and how far the nearest measurement is, in doublings of its sizes.

        The measured efficiencies of the nearest operators are taken, each with the waves that the tiles of its
        kernel would need for this operation, weighted by their closeness.

        Args:
            operation: what to compute.
            gpu: where.
            leave_out: a measurement that does not count.
        """
        sizes = np.array(operation.sizes if self._by_sizes else (operation.bytes, *operation.sizes))
        distance = ((self._features - self._coordinates(sizes[None])) ** 2).sum(1)
        if leave_out is not None:
            distance[leave_out] = np.inf
        count = min(_NEIGHBOURS, len(distance) - (leave_out is not None))
        nearest = np.argpartition(distance, count - 1)[:count]
        weights = 1 / (distance[nearest] + _NEAR**2)
        logs = [
            np.log(max(self._ns[row] - KERNEL_NS, _LEAST_NS))
            - np.log(max(ideal_ns(self.operation(row), self._gpu, self._tile(row)) - KERNEL_NS, _LEAST_NS))
            + np.log(max(ideal_ns(operation, gpu, self._tile(row)) - KERNEL_NS, _LEAST_NS))
            for row in nearest.tolist()
        ]
        ns = KERNEL_NS + float(np.exp(np.dot(weights, logs) / weights.sum()))
        return ns, float(distance[nearest].min() ** 0.5)

    def operation(self, row: int) -> Operation:
        """Return what was measured."""
        sizes = tuple(self._sizes[row].tolist())
        if self.family in MATMULS:
            return matmul(self.family, self.type, *sizes)
        if self._by_sizes:
            return attention(self.family, self.type, *sizes)
        return Operation(self.family, self.type, 0, sizes[0], sizes[1:])

    def measured_ns(self, row: int) -> float:
        """Return what was measured."""
        return float(self._ns[row])

    def _tile(self, row: int) -> Tile | None:
        if self._tiles is None or not self._tiles[row][0]:
            return None
        one, other = self._tiles[row].tolist()
        return one, other

    def _coordinates(self, sizes: Array) -> Array:
        """Return coordinates in which operators that are near each other are about equally efficient."""
        logs = np.log2(np.maximum(sizes, 1))
        if self.family in MATMULS:
            aligned = np.log2([alignment(tuple(row), self.type) for row in sizes.tolist()])
            logs = np.concatenate((logs, aligned[:, None]), axis=1) * _WEIGHTS
        elif sizes.shape[1] == 2:
            logs = logs * np.array((0.5, 1.0))
        result: Array = logs
        return result


@dataclass(frozen=True)
class Steps:
    """Whole steps that were measured on a GPU.

    Attributes:
        factor: how much longer a step took than its operators, the mean.
        error: the mean error of a forecast step of a model that is not in the table, as a share.
        worst: the largest.
        count: the steps.
    """

    factor: float
    error: float
    worst: float
    count: int


@dataclass(frozen=True)
class MatmulKernels:
    """The kernels that compute matmuls of one type on a GPU.

    Attributes:
        tiles: the costs of their tiles.
        scale: by how much matmuls without a bias took longer than the forecast from these tiles.
        error: the mean error of that forecast, as a share.
    """

    tiles: TileCosts
    scale: float
    error: float


@dataclass(frozen=True)
class GpuTable:
    """What was measured on one GPU.

    Attributes:
        families: by family and type.
        kernels: by type, the kernels of matmuls.
        steps: None if no whole steps were measured.
        misaligned: how far 16-bit matmuls whose elements are loaded one by one are from those loaded `FULLY_ALIGNED`
            at once, towards FP32, as a share of the logarithm.
    """

    families: Mapping[tuple[str, str], Measurements]
    kernels: Mapping[str, MatmulKernels]
    steps: Steps | None
    misaligned: float


@dataclass(frozen=True)
class Table:
    """A table of measured operators.

    Attributes:
        source: where the measurements are from, with their licence.
        gpus: by the name of the GPU.
        borrowed: by family, the mean error if a GPU is taken to be as efficient as the others.
    """

    source: str
    gpus: Mapping[str, GpuTable]
    borrowed: Mapping[str, float]

    def measurements(self, operation: Operation, gpu: str) -> Measurements | None:
        """Return the measurements of a family on a GPU; None if there are none.

        Both 16-bit types run at the same rate. Where a type has only some of the matmuls, they stand for all.
        """
        found = self.gpus[gpu].families if gpu in self.gpus else {}
        types = (operation.type, {"fp16": "bf16", "bf16": "fp16"}.get(operation.type), ANY_TYPE)
        families = dict.fromkeys((operation.family, *(MATMULS if operation.family in MATMULS else ())))
        keys = ((family, kind) for kind in types for family in families)
        return next((found[key] for key in keys if key in found), None)


def read_table(path: Path = PACKAGED) -> Table:
    """Return a table from its file.

    Raises:
        ValueError: it is not such a table, or one of another version.
    """
    data = json.loads(gzip.decompress(path.read_bytes()))
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a table of measured operators of format {_FORMAT}")
    return table_of(data)


@lru_cache(1)
def packaged_table() -> Table:
    """Return the table that ships with the package."""
    return read_table()


def table_of(data: Mapping[str, Any]) -> Table:
    """Return a table from the content of its file."""
    gpus = {name: _gpu_table(name, of) for name, of in data["gpus"].items()}
    return Table(data["source"], gpus, data.get("borrowed", {}))


def _gpu_table(name: str, data: Mapping[str, Any]) -> GpuTable:
    families = {}
    for row in data["families"]:
        key = row["family"], row["type"]
        families[key] = Measurements(
            np.array(row["sizes"]),
            np.array(row["ns"]),
            np.array(row["tiles"]) if "tiles" in row else None,
            gpu=GPUS[name],
            family=key[0],
            type=key[1],
            error=row["error"],
        )
    kernels = {
        kind: MatmulKernels(
            {(one, other): (step, whole) for one, other, step, whole in of["tiles"]}, of["scale"], of["error"]
        )
        for kind, of in data.get("kernels", {}).items()
    }
    steps = Steps(**data["steps"]) if data.get("steps") else None
    return GpuTable(families, kernels, steps, data.get("misaligned", 0.5))


def write_table(data: Mapping[str, Any], path: Path) -> None:
    """Write the content of a table; the same content gives the same bytes."""
    text = json.dumps({"format": _FORMAT, **data}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
