"""Measured operators of one family, and the time of others by those that are most like them."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from typing import Any

import numpy as np

from ..read.tables.table import Array
from .gpus import Gpu
from .ideal import KERNEL_NS, Tile, ideal_ns
from .operations import MATMULS, Operation, alignment, attention, matmul

_NEIGHBOURS = 4
_WEIGHTS = np.array((0.5, 1.0, 1.0, 0.7, 2.0))  # of the doublings of batch, rows, columns, sums and alignment
_LEAST_NS = 50.0  # beyond what each kernel takes
_NEAR = 0.1  # doublings: closer measurements count the same


class Measurements:
    """The measured operators of one family on one GPU.

    Attributes:
        error: the mean error of `ns` for operators left out of the measurements, as a share.
    """

    def __init__(self, gpu: Gpu, row: Mapping[str, Any]) -> None:
        """Take the measurements from a row of the table's file.

        Args:
            gpu: the GPU that they are from.
            row: "family" and "type" as in `Operation`, or `ANY_TYPE`; "error"; "sizes", for each operator those of
                `Operation` or, where these do not tell its bytes, the bytes before them; "ns", its time; for
                matmuls "tiles", rows and columns of the tile of its kernel, 0 if it is not known.
        """
        self.family, self.type, self.error = row["family"], row["type"], row["error"]
        self._gpu = gpu
        self._sizes = np.array(row["sizes"], np.int64)
        self._ns = np.array(row["ns"], float)
        self._tiles = row.get("tiles")
        self._by_sizes = self.family in MATMULS or self.family.startswith("attention")
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
            log(max(self._ns[row] - KERNEL_NS, _LEAST_NS))
            - _log_ideal(self.operation(row), self._gpu, self._tile(row))
            + _log_ideal(operation, gpu, self._tile(row))
            for row in nearest.tolist()
        ]
        ns = KERNEL_NS + exp(float(np.dot(weights, logs) / weights.sum()))
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
        one, other = self._tiles[row] if self._tiles else (0, 0)
        return (one, other) if one else None

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


def _log_ideal(operation: Operation, gpu: Gpu, tile: Tile | None) -> float:
    return log(max(ideal_ns(operation, gpu, tile) - KERNEL_NS, _LEAST_NS))
