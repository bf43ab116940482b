"""Assembles a trace: links GPU work to the call, operator, region, module and step that launched it.

Operators of PyTorch are recognized among named ranges: those of `emit_nvtx`, and of NVIDIA's pyprof.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.trace_marks import OVERLAPPING, STEP_PREFIX, STEPS
from ...base.units import counted
from .autograd import BackwardCallers, autograd_nodes, autograd_threads
from .counters import add_devices_and_units
from .kernel_names import add_names
from .lanes import is_among
from .nest import NestedRanges, parents_in_tasks
from .notes import about_ranks, metadata_of
from .steps import main_threads
from .table import COLUMNS, Array, Interner, Strings, Table, Tables, linked, table
from .trace import MODULE, Coverage, Device, ReadLosses, Thread, Trace

# What torch appends to the name of an operator or a record_function: getNvtxStr in torch/csrc/profiler/util.cpp.
_BEGIN = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = ")
_SUFFIX = re.compile(
    r"(?:, seq = (?P<seq>\d{1,18}))?(?P<id>, op_id = \d+)?(?:, sizes = (?P<sizes>\[[\d\[\], ]*\]))?"
    r"(?:, input_op_ids = \[.*\])?"
)
# A record_function of a program may have "::" in its name as well: FSDP's begin with a capital.
_OPERATOR = re.compile(r"[a-z_]\w*::[\w.]+|autograd::engine::.*|torch::autograd::.*|record_param_comms|detach_?")
_ALWAYS = re.compile(r"aten::[\w.]+|autograd::engine::evaluate_function: .*")
_MAX_TEXT = 1 << 16  # characters of a range of pyprof


class _Range(NamedTuple):
    """What the text of a range says; ``operator`` tells operators from regions."""

    name: str
    operator: bool
    sequence: int = -1
    shapes: str = ""
    types: str = ""
    payload: str = ""


def split_off_operators(columns: Tables, strings: Strings) -> None:
    """Move operators out of the regions, and shorten the names of regions that torch or pyprof wrote.

    Args:
        columns: the columns of the tables, as `assemble` takes them; changed in place.
        strings: the numbers of the strings in the columns; new names are added.
    """
    regions = columns.get("regions")
    if regions is None or not len(regions["name"]):
        return
    codes, rows = np.unique(regions["name"], return_inverse=True)
    texts = list(strings)
    ranges = {index: said for index, code in enumerate(codes.tolist()) if (said := _range(texts[code]))}
    if not ranges:
        return

    def column(default: Array, value: Callable[[_Range], int]) -> Array:
        values = default.copy()
        for index, said in ranges.items():
            values[index] = value(said)
        spread: Array = values[rows]
        return spread

    nothing = np.zeros(len(codes), np.int64)
    regions["name"] = column(codes, lambda said: strings[said.name])
    payload = column(nothing, lambda said: strings[said.payload])
    regions["payload"] = np.where(payload, payload, regions.get("payload", 0))
    operator = column(nothing, lambda said: said.operator) > 0
    columns["operators"] = {
        name: regions[name][operator] for name in ("start_ns", "duration_ns", "name", "event", "thread")
    } | {
        "sequence": column(nothing - 1, lambda said: said.sequence)[operator],
        "shapes": column(nothing, lambda said: strings[said.shapes])[operator],
        "types": column(nothing, lambda said: strings[said.types])[operator],
    }
    columns["regions"] = {name: values[~operator] for name, values in regions.items()}


def _range(text: str) -> _Range | None:
    """Return what the text of a range says; None for a range that the program named."""
    if text.startswith("{'"):
        return _pyprof(text)
    begin = _BEGIN.search(text)
    if not begin:
        return _Range(text, True) if _ALWAYS.fullmatch(text) else None
    name, suffix = text[: begin.start()], _SUFFIX.fullmatch(text, begin.start())
    if not suffix or not (suffix["seq"] or suffix["id"]):
        return None
    operator = suffix["seq"] is not None or _OPERATOR.fullmatch(name) is not None
    return _Range(name, operator, int(suffix["seq"] or -1), suffix["sizes"] or "")


def _pyprof(text: str) -> _Range | None:
    """Return what a dictionary of pyprof says: an operator, a module, or the Python stack around them."""
    if len(text) > _MAX_TEXT:
        return None
    try:
        said = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    match said:
        case {"mod": str(module), "op": str(function), "args": list(arguments)}:
            tensors = [each for each in arguments if isinstance(each, dict) and "shape" in each]
            return _Range(
                f"{module}.{function}",
                True,
                shapes=_json([each["shape"] for each in tensors]),
                types=_json([each.get("dtype", "") for each in tensors]),
            )
        case {"mod": str(module), "strRepr": str(arguments)}:
            return _Range(f"{module}({arguments})", False)
        case {"traceMarker": [*_, str(line)]}:  # the innermost frame comes last
            return _Range(line.replace("\\", "/").rpartition("/")[2], False, payload=line)
    return None


def _json(value: Any) -> str:
    try:
        return json.dumps(value) if value else ""
    except (TypeError, ValueError, RecursionError):
        return ""


MAX_DURATION_NS = 1 << 53
"""104 days; longer events are dropped."""

_SUM = 2.0**61
_MAX_QUANTITY = 1 << 50  # bytes or elements of one event
_QUANTITIES = {
    *("bytes", "blocks", "shared_bytes", "elements_in", "elements_out"),
    *("allocated_bytes", "reserved_bytes"),
}
_DEVICE = {"id": 1 << 31, "sms": 1 << 16, "threads_per_sm": 1 << 20, "memory_bytes": 1 << 50}
_EPOCH_NS = 1 << 61


def plausible_rows(kind: str, columns: dict[str, Array], lost: ReadLosses) -> dict[str, Array]:
    """Return the columns of a table without events that last too long, and with -1 for impossible quantities.

    Args:
        kind: the name of the table.
        columns: its columns by name.
        lost: records what is dropped.
    """
    if "duration_ns" in columns:
        too_long = _too_large(columns["duration_ns"], MAX_DURATION_NS)
        if too_long.any():
            lost.add(f"{kind}: events that last longer than a trace can", events=int(too_long.sum()))
            columns = {name: column[~too_long] for name, column in columns.items()}
    for name in _QUANTITIES & columns.keys():
        too_large = _too_large(columns[name], _MAX_QUANTITY)
        if too_large.any():
            lost.add(f"{kind}: impossible {name} of {counted(int(too_large.sum()), 'event')}")
            columns = columns | {name: np.where(too_large, COLUMNS[kind][name][1], columns[name])}
    return columns


def plausible_devices(devices: list[Device], lost: ReadLosses) -> list[Device]:
    """Return the devices that have a possible id, with 0 for their impossible numbers."""
    plausible = []
    for device in devices:
        given = {item.name: getattr(device, item.name) for item in fields(device)}
        impossible = [name for name, most in _DEVICE.items() if not 0 <= given[name] < most]
        if impossible:
            lost.add(f"a GPU with impossible {', '.join(impossible)}")
        if "id" not in impossible:
            plausible.append(Device(**given | dict.fromkeys(impossible, 0)))
    return plausible


def _too_large(values: Array, most: float) -> Array:
    """Return a mask of the values beyond ``most``, or beyond a limit that keeps the sum in 64 bits."""
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
    if largest <= most and largest * len(values) < _SUM:
        return np.zeros(len(values), bool)
    size = np.abs(values.astype(float))
    while size[size <= most].sum() >= _SUM:
        most /= 2
    too_large: Array = size > most
    return too_large


_STEP = re.compile(rf"^{STEP_PREFIX}(\d{{1,18}})$")
_RUN = re.compile(rf"{STEPS}=(\d{{1,18}})-(\d{{1,18}})")
_EMPTY = {"start_ns": np.empty(0, np.int64)}
_LINKS = ("launch", "operator", "region", "module", "step")


def assemble(
    path: Path,
    format: str,
    columns: Tables,
    strings: Strings,
    threads: list[Thread],
    *,
    devices: list[Device],
    metadata: Mapping[str, Any],
    lost: ReadLosses,
    rank: int | None = None,
    world_size: int | None = None,
    epoch_ns: int = 0,
    look_up: Callable[[int], dict[str, Any]] | None = None,
) -> Trace:
    """Make a trace from the columns that a reader found.

    Args:
        path: the file.
        format: as in `Trace`.
        columns: the known columns of each table of `COLUMNS`, with events in any order. The dict is emptied, which
            saves memory. Steps are found among the regions unless given.
        strings: the numbers of the strings that the columns hold.
        threads: by the numbers that the columns hold.
        devices: as in `Trace`.
        metadata: as in `Trace`.
        lost: as in `Trace`.
        rank: as in `Trace`.
        world_size: as in `Trace`.
        epoch_ns: as in `Trace`.
        look_up: returns the args of the event with a number.
    """
    if format != "kineto":
        split_off_operators(columns, strings)
    if "counters" in columns:
        add_devices_and_units(columns["counters"], strings, list(threads))
    texts = list(strings)
    tables: dict[str, Table] = {}
    if "steps" not in columns:
        _split_off_steps(columns, texts)
    _drop_fillers(columns, texts)
    for kind in COLUMNS:
        tables[kind] = _sorted(kind, plausible_rows(kind, columns.pop(kind, _EMPTY.copy()), lost), texts)
        if "parent" in COLUMNS[kind]:
            rows = tables[kind]
            rows.parent[:] = NestedRanges(rows.start_ns, rows.end_ns, rows.thread).parents
    nest = _nested(tables["regions"])
    tables["regions"].parent[:] = parents_in_tasks(tables["regions"], metadata, threads, texts)
    add_names(tables["gpu"], strings, texts)
    threads = list(threads)
    unplaced = _link(tables, nest, threads, _recorded_steps(metadata, texts))
    coverage = {link: link_coverage(tables["gpu"], link) for link in _LINKS}
    devices = plausible_devices(devices, lost)
    if not 0 <= epoch_ns < _EPOCH_NS:
        lost.add("an impossible start of the clock")
        epoch_ns = 0
    return Trace(
        path=path,
        format=format,
        **tables,
        strings=texts,
        threads=threads,
        devices=devices,
        metadata=metadata,
        rank=rank,
        world_size=world_size,
        epoch_ns=epoch_ns,
        lost=lost,
        steps_from="",
        unread_devices={},
        unplaced=unplaced,
        coverage=coverage,
        look_up=look_up,
    )


def _sorted(kind: str, columns: dict[str, Array], texts: list[str]) -> Table:
    start = columns["start_ns"]
    event, duration = (columns.get(name, np.zeros(len(start), np.int64)) for name in ("event", "duration_ns"))
    order = np.argsort(start, kind="stable")  # fast for rows in order, as those of one thread mostly are
    equal, tied = np.diff(start[order]) == 0, np.zeros(len(order), bool)
    tied[1:] |= equal
    tied[:-1] |= equal
    rows = order[tied]
    order[tied] = rows[np.lexsort((event[rows], -duration[rows], start[rows]))]
    return table(kind, {name: columns.pop(name)[order] for name in list(columns)}, texts)


def _split_off_steps(columns: Tables, texts: list[str]) -> None:
    """Move the steps out of the regions, or out of the operators in traces of 2021."""
    numbers = {code: int(match[1]) for code, text in enumerate(texts) if (match := _STEP.fullmatch(text))}
    for kind, part in [(kind, columns[kind]) for kind in ("regions", "operators") if kind in columns]:
        step = np.isin(part["name"], list(numbers))
        if step.any() and "steps" not in columns:
            step_columns = {name: part[name][step] for name in COLUMNS["steps"] if name in part}
            step_columns["number"] = np.array([numbers[code] for code in step_columns["name"].tolist()])
            columns["steps"] = step_columns
            columns[kind] = {name: column[~step] for name, column in part.items()}


def _drop_fillers(columns: Tables, texts: list[str]) -> None:
    """Remove ranges that exist only for the GPU's lane and are not regions of the program."""
    part = columns.get("regions")
    if part is not None and OVERLAPPING in texts:
        kept = part["name"] != texts.index(OVERLAPPING)
        columns["regions"] = {name: column[kept] for name, column in part.items()}


def _link(
    tables: dict[str, Table], regions: NestedRanges, threads: list[Thread], run: list[tuple[int, int]]
) -> int:
    """Fill the columns that link to rows of other tables; return `Trace.unplaced`."""
    gpu, runtime, operators = (tables[kind] for kind in ("gpu", "runtime", "operators"))
    numbers: Interner[Any] = Interner()
    # The last element is for thread -1.
    process_of = np.array([*(numbers[thread.process] for thread in threads), -1])
    # Tools that rewrite traces drop the correlation ids, and keep these.
    ids = "correlation" if (gpu.correlation >= 0).any() or (runtime.correlation >= 0).any() else "external"
    gpu.launch[:] = _match_rows(gpu[ids], runtime[ids])
    gpu.launch[
        is_among(gpu.correlation, _ambiguous_correlations(runtime, process_of)) if len(numbers) > 1 else []
    ] = -1
    launched = gpu.launch >= 0
    thread, at = linked(runtime.thread, gpu.launch), linked(runtime.start_ns, gpu.launch, 0)
    gpu.operator[:] = _nested(operators).innermost_at(at, thread)

    # In traces of 2022 the external id is a copy of the correlation id, and does not name an operator.
    external = np.where(~launched & (gpu.external != gpu.correlation), gpu.external, -1)
    named = _match_rows(external, operators.external)
    by_id = named >= 0
    gpu.operator[by_id] = named[by_id]
    thread[by_id], at[by_id] = operators.thread[named[by_id]], operators.start_ns[named[by_id]]

    tables["steps"] = _steps_that_ran(tables, at[thread >= 0], run)
    gpu.region[:] = regions.innermost_at(at, thread)
    modules = np.flatnonzero(tables["frames"].matching("name", MODULE))
    frames = tables["frames"].where(modules)
    innermost = NestedRanges(frames.start_ns, frames.end_ns, frames.thread).innermost_at(at, thread)
    gpu.module[:] = linked(modules, innermost)
    return _link_processes(tables, regions, threads, (thread, at), process_of)


def _nested(rows: Table) -> NestedRanges:
    return NestedRanges(rows.start_ns, rows.end_ns, rows.thread, rows.parent.copy())


def _link_processes(
    tables: dict[str, Table],
    nest: NestedRanges,
    threads: list[Thread],
    launches: tuple[Array, Array],
    process_of: Array,
) -> int:
    """Link what lies outside the regions of its own thread to the regions of another, and GPU work to steps.

    Regions and launches of autograd threads belong to the regions of the thread that waits for the backward pass,
    launches of other threads to the regions of the thread of the steps.
    """
    gpu, steps, regions = tables["gpu"], tables["steps"], tables["regions"]
    nodes = autograd_nodes(tables["operators"])
    autograd = autograd_threads(threads, regions, nodes, steps.thread)
    for number in np.flatnonzero(autograd).tolist():
        threads[number] = replace(threads[number], autograd=True)
    main = main_threads(steps, regions.where(~autograd[regions.thread]), process_of)
    thread, at = launches
    process = process_of[thread]
    around = main[process]
    elsewhere = np.flatnonzero((process >= 0) & (gpu.region < 0) & (thread != around))
    unplaced = 0
    if autograd.any():
        callers = BackwardCallers(regions, nodes, autograd, main, process_of)
        unplaced = _set_backward_parents(regions, nest, callers, autograd)
        backward = elsewhere[autograd[thread[elsewhere]]]
        around[backward] = callers.find(at[backward], thread[backward])[0]
    gpu.region[elsewhere] = _innermost_open(nest, at[elsewhere], around[elsewhere])
    step = NestedRanges(steps.start_ns, steps.end_ns, process_of[steps.thread]).innermost_at(at, process)
    gpu.step[:] = np.where(process >= 0, step, -1)
    return unplaced


def _set_backward_parents(regions: Table, nest: NestedRanges, callers: BackwardCallers, autograd: Array) -> int:
    """Set the parents of the outermost regions of autograd threads; return how many have several candidates."""
    rows = np.flatnonzero(autograd[regions.thread] & (regions.parent < 0))
    caller, unclear = callers.find(regions.start_ns[rows], regions.thread[rows])
    parent = _innermost_open(nest, regions.start_ns[rows], caller)
    while (later := parent > rows).any():  # of regions that start together, the longest comes first
        parent[later] = nest.parents[parent[later]]
    regions.parent[rows] = parent
    return int(unclear.sum())


def _innermost_open(nest: NestedRanges, times_ns: Array, threads: Array) -> Array:
    """Return the innermost range that is open on each thread at each time; -1 for thread -1."""
    return np.where(threads >= 0, nest.innermost_at(times_ns, threads), -1)


def _ambiguous_correlations(runtime: Table, process_of: Array) -> Array:
    """Return the correlation ids that several processes use: their work cannot be assigned to a process."""
    process, keys = process_of[runtime.thread], runtime.correlation
    order = np.lexsort((process, keys))
    process, keys = process[order], keys[order]
    several: Array = keys[1:][(keys[1:] == keys[:-1]) & (process[1:] != process[:-1])]
    return several


def _recorded_steps(metadata: Mapping[str, Any], texts: list[str]) -> list[tuple[int, int]]:
    """Return the first and last step of each window, which `instrument.profile` records as metadata or a mark."""
    marks = [text for text in texts if text.startswith(f"{STEPS}=")]
    files = (metadata, *map(metadata_of, about_ranks(metadata).values()))
    said = map(_RUN.fullmatch, [*marks, *(f"{STEPS}={each.get(STEPS)}" for each in files)])
    return [(int(match[1]), int(match[2])) for match in said if match]


def _steps_that_ran(tables: dict[str, Table], launches_ns: Array, run: list[tuple[int, int]]) -> Table:
    """Return the steps that ran: a loop announces one more step before it ends.

    If the trace does not record which steps ran, a last step in which nothing starts is dropped.
    """
    steps, work = tables["steps"], tables["operators"] or tables["regions"]
    if run:
        first, last = np.array(sorted(run)).T
        at = np.searchsorted(first, steps.number, "right") - 1
        return steps.where((at >= 0) & (steps.number <= np.maximum.accumulate(last)[at]))
    if not steps or not work:
        return steps
    last_ns = max(int(work.start_ns[-1]), int(launches_ns.max(initial=work.start_ns[-1])))
    return steps if last_ns >= steps.start_ns[-1] else steps.where(slice(-1))


def _match_rows(wanted: Array, keys: Array) -> Array:
    """Return the first row with each wanted key, or -1; negative keys do not match."""
    rows = np.flatnonzero(keys >= 0)
    rows = rows[np.argsort(keys[rows], kind="stable")]
    row = np.append(rows, -1)[np.searchsorted(keys[rows], wanted)]
    return np.where((wanted >= 0) & (np.append(keys, -1)[row] == wanted), row, -1)


def link_coverage(gpu: Table, link: str) -> Coverage:
    """Return how much GPU work has a link."""
    linked = gpu[link] >= 0
    return Coverage(int(linked.sum()), len(gpu), int(gpu.duration_ns[linked].sum()), int(gpu.duration_ns.sum()))
