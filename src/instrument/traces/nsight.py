"""Reads reports of Nsight Systems: ranges, CUDA calls and GPU work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .lanes import map_unique
from .links import assemble
from .nsight_nvtx import read_nvtx_ranges
from .nsight_origin import Origins, epoch_ns, metadata, rank_and_world
from .nsight_tables import (
    CALLS,
    GRAPHS,
    KERNELS,
    LIBRARIES,
    MEMCPYS,
    MEMSETS,
    MISSING,
    SYNCS,
    NsightReport,
    event_columns,
    minus_one_for_missing,
    open_report,
)
from .table import COLUMNS, KERNEL, MEMCPY, MEMSET, Array
from .trace import Trace

Columns = dict[str, Array]

_ON_GPU = ("deviceId", "streamId", "correlationId", "globalPid")
_NAMES = ("demangledName", "shortName", "mangledName")
_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")
_VERSION = re.compile(
    r"_v\d{4,}$"
)  # as in cudaLaunchKernel_v7000; the suffix of cuMemAlloc_v2 is part of the name
_COPY_KINDS = (
    *("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("Unified HtoD", "Unified DtoH", "Unified DtoD"),
)
_MEMORY_KINDS = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown")
_SYNC_KINDS = ("Unknown", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")


def read_nsight(path: Path) -> Trace:
    """Read a ``.sqlite`` that nsys exported, or a ``.nsys-rep`` or ``.qdrep`` with the installed nsys.

    Memcpys, memsets and synchronizations have the names that torch.profiler gives them. A CUDA graph that was
    recorded as a whole is one kernel named ``CUDA graph N``. The ranges of `instrument.profile` around steps are
    in `Trace.steps`; its ranges around windows, marks, and calls of cuDNN, cuBLAS and the operating system are in
    `Trace.others`. ``metadata["unfinished_ranges"]`` is the number of ranges without an end, which last until the
    end of the trace.

    `Trace.args` reads the file again, and exports a ``.nsys-rep`` again.

    Raises:
        TraceError: the file is not a report, or nsys is needed and is not installed or fails.
        OSError: the file cannot be opened.
    """
    with open_report(path) as report:
        origins = Origins(report)
        columns = {
            "gpu": _concatenated(
                "gpu", [read(report, origins) for read in (_kernels, _graphs, _memcpys, _memsets)]
            ),
            "runtime": _calls(report, origins),
            "syncs": _syncs(report, origins),
            "others": _concatenated("others", [_library(report, origins, table) for table in LIBRARIES]),
        }
        ranges = read_nvtx_ranges(report, origins, max(map(_end_ns, columns.values())))
        columns["regions"] = ranges.regions
        columns["others"] = _concatenated("others", [columns["others"], ranges.others])
        if len(ranges.steps["number"]):
            columns["steps"] = ranges.steps
        processes = len(np.unique(columns["gpu"]["correlation"] >> 32))
        rank, world = rank_and_world(report) if processes <= 1 else (None, None)
        about = metadata(report) | {
            "processes": origins.process_names(),
            "unfinished_ranges": ranges.unfinished,
        }
        return assemble(
            path,
            "nsight systems",
            columns,
            report.strings,
            origins.threads(),
            devices=origins.devices,
            metadata=about,
            lost=report.lost,
            rank=rank,
            world_size=world,
            epoch_ns=epoch_ns(report),
            look_up=_LookUp(path),
        )


@dataclass(frozen=True)
class _LookUp:
    """Reads an event from the file again; unlike a nested function, it can be pickled."""

    path: Path

    def __call__(self, event: int) -> dict[str, Any]:
        with open_report(self.path) as report:
            return report.row(event)


def _kernels(report: NsightReport, origins: Origins) -> Columns:
    numbers = (*_ON_GPU, *_NAMES, "registersPerThread", *_GRID, *_BLOCK, *_SHARED)
    rows = report.events(KERNELS, numbers)
    columns = _on_gpu(KERNELS, rows, origins, KERNEL)
    name = rows[_NAMES[0]]
    for other in _NAMES[1:]:
        name = np.where(name == MISSING, rows[other], name)
    blocks, sms = _combined(np.multiply, rows, _GRID), origins.sms_of(columns["device"])
    some = (blocks >= 0) & (sms > 0)
    return columns | {
        "name": _named(report, name, report.string),
        "registers": minus_one_for_missing(rows["registersPerThread"]),
        "blocks": blocks,
        "block_threads": _combined(np.multiply, rows, _BLOCK),
        "shared_bytes": _combined(np.add, rows, _SHARED),
        "blocks_per_sm": np.divide(blocks, sms, where=some, out=np.full(len(rows), np.nan)),
    }


def _graphs(report: NsightReport, origins: Origins) -> Columns:
    rows = report.events(GRAPHS, (*_ON_GPU, "graphId"))
    names = _named(report, minus_one_for_missing(rows["graphId"]), lambda graph: f"CUDA graph {graph}")
    return _on_gpu(GRAPHS, rows, origins, KERNEL) | {"name": names}


def _memcpys(report: NsightReport, origins: Origins) -> Columns:
    rows = report.events(MEMCPYS, (*_ON_GPU, "bytes", "copyKind", "srcKind", "dstKind"))
    # All three in one number, which is looked up once; 255 stands for missing or invalid.
    kind, source, target = (rows[name].view("u8").clip(max=255) for name in ("copyKind", "srcKind", "dstKind"))
    kinds = ((kind << 16) + (source << 8) + target).astype("i8")
    columns = _on_gpu(MEMCPYS, rows, origins, MEMCPY)
    return columns | {"name": _named(report, kinds, _memcpy_name), "bytes": minus_one_for_missing(rows["bytes"])}


def _memcpy_name(kinds: int) -> str:
    source, target = _label(_MEMORY_KINDS, kinds >> 8 & 0xFF), _label(_MEMORY_KINDS, kinds & 0xFF)
    return f"Memcpy {_label(_COPY_KINDS, kinds >> 16)} ({source} -> {target})"


def _memsets(report: NsightReport, origins: Origins) -> Columns:
    rows = report.events(MEMSETS, (*_ON_GPU, "bytes", "memKind"))
    names = _named(report, rows["memKind"], lambda kind: f"Memset ({_label(_MEMORY_KINDS, kind)})")
    return _on_gpu(MEMSETS, rows, origins, MEMSET) | {"name": names, "bytes": minus_one_for_missing(rows["bytes"])}


def _calls(report: NsightReport, origins: Origins) -> Columns:
    rows = report.events(CALLS, ("globalTid", "correlationId", "nameId"))
    name = _named(report, rows["nameId"], lambda id: _VERSION.sub("", report.string(id)))
    texts = list(report.strings)
    runtime, driver = report.strings["cuda_runtime"], report.strings["cuda_driver"]
    return event_columns(CALLS, rows) | {
        "name": name,
        "category": map_unique(name, lambda code: runtime if texts[code].startswith("cuda") else driver),
        "thread": origins.threads_of(rows["globalTid"]),
        "correlation": origins.correlations(rows["globalTid"], rows["correlationId"]),
    }


def _syncs(report: NsightReport, origins: Origins) -> Columns:
    rows = report.events(SYNCS, (*_ON_GPU, "syncType"))
    names = _named(report, rows["syncType"], lambda kind: _label(_SYNC_KINDS, kind))
    return _on_gpu(SYNCS, rows, origins, report.strings["cuda_sync"]) | {"name": names}


def _library(report: NsightReport, origins: Origins, table: str) -> Columns:
    rows = report.events(table, ("globalTid", "nameId"))
    return event_columns(table, rows) | {
        "name": _named(report, rows["nameId"], report.string),
        "category": np.full(len(rows), report.strings[LIBRARIES[table]]),
        "thread": origins.threads_of(rows["globalTid"]),
    }


def _on_gpu(table: str, rows: Array, origins: Origins, category: int) -> Columns:
    return event_columns(table, rows) | {
        "category": np.full(len(rows), category),
        "device": origins.gpus_of(rows["globalPid"], rows["deviceId"]),
        "stream": minus_one_for_missing(rows["streamId"]),
        "correlation": origins.correlations(rows["globalPid"], rows["correlationId"]),
    }


def _concatenated(kind: str, parts: Sequence[Columns]) -> Columns:
    """Concatenate the rows of several tables; columns that one of them lacks are unknown in its rows."""
    return {
        name: np.concatenate([part.get(name, np.full(len(part["start_ns"]), missing, dtype)) for part in parts])
        for name, (dtype, missing) in COLUMNS[kind].items()
        if any(name in part for part in parts)
    }


def _named(report: NsightReport, values: Array, name: Callable[[int], str]) -> Array:
    return map_unique(values, lambda value: report.strings[name(value)])


def _label(labels: Sequence[str], number: int) -> str:
    return labels[number] if 0 <= number < len(labels) else "Unknown"


def _combined(function: np.ufunc, rows: Array, names: Sequence[str]) -> Array:
    """Return the product or the sum of columns; -1 if one of them is missing."""
    values = np.stack([rows[name] for name in names])
    return np.where((values == MISSING).any(axis=0), -1, function.reduce(values, axis=0))


def _end_ns(columns: Columns) -> int:
    return int((columns["start_ns"] + columns["duration_ns"]).max(initial=0))
