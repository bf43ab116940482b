"""Reads reports of Nsight Systems (NVTX ranges, CUDA calls, GPU work), and kernels in those of Nsight Compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import TraceError
from ..tables.lanes import map_unique
from ..tables.links import assemble
from ..tables.table import COLUMNS, KERNEL, MEMCPY, MEMSET, Array, join_parts
from ..tables.trace import Trace
from .nsight_metrics import read_metrics
from .nsight_report import (
    CALLS,
    GRAPHS,
    KERNELS,
    LATEST,
    LIBRARIES,
    MEMCPYS,
    MEMSETS,
    MISSING,
    RANGES,
    SYNCS,
    NsightReport,
    Origins,
    epoch_ns,
    event_columns,
    metadata,
    minus_one_for_missing,
    open_report,
    rank_and_world,
)

_CATEGORY, _DOMAIN = 33, 75
_MARKS = (34, 65)
_START_END = 60
_SPANS = (59, _START_END, 70, 71)  # the last two, and mark 65, were imported from text files
_ID = 0xFFFFFFFF
_PAYLOAD = (
    *("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue"),
    *("jsonText", "binaryData"),
)
_STEP = re.compile(r"[0-9]{1,18}")
Columns = dict[str, Array]

_OWN_DOMAIN = "instrument"  # the domain in which this library marks windows and steps


def read_nvtx_ranges(report: NsightReport, origins: Origins, last_ns: int) -> tuple[dict[str, Columns], int]:
    """Read ranges and marks; a range that another thread ended belongs to the thread that started it.

    Returns:
        The columns of the tables of regions, of the steps of `instrument.profile`, and of others: marks and its
        windows. And the number of ranges without an end, which last until the end of all events. (If nsys knows
        when the program ended, it writes that as the end.)

    Args:
        report: the open report.
        origins: the threads and processes of the report.
        last_ns: the last time in all other tables.
    """
    rows = _rows(report, origins)
    mark = np.isin(rows["eventType"], _MARKS)
    unfinished = ~mark & (rows["end"] == MISSING)
    times = np.concatenate((rows["start"], rows["end"]))
    rows["end"][unfinished] = times[times < LATEST].max(initial=last_ns)
    rows["end"][mark] = rows["start"][mark]
    rows = report.drop_invalid_times(RANGES, rows)

    strings, texts = report.strings, list(report.strings)
    mark = np.isin(rows["eventType"], _MARKS)
    own = (rows["domainId"] == strings[_OWN_DOMAIN]) & (rows["eventType"] == _START_END)
    number = map_unique(rows["payload"], lambda code: int(texts[code]) if _STEP.fullmatch(texts[code]) else -1)
    step = own & (rows["text"] == strings["step"]) & (number >= 0)
    window = own & (rows["text"] == strings["capture"])

    columns = event_columns(RANGES, rows) | {"name": rows["text"], "thread": origins.threads_of(rows["globalTid"])}
    looks = {name: rows[name] for name in ("category", "color", "payload")} | {"domain": rows["domainId"]}
    kinds = {"category": np.where(mark, strings["mark"], strings["capture"])}
    rows_of = {
        "regions": (columns | looks, ~(mark | step | window)),
        "steps": (columns | {"number": number}, step),
        "others": (columns | kinds, mark | window),
    }
    tables = {
        table: {name: column[chosen] for name, column in own.items()}
        for table, (own, chosen) in rows_of.items()
        if table != "steps" or chosen.any()
    }
    return tables, int(unfinished.sum())


def _rows(report: NsightReport, origins: Origins) -> Array:
    """Return ranges and marks, with numbers of strings as text, payload, domainId and category."""
    numbers = ("start", "end", "eventType", "category", "color", "textId", "jsonTextId", "globalTid", "domainId")
    rows = report.rows(RANGES, numbers, text=("text",), payload=_PAYLOAD)
    for column, shared in (("text", "textId"), ("payload", "jsonTextId")):
        empty = rows[column] == 0
        rows[column][empty] = map_unique(rows[shared][empty], lambda id: report.strings[report.string(id)])

    # Each process numbers its domains, and each domain its categories.
    process = origins.processes_of(rows["globalTid"])
    domains = (process << 32) + (np.where(rows["domainId"] == MISSING, 0, rows["domainId"]) & _ID)
    places = np.unique(domains, return_inverse=True)[1]
    categories = (places << 32) + (np.where(rows["category"] == MISSING, 0, rows["category"]) & _ID)
    domain_names = _names(rows, domains, _DOMAIN)
    category_names = _names(rows, categories, _CATEGORY)

    chosen = np.isin(rows["eventType"], (*_SPANS, *_MARKS))
    rows, domains, categories = rows[chosen], domains[chosen], categories[chosen]
    rows["domainId"] = map_unique(domains, lambda key: domain_names.get(key, _number(report, key & _ID)))
    rows["category"] = map_unique(categories, lambda key: category_names.get(key, _number(report, key & _ID)))
    rows["color"] = np.where(rows["color"] == MISSING, -1, rows["color"] & 0xFFFFFFFF)
    return rows


def _names(rows: Array, keys: Array, kind: int) -> dict[int, int]:
    """Return the names of domains or categories; the first name counts."""
    named = np.flatnonzero(rows["eventType"] == kind)
    named = named[np.argsort(rows["start"][named], kind="stable")][::-1]
    return dict(zip(keys[named].tolist(), rows["text"][named].tolist(), strict=True))


def _number(report: NsightReport, number: int) -> int:
    """Return the string for a number without a name; 0, the default domain and no category, is empty."""
    return report.strings[str(number) if number else ""]


_ON_GPU = ("deviceId", "streamId", "correlationId", "globalPid")
_NAMES = ("demangledName", "shortName", "mangledName")
_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")
# As in cudaLaunchKernel_v7000; the suffix of cuMemAlloc_v2 is part of the name.
_VERSION = re.compile(r"_v\d{4,}$")
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
    `Trace.others`; sampled metrics of a GPU's SMs, memory and clock are in `Trace.counters`.
    ``metadata["unfinished_ranges"]`` is the number of ranges without an end, which last until the end of the
    trace.

    `Trace.args` reads the file again, and exports a ``.nsys-rep`` again.

    Raises:
        TraceError: the file is not a report, or nsys is needed and is not installed or fails.
        OSError: the file cannot be opened.
    """
    with open_report(path) as report:
        origins = Origins(report)
        columns = {
            "gpu": join_parts(
                COLUMNS["gpu"], [read(report, origins) for read in (_kernels, _graphs, _memcpys, _memsets)]
            ),
            "runtime": _calls(report, origins),
            "syncs": _syncs(report, origins),
            "others": join_parts(COLUMNS["others"], [_library(report, origins, table) for table in LIBRARIES]),
        }
        ends = [(part["start_ns"] + part["duration_ns"]).max(initial=0) for part in columns.values()]
        ranges, unfinished = read_nvtx_ranges(report, origins, int(max(ends)))
        others = [columns["others"], ranges["others"]]
        columns |= ranges | {"others": join_parts(COLUMNS["others"], others)}
        if metrics := read_metrics(report):
            columns["counters"] = metrics
        processes = len(np.unique(columns["gpu"]["correlation"] >> 32))
        rank, world = rank_and_world(report) if processes <= 1 else (None, None)
        about = {"processes": origins.process_names(), "unfinished_ranges": unfinished}
        return assemble(
            path,
            "nsight systems",
            columns,
            report.strings,
            origins.threads(),
            devices=origins.devices,
            metadata=metadata(report) | about,
            lost=report.lost,
            rank=rank,
            world_size=world,
            epoch_ns=epoch_ns(report),
            look_up=partial(_look_up, path),
        )


def _look_up(path: Path, event: int) -> dict[str, Any]:
    with open_report(path) as report:
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


def _named(report: NsightReport, values: Array, name: Callable[[int], str]) -> Array:
    return map_unique(values, lambda value: report.strings[name(value)])


def _label(labels: Sequence[str], number: int) -> str:
    return labels[number] if 0 <= number < len(labels) else "Unknown"


def _combined(function: np.ufunc, rows: Array, names: Sequence[str]) -> Array:
    """Return the product or the sum of columns; -1 if one of them is missing."""
    values = np.stack([rows[name] for name in names])
    return np.where((values == MISSING).any(axis=0), -1, function.reduce(values, axis=0))


_METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


@dataclass(frozen=True)
class MeasuredKernel:
    """One launch of a kernel; percentages are of the peak of the GPU, None if not measured.

    Attributes:
        name: the function.
        region: the regions around the launch, outermost first.
        duration_ns: the duration, alone on the GPU and with empty caches.
        sm: the throughput of the multiprocessors, in percent.
        memory: the throughput of the memory including caches, in percent.
        occupancy: the active warps, in percent of the warps that fit.
    """

    name: str
    region: tuple[str, ...]
    duration_ns: float
    sm: float | None
    memory: float | None
    occupancy: float | None


def read_kernels(path: Path) -> list[MeasuredKernel]:
    """Return the measured kernels in order.

    Raises:
        ImportError: the package ncu-report is not installed.
        TraceError: the package cannot read the file.
    """
    try:
        import ncu_report  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ImportError("reading kernels needs the package ncu-report: pip install ncu-report") from None
    try:
        report = ncu_report.load_report(str(path))
        ranges = [report.range_by_idx(number) for number in range(report.num_ranges())]
        kernels = [_kernel(part.action_by_idx(number)) for part in ranges for number in range(part.num_actions())]
    except Exception as error:  # RuntimeError, or what SWIG makes of a C++ exception
        raise TraceError(path, str(error) or type(error).__name__) from error
    if not ranges:  # as for any file that the package cannot read
        raise TraceError(path, "it is not a report, or newer than the package ncu-report")
    return kernels


def _kernel(action: Any) -> MeasuredKernel:
    duration, *shares = (_metric(action.metric_by_name(name)) for name in _METRICS)
    return MeasuredKernel(action.name(), _region(action.nvtx_state()), duration or 0.0, *shares)


def _metric(metric: Any) -> float | None:
    return float(metric.as_double()) if metric is not None and metric.has_value() else None


def _region(state: Any) -> tuple[str, ...]:
    """Return the ranges of this library or, without any, of other domains."""
    if state is None:
        return ()
    domains = [state.domain_by_id(number) for number in state.domains()]
    own = [domain for domain in domains if domain.name() == _OWN_DOMAIN]
    return tuple(
        str(name) for domain in own or domains for name in (*domain.start_end_ranges(), *domain.push_pop_ranges())
    )
