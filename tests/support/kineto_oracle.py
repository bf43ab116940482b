"""The expected columns of each table, computed event by event from the `json` module's reading of the file."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from instrument.read.tables.table import COLUMNS, TEXT
from instrument.read.tables.trace import Trace

Event = dict[str, Any]
Row = dict[str, Any]

_DERIVED = {
    "short_name", "family", "parent", "launch", "operator", "region", "module", "step",
    "domain", "color", "payload",
}  # fmt: skip
_RUNTIME = ("cuda_runtime", "cuda_driver", "runtime", "mtia_runtime", "xpu_runtime", "privateuse1_runtime")
_TABLES = {
    **dict.fromkeys(("cpu_op", "operator"), "operators"),
    **dict.fromkeys(_RUNTIME, "runtime"),
    **dict.fromkeys(("kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "mtia_ccp_events"), "gpu"),
    "user_annotation": "regions",
    "python_function": "frames",
    "gpu_user_annotation": "gpu_regions",
    "cuda_sync": "syncs",
}
_STEP = re.compile(r"ProfilerStep#(\d+)")


def events_of(path: Path) -> list[Event]:
    """Return the events of an undamaged file, with decimal numbers as Decimal."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    content = json.loads(text.decode("utf-8-sig"), parse_float=Decimal)
    events: list[Event] = content if isinstance(content, list) else content["traceEvents"]
    return events


def check_columns(trace: Trace, events: Sequence[Event]) -> None:
    """Compare every column of every table with the events of the file."""
    expected = expected_rows(events)
    for kind, columns in COLUMNS.items():
        table, rows = getattr(trace, kind), expected[kind]
        assert len(rows) == len(table), kind
        for column in columns.keys() - _DERIVED:
            if column == "thread":
                found: list[Any] = [
                    (trace.threads[code].process, trace.threads[code].thread) if code >= 0 else None
                    for code in table.thread.tolist()
                ]
            elif column in TEXT and (kind, column) != ("gpu", "category"):
                found = table.text(column)
            else:
                found = table[column].tolist()
            if column in ("shapes", "types", "scalars"):
                found = [json.loads(text) if text else None for text in found]
            if columns[column][0] == "f8":
                found = [None if math.isnan(value) else value for value in found]
            assert [row[column] for row in rows] == found, f"{kind}.{column}"


def expected_rows(events: Sequence[Event]) -> dict[str, list[Row]]:
    """Return the rows of each table by column; unknown values are None or as in `COLUMNS`."""
    rows: dict[str, list[Row]] = {kind: [] for kind in COLUMNS}
    for number, event in enumerate(events):
        kind = _kind(event)
        if kind == "counters":
            rows[kind] += _counters(number, event)
        elif kind is not None:
            rows[kind].append(_row(kind, number, event))
    _take_others(rows)
    _part_steps(rows)
    for part in rows.values():
        part.sort(key=lambda row: (row["start_ns"], -row["duration_ns"], row["event"]))
    work = rows["operators"] or rows["regions"]
    if rows["steps"] and work and all(row["start_ns"] < rows["steps"][-1]["start_ns"] for row in work):
        rows["steps"].pop()
    return rows


def _take_others(rows: dict[str, list[Row]]) -> None:
    """Make regions of the events that last, in a file without any event of torch.profiler on the CPU."""
    of_torch = ("operators", "regions", "frames", "runtime", "gpu_regions", "syncs", "memory")
    if any(rows[kind] for kind in of_torch) or {row["category"] for row in rows["others"]} & {"trace", "overhead"}:
        return
    taken = [row for row in rows["others"] if row["duration_ns"] > 0]
    rows["others"] = [row for row in rows["others"] if row["duration_ns"] <= 0]
    unknown = {"category": "", "external": -1, "correlation": -1}
    rows["regions"] = [row | {name: value for name, value in unknown.items() if name in row} for row in taken]


def _kind(event: Event) -> str | None:
    phase = event.get("ph")
    if phase == "X":
        return _TABLES.get((event.get("cat") or "").lower(), "others")
    if phase in ("i", "I", "R"):
        return "memory" if event.get("name") == "[memory]" else "others"
    return "counters" if phase == "C" else None


def ns(us: Any) -> int:
    """Return microseconds as exact nanoseconds."""
    return int(Decimal(us) * 1000)


def _timed(number: int, event: Event) -> Row:
    return {
        "start_ns": ns(event.get("ts", 0)),
        "duration_ns": max(ns(event.get("dur", 0)), 0),
        "name": event.get("name", ""),
        "event": number,
        "thread": (event.get("pid", ""), event.get("tid", "")),
    }


def _integer(args: Any, name: str, missing: int = -1, bits: int = 64) -> int:
    value = args.get(name) if isinstance(args, dict) else None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 2 ** (bits - 1) else missing


def _real(args: Any, name: str) -> float | None:
    value = args.get(name) if isinstance(args, dict) else None
    return float(value) if isinstance(value, (int, Decimal)) else None


def _text(args: Any, name: str) -> str:
    value = args.get(name) if isinstance(args, dict) else None
    return value if isinstance(value, str) else ""


def _plain(value: Any) -> Any:
    """Return a value with Decimals as floats."""
    return json.loads(json.dumps(value, default=float))


def _place(category: str, args: Any, name: str, place: Any) -> int:
    if category in ("gpu_user_annotation", "mtia_ccp_events"):
        return place if isinstance(place, int) and abs(place) < 2**31 else -1
    return _integer(args, name, bits=32 if name == "device" else 64)


def _product(args: Any, name: str) -> int:
    sizes = args.get(name) if isinstance(args, dict) else None
    return math.prod(sizes) if sizes else -1


def _row(kind: str, number: int, event: Event) -> Row:
    args = event.get("args", {})
    row = _timed(number, event)
    external = _integer(args, "External id")
    row["external"] = external if external >= 0 else _integer(args, "external id")
    row["correlation"] = _integer(args, "correlation") or -1
    category = (event.get("cat") or "").lower()
    if kind == "operators":
        row["sequence"] = _integer(args, "Sequence number")
        for column, name in (("shapes", "Input Dims"), ("types", "Input type")):
            row[column] = _plain(args[name]) if isinstance(args, dict) and name in args else None
        has_scalars = "convolution" in row["name"] or row["name"] in ("c10d::send", "c10d::recv_")
        row["scalars"] = _plain(args.get("Concrete Inputs")) if has_scalars and isinstance(args, dict) else None
        communicates = row["name"] == "record_param_comms"
        peer = max(-1, _integer(args, "Src Rank"), _integer(args, "Dst Rank"))
        row["group"] = _text(args, "Process Group Name") if communicates else ""
        row["peer"] = peer if communicates and peer < 2**31 - 1 else -1
    elif kind == "memory":
        names = ("Bytes", "Addr", "Device Type", "Device Id", "Total Allocated", "Total Reserved")
        columns = ("bytes", "address", "device_type", "device", "allocated_bytes", "reserved_bytes")
        for column, name in zip(columns, names, strict=True):
            bits = 32 if column.startswith("device") else 64
            row[column] = _integer(args, name, 0 if column == "bytes" else -1, bits)
    elif kind in ("gpu", "gpu_regions", "syncs"):
        row["device"] = _place(category, args, "device", event.get("pid"))
        row["stream"] = _place(category, args, "stream", event.get("tid"))
    if kind == "gpu":
        row |= _gpu(args)
        copies = "memcpy" in category or row["name"] == "dma_request"
        row["category"] = 2 if copies else 3 if "memset" in category else 1
    elif kind == "regions":
        row["category"] = ""
    else:
        row["category"] = category
    return row


def _gpu(args: Any) -> Row:
    size = _integer(args, "bytes")
    return {
        "bytes": size if size >= 0 else _integer(args, "size"),
        "blocks": _product(args, "grid"),
        "block_threads": _product(args, "block"),
        "registers": _integer(args, "registers per thread", bits=32),
        "shared_bytes": _integer(args, "shared memory"),
        "blocks_per_sm": _real(args, "blocks per SM"),
        "occupancy_percent": _real(args, "est. achieved occupancy %"),
        "collective": _text(args, "Collective name"),
        "group": _text(args, "Process Group Name"),
        "elements_in": _integer(args, "In msg nelems"),
        "elements_out": _integer(args, "Out msg nelems"),
        "dtype": _text(args, "dtype"),
    }


def _counters(number: int, event: Event) -> list[Row]:
    args = event.get("args")
    rows = []
    for series, value in args.items() if isinstance(args, dict) else ():
        if type(value) in (int, Decimal) and abs(value) < Decimal("1e308"):
            own = event.get("name", "")
            name = own if series in ("", own) else f"{own}: {series}"
            about = {"device": -1, "unit": unit[0] if (unit := re.findall(r"[(](\w+)[)]$", name)) else ""}
            rows.append(_timed(number, event) | about | {"name": name, "value": float(value)})
    return rows


def _part_steps(rows: dict[str, list[Row]]) -> None:
    for kind in ("regions", "operators"):
        steps = [row for row in rows[kind] if _STEP.fullmatch(row["name"])]
        if steps and not rows["steps"]:
            rows["steps"] = [row | {"number": int(row["name"].split("#")[1])} for row in steps]
            rows[kind] = [row for row in rows[kind] if not _STEP.fullmatch(row["name"])]
