"""The page of a trace: its steps, timeline, flame graph, tables, GPUs and links. Nothing is diagnosed for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import Any

import numpy as np

from ...base.printable import shown_name
from ...base.units import count, counted, duration
from ...read.charts.flame import flame_of
from ...read.charts.timeline import TimelineSource, lanes_of, timeline_of
from ...read.tables.steps import StepIndex, gpu_work, span, steps_of_process
from ...read.tables.table import COLUMNS, Table
from ...read.tables.trace import MODULE, Trace
from ...read.tables.work_classes import communication_mask
from ..page.document import document, samples_section, summary_section, table_section


def page_of(trace: Trace) -> str:
    """Return the text of the page."""
    tables = {name: getattr(trace, name) for name in COLUMNS}
    first = min((_bounds(rows)[0] for rows in tables.values() if rows), default=0)
    sections = (
        _summary(trace, tables),
        _steps(trace),
        _timeline(trace, first),
        _flame(trace),
        _tables(tables, first),
        _devices(trace),
        _coverage(trace),
    )
    return document(
        shown_name(trace.path.name),
        shown_name(f"{counted(sum(map(len, tables.values())), 'event')} in {trace.format} format"),
        sections,
    )


def _summary(trace: Trace, tables: Mapping[str, Table]) -> dict[str, Any]:
    bounds = [_bounds(rows) for rows in tables.values() if rows]
    figures = [("steps", count(len(trace.steps))), ("GPU operations", count(len(trace.gpu)))]
    if bounds:
        recorded_ns = max(end for _, end in bounds) - min(start for start, _ in bounds)
        figures.insert(0, ("from the first event to the last", duration(recorded_ns)))
    if trace.rank is not None:
        of = "" if trace.world_size is None else f" of {count(trace.world_size)}"
        figures.append(("rank", f"{trace.rank}{of}"))
    return summary_section("Summary", figures, _notes(trace))


def _notes(trace: Trace) -> Iterator[str]:
    yield str(trace.path)
    if trace.lost:
        yield f"Lost: {counted(trace.lost.events, 'event')} and {counted(trace.lost.bytes, 'byte')}."
    for name, unread in trace.unread_devices.items():
        yield f"Not read: {counted(unread.events, 'event')} of {name}."
    yield "instrument.diagnose(trace) says what is slow, and why."


def _steps(trace: Trace) -> dict[str, Any] | None:
    lengths = trace.steps.duration_ns.tolist() if trace.steps else []
    return samples_section("Steps", [("on the CPU", lengths, median_low(lengths))]) if lengths else None


def _timeline(trace: Trace, first: int) -> dict[str, Any] | None:
    modules = trace.frames.where(trace.frames.matching("name", MODULE))
    window = span(trace.steps, trace.regions, modules, trace.operators, trace.runtime, trace.gpu)
    source = TimelineSource(trace, trace.gpu, communication_mask(trace.gpu), window, first)
    streams, threads, notes = lanes_of(source)
    return timeline_of(source, streams + threads, notes)


def _flame(trace: Trace) -> dict[str, Any] | None:
    gpu = trace.gpu.where(gpu_work(trace, StepIndex(trace)).counted)
    steps = len(steps_of_process(trace))
    each = "per step" if steps else "in the trace"
    return flame_of(trace, gpu, communication_mask(gpu), max(steps, 1), each)


def _tables(tables: Mapping[str, Table], first: int) -> dict[str, Any] | None:
    columns = {"Table": "text", "Rows": "count", "First start": "ns", "Last end": "ns", "Memory": "bytes"}
    rows = [
        [name, len(rows), start - first, end - first, sum(column.nbytes for column in rows.values())]
        for name, rows in tables.items()
        if rows
        for start, end in [_bounds(rows)]
    ]
    caption = "The tables that have rows; times count from the first event"
    return table_section("tables", "Tables", caption, columns, rows, shows_empty=True)


def _devices(trace: Trace) -> dict[str, Any] | None:
    named = {device.id: device for device in trace.devices}
    numbers = sorted({*named, *np.unique(trace.gpu.device).tolist()} if trace.gpu else named)
    columns = {
        "GPU": "text", "Number": "count", "Multiprocessors": "count", "Memory": "bytes", "Operations": "count",
        "Sum of durations": "ns",
    }  # fmt: skip
    rows = []
    for number in numbers:
        device, work = named.get(number), trace.gpu.duration_ns[trace.gpu.device == number]
        name, about = "", list[int | None]([None, None])
        if device:
            name, about = shown_name(device.name), [device.sms or None, device.memory_bytes or None]
        rows.append([name, number, *about, len(work), int(work.sum())])
    return table_section("gpus", "GPUs", "The GPUs of the trace", columns, rows)


def _coverage(trace: Trace) -> dict[str, Any] | None:
    columns = {
        "Linked to": "text", "Linked": "count", "Of": "count", "Share": "percent", "Share of the time": "percent",
    }  # fmt: skip
    rows = [
        [shown_name(name), each.linked, each.of, each.linked / each.of, each.linked_ns / max(each.of_ns, 1)]
        for name, each in trace.coverage.items()
        if each.of
    ]
    caption = "GPU operations with a link to other events"
    return table_section("coverage", "Coverage", caption, columns, rows)


def _bounds(rows: Table) -> tuple[int, int]:
    """Return the first start and the last end of the rows, of which there are some."""
    return int(rows.start_ns.min()), int(rows.end_ns.max())
