"""The table of measured operators that ships with the package, and its file format."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .gpus import GPUS, Gpu
from .ideal import TileCosts
from .measurements import Measurements
from .operations import MATMULS, Operation

PACKAGED = Path(__file__).with_name("efficiency.json.gz")
"""The table that ships with the package; `scripts/efficiency_table.py` makes it and names its sources."""

ANY_TYPE = "any"
"""The type of families that only move bytes: what they take follows from these, whatever they hold."""

_FORMAT = 1
_TWINS = {"fp16": "bf16", "bf16": "fp16"}


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
        misaligned: how far 16-bit matmuls whose elements are loaded one by one are from aligned ones, towards
            FP32, as a share of the logarithm.
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

    def name_of(self, gpu: Gpu) -> str | None:
        """Return the GPU whose measurements stand for ``gpu``: itself or that with its chip; None without any."""
        return next((name for name in (gpu.name, gpu.like) if name in self.gpus), None)

    def steps(self, gpu: Gpu) -> Steps | None:
        """Return the whole steps that were measured on a GPU or its chip; None if none were."""
        name = self.name_of(gpu)
        return self.gpus[name].steps if name is not None else None

    def measurements(self, operation: Operation, gpu: str) -> Measurements | None:
        """Return the measurements of a family on a GPU; None if there are none.

        Both 16-bit types run at the same rate where the GPU has units for both. Where a type has only some of the
        matmuls, they stand for all.
        """
        found = self.gpus[gpu].families if gpu in self.gpus else {}
        twins = _TWINS if _TWINS.keys() <= GPUS[gpu].peak.flops_per_s.keys() else {}
        types = (operation.type, twins.get(operation.type, ANY_TYPE), ANY_TYPE)
        families = dict.fromkeys((operation.family, *(MATMULS if operation.family in MATMULS else ())))
        keys = ((family, kind) for kind in types for family in families)
        return next((found[key] for key in keys if key in found), None)


def read_table(path: Path = PACKAGED) -> Table:
    """Return a table from its file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a table, or one of another version.
    """
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data["format"] == _FORMAT:
            return table_of(data)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a table of measured operators of format {_FORMAT}")


@lru_cache(1)
def packaged_table() -> Table:
    """Return the table that ships with the package."""
    return read_table()


def table_of(data: Mapping[str, Any]) -> Table:
    """Return a table from the content of its file."""
    gpus = {name: _gpu_table(name, of) for name, of in data["gpus"].items()}
    return Table(data["source"], gpus, data.get("borrowed", {}))


def _gpu_table(name: str, data: Mapping[str, Any]) -> GpuTable:
    families = {(row["family"], row["type"]): Measurements(GPUS[name], row) for row in data["families"]}
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
