"""Reads rocprofv3's CSV files: that of the kernels, and those beside it of copies, calls and markers."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from ...base.errors import TraceError
from ...base.units import natural_key
from ..kineto.text import event_limit, text_limit
from ..tables.lanes import map_strings
from ..tables.links import assemble
from ..tables.table import Array, TooLargeError, natural
from ..tables.trace import Device, ReadLosses, Trace
from .rocm import RocmColumns

_KERNELS, _COPIES, _MARKERS = "kernel_trace.csv", "memory_copy_trace.csv", "marker_api_trace.csv"
_CALLS = ("hip_api_trace.csv", "hip_runtime_api_trace.csv", "hsa_api_trace.csv", "rccl_api_trace.csv")
_KINDS = (_KERNELS, _COPIES, _MARKERS, *_CALLS)
_NUMBERS = {
    **{"start_ns": "start_timestamp", "end_ns": "end_timestamp", "correlation": "correlation_id"},
    **{"thread": "thread_id", "queue": "queue_id", "stream": "stream_id"},
    **{"registers": "vgpr_count", "shared_bytes": "lds_block_size"},
    **{axis: f"grid_size_{axis}" for axis in "xyz"},
    **{axis: f"workgroup_size_{axis.lower()}" for axis in "XYZ"},
}
_TEXTS = {"name": ("kernel_name", "direction", "function"), "kind": ("domain", "kind")}
_AGENTS = ("agent_id", "source_agent_id", "destination_agent_id")
_Rows = list[dict[str, str]]


def read_rocprof_csv(path: Path) -> Trace:
    """Read the files of one process, of which ``path`` is one; their names differ in what they hold.

    They have no sizes of copies, and do not say which calls are inside of others.

    Raises:
        TraceError: no file has an event.
        TooLargeError: a file holds more than one of its size can.
        OSError: a file cannot be opened.
    """
    own = next((kind for kind in _KINDS if path.name.endswith(kind)), _KERNELS)
    prefix = path.name.removesuffix(own)
    files = {kind: path if kind == own else path.with_name(prefix + kind) for kind in _KINDS}
    lost = ReadLosses()
    rows = {kind: _rows(file, lost) for kind, file in files.items() if file.is_file()}
    columns = RocmColumns(sum(text_limit(files[kind]) for kind in rows))
    gpus = _gpus(path.with_name(f"{prefix}agent_info.csv"), rows.get(_KERNELS, []))
    for number, (kind, own_rows) in enumerate(rows.items()):
        part = _columns(own_rows, columns, gpus) | {"event": np.arange(len(own_rows)) + (number << 40)}
        if kind == _KERNELS:
            columns.add_kernels(part)
        elif kind == _COPIES:
            columns.add_memcpys(part | {"operation": part["name"]})
        elif kind == _MARKERS:
            text = map_strings(columns.strings, part["name"], lambda name: name * (not name.startswith("roctx")))
            columns.add_markers(part | {"text": text, "name": np.full(len(text), columns.strings["roctxRange"])})
        else:
            columns.add_calls(part)
    tables = columns.tables()
    if not tables:
        raise TraceError(path, "it has no event")
    return assemble(
        path,
        "rocprof",
        tables,
        columns.strings,
        columns.threads({}),
        devices=list(gpus.values()),
        metadata={},
        lost=lost,
    )


def _rows(path: Path, lost: ReadLosses) -> _Rows:
    """Return the rows with a start and an end, by the names of columns in lower case."""
    rows = list(_table(path))
    whole = [row for row in rows if natural(row.get("end_timestamp")) >= natural(row.get("start_timestamp")) >= 0]
    if len(whole) < len(rows):
        lost.add(f"{path.name}: rows without times", events=len(rows) - len(whole))
    return whole


def _table(path: Path) -> Iterable[dict[str, str]]:
    limit = event_limit(path)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            lines = list(islice(csv.reader(line.replace("\0", "") for line in file), limit + 2))
        except csv.Error as error:  # such as a field of more than 128 kB
            raise TraceError(path, f"it is no CSV of rocprofv3: {error}") from None
    if len(lines) > limit + 1:
        raise TooLargeError(f"it holds more than {limit:,} rows, too many for its size")
    names = [name.lower() for name in lines[0]] if lines else []
    return (dict(zip(names, line, strict=False)) for line in lines[1:])


def _columns(rows: _Rows, columns: RocmColumns, gpus: dict[str, Device]) -> dict[str, Array]:
    part: dict[str, Array] = {
        name: np.array([natural(row.get(title)) for row in rows], np.int64) for name, title in _NUMBERS.items()
    }
    for name, titles in _TEXTS.items():
        texts = (next((row[title] for title in titles if title in row), "") for row in rows)
        part[name] = np.array([columns.strings[text] for text in texts], np.int64)
    agents = ([row[title] for title in _AGENTS if row.get(title) in gpus] for row in rows)
    devices = [gpus[own[0]] if own else None for own in agents]
    part["device"] = np.array([-1 if device is None else device.id for device in devices], np.int64)
    part["sms"] = np.array([0 if device is None else device.sms for device in devices], np.int64)
    process = next((natural(row["process_id"]) for row in rows if "process_id" in row), 0)
    part["thread"] = columns.thread(max(process, 0), part["thread"])
    part["duration_ns"] = part.pop("end_ns") - part["start_ns"]
    return part | {"ancestor": np.full(len(rows), -1)}


def _gpus(path: Path, kernels: _Rows) -> dict[str, Device]:
    """Return the GPUs that ran kernels, numbered in order, by their names in other files, such as "Agent 4"."""
    said = list(_table(path)) if path.is_file() else []
    gpus = {}
    for number, agent in enumerate(sorted({row.get("agent_id", "") for row in kernels}, key=natural_key)):
        own = [row for row in said if row.get("logical_node_id") == agent.rpartition(" ")[2]]
        row = next((row for row in own if row.get("agent_type") == "GPU"), {})
        sms, waves, threads = (
            max(natural(row.get(name)), 0) for name in ("cu_count", "max_waves_per_cu", "wave_front_size")
        )
        gpus[agent] = Device(number, row.get("product_name", ""), sms, waves * threads)
    return gpus
