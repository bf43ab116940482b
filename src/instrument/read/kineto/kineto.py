"""Reads the JSON of torch.profiler since 2021, also of several ranks in one file, and of JAX.

Without such labels, several processes with steps of their own are several ranks, unless there is work of GPUs,
which does not say whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import TraceError
from ...base.trace_marks import STEP_PREFIX
from ...base.units import natural_key
from ..tables.intervals import merge_overlaps, total_ns
from ..tables.lanes import distinct_places, map_strings
from ..tables.links import assemble
from ..tables.notes import (
    about_ranks,
    add_losses,
    mapping,
    merge_note,
    metadata_of,
    note_of,
    number_gpus,
    own_threads,
)
from ..tables.table import KERNEL, MEMCPY, MEMSET, Array, Strings, Tables, natural
from ..tables.trace import Device, ReadLosses, Thread, Trace, UnreadDevice
from .chunks import EventChunks, EventIndex
from .events import Collector, close_ranges, take_others
from .salvage import metadata
from .text import event_limit, read_blocks, text_limit

HOST = "/host:CPU"
"""The process of the program in such a trace."""

_DEVICE = re.compile(r"^/device:\w+:(\d+)")
_STREAM = re.compile(r"^Stream #(\d+)")
_TPU_LANES = {"XLA Ops": 0, "Async XLA Ops": 1}
_XLA_THREAD = re.compile(r"^tf_")
_FRAME = re.compile(r"^\$(.*):(\d+) (.*)$")  # "$train.py:12 main"
# Calls inside of JAX and XLA, which nobody named for a person.
_INTERNAL = re.compile(
    r"::|^(?:PjitFunction\(|ParseArguments|Handle input|AllocateOutput|Wait for |ThunkExecutor|end: )"
)
_RUNTIME = re.compile(r"^(?:cu|cuda|hip)[A-Z]")  # calls of CUDA and HIP, on threads of any name
_KINDS = {
    "Memcpy": MEMCPY,
    "Memset": MEMSET,
    "__amd_rocclr_copyBuffer": MEMCPY,  # the kernels by which AMD's driver copies and sets memory
    "__amd_rocclr_fillBuffer": MEMSET,
}


def sort_events(
    columns: Tables, strings: Strings, threads: Sequence[Thread], processes: Mapping[Any, str]
) -> None:
    """Move events from the table of others to the tables that they belong to.

    Annotations of the program become regions; those with a step number become steps. XLA's operations on threads
    of the CPU become operators, those on streams of a device GPU work. Python functions become frames, and other
    calls on the program's threads calls of the runtime, as are those of CUDA and HIP on any thread.

    Args:
        columns: the columns of the tables, changed in place.
        strings: the numbers of the strings in the columns; new names are added.
        threads: the threads by their numbers.
        processes: the name of each process.
    """
    others = columns["others"]
    texts = list(strings)
    codes, place = distinct_places(others["name"])
    names = [texts[code] for code in codes.tolist()]

    def named(test: Callable[[str], object]) -> Array:
        mask: Array = np.array([bool(test(name)) for name in names], bool)[place]
        return mask

    def on_threads(value: Callable[[Thread], int]) -> Array:
        column: Array = np.array([value(thread) for thread in threads], np.int64)[others["thread"]]
        return column

    device = on_threads(lambda thread: _number(_DEVICE, processes.get(thread.process, "")))
    stream = on_threads(lambda thread: _stream(thread.name, processes.get(thread.process, "")))
    host = on_threads(lambda thread: processes.get(thread.process) == HOST) > 0
    library = on_threads(lambda thread: _XLA_THREAD.match(thread.name) is not None) > 0
    internal, launches = named(_INTERNAL.search), named(_RUNTIME.match)
    step = others["number"] >= 0
    frame = host & named(lambda name: name.startswith("$"))
    operator = host & library & ~internal & ~launches
    work = (device >= 0) & (stream >= 0)
    program = host & (launches | ~library) & ~step & ~frame
    runtime = program & (internal | launches)

    def move(table: str, mask: Array, **more: Array) -> None:
        if mask.any():
            columns[table] = {name: column[mask] for name, column in (others | more).items()}

    move("steps", step)
    move("frames", frame, name=map_strings(strings, others["name"], lambda name: _FRAME.sub(r"\1(\2): \3", name)))
    move("operators", operator)
    move("runtime", runtime, category=np.full(len(place), strings["xla"]))
    move("regions", program & ~runtime)
    kinds = [next((kind for word, kind in _KINDS.items() if name.startswith(word)), KERNEL) for name in names]
    move("gpu", work, category=np.array(kinds, np.int32)[place], device=device, stream=stream)
    left = ~(step | frame | operator | program | work)
    columns["others"] = {name: column[left] for name, column in others.items()}


def _stream(lane: str, process: str) -> int:
    """Return the number of a stream of a GPU, or of a lane of a TPU that has its work; -1 for derived lanes."""
    return _TPU_LANES.get(lane, -1) if ":TPU:" in process else _number(_STREAM, lane)


def _number(pattern: re.Pattern[str], text: str) -> int:
    """Return the number in a name, or -1."""
    match = pattern.match(text)
    return int(match[1]) if match and len(match[1]) < 10 else -1


_BRACKETS = re.compile(r"^\[([^\]]{1,60})\]")  # "[TP00-DP01] 4000", as SGLang writes
_RANK = re.compile(r"(?<![a-z])(?:rank|worker|[tpdec]p)[-_ =:]?\d{1,6}(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,6}")
_OF_TORCH = ("operators", "regions", "frames", "runtime", "gpu_regions", "syncs", "memory")
_OF_PROGRAMS = ("operators", "regions", "runtime", "gpu")


def ranks_in(
    columns: Tables, threads: Sequence[Any], processes: Mapping[Any, str], strings: Iterable[str]
) -> dict[int, Array]:
    """Return the threads of each rank; empty if the file holds one process, or does not say.

    Args:
        columns: the columns of each table.
        threads: the process of each thread.
        processes: the name of each process.
        strings: the texts that the codes of names stand for.
    """
    stepping = _processes_with_steps(columns, threads, strings)
    if len(stepping) > 1:
        ranks = {process: rank for rank, process in enumerate(stepping)}
    else:
        ranks = _labelled_processes(columns, threads, processes)
    of = np.array([ranks.get(process, -1) for process in threads])
    return {rank: np.flatnonzero(of == rank) for rank in sorted(set(ranks.values()))}


def _labelled_processes(columns: Tables, threads: Sequence[Any], processes: Mapping[Any, str]) -> dict[Any, int]:
    """Return the rank of each process that has the label of one; empty unless all that run have one."""
    labels = {process: _label(process) or _label(processes.get(process)) for process in dict.fromkeys(threads)}
    used = {threads[row] for name in _OF_PROGRAMS if name in columns for row in np.unique(columns[name]["thread"])}
    used_labels = sorted({labels[process] for process in used}, key=natural_key)
    if len(used_labels) < 2 or not all(used_labels):
        return {}
    numbers = _numbers(used_labels)
    return {process: numbers[label] for process, label in labels.items() if label in numbers}


def _processes_with_steps(columns: Tables, threads: Sequence[Any], strings: Iterable[str]) -> list[int]:
    """Return the processes without a label that marked steps, in ascending order; none beside work of a GPU."""
    if "regions" not in columns or "gpu" in columns:
        return []
    steps = [code for code, text in enumerate(strings) if text.startswith(STEP_PREFIX)]
    rows = np.isin(columns["regions"]["name"], steps)
    processes = {threads[thread] for thread in np.unique(columns["regions"]["thread"][rows]).tolist()}
    return sorted(processes) if all(isinstance(process, int) for process in processes) else []


def part_of(columns: Tables, own: Array, threads: int) -> Tables:
    """Return the rows of some threads, which are renumbered in their order."""
    numbers = np.full(threads, -1)
    numbers[own] = np.arange(len(own))
    return {
        table: {name: (numbers[part["thread"]] if name == "thread" else part[name])[rows] for name in part}
        for table, part in columns.items()
        for rows in [numbers[part["thread"]] >= 0]
    }


def _label(name: object) -> str:
    """Return what a process id or a name says of the rank; "" for nothing."""
    if not isinstance(name, str):
        return ""
    in_brackets = _BRACKETS.match(name)
    return in_brackets[1] if in_brackets else " ".join(_RANK.findall(name[:200]))


def _numbers(labels: Iterable[str]) -> dict[str, int]:
    """Return the ranks: the one number in each label, or their places if a label has several."""
    numbers = {label: _NUMBER.findall(label) for label in labels}
    if all(len(own) == 1 for own in numbers.values()):
        ranks = {label: int(own[0]) for label, own in numbers.items()}
        if len(set(ranks.values())) == len(ranks):
            return dict(sorted(ranks.items(), key=lambda item: item[1]))
    return {label: place for place, label in enumerate(numbers)}


_DEVICE_NUMBERS = ("numSms", "maxThreadsPerMultiprocessor", "totalGlobalMem")
_PHASES = 10  # phases that are listed by name
_OF_PROFILER = re.compile(r"^(?:trace|overhead)$")  # categories of what Kineto itself does
DEVICE = re.compile(r"GPU|NPU|TPU|XPU|HPU|MTIA|Ascend|/device:(?!CPU)")
"""What is found in the name of a process that stands for a device."""


def read_kineto(path: Path, progress: Callable[[int], None] = lambda size: None) -> Trace:
    """Read the trace of one process; see `read_kineto_ranks`.

    Raises:
        TraceError: the file holds no event, or several ranks.
        OSError: the file cannot be opened.
    """
    traces = read_kineto_ranks(path, progress)
    if len(traces) > 1:
        raise TraceError(path, f"it holds the traces of {len(traces)} ranks")
    return traces[0]


def read_kineto_ranks(
    path: Path, progress: Callable[[int], None] = lambda size: None, texts: Iterator[bytes] | None = None
) -> list[Trace]:
    """Read a file, plain or gzip: an object with ``traceEvents``, or the bare array.

    Returns:
        The trace; of a file in which a program merged the traces of several ranks, as `ranks_in` knows them, one
        for each rank, in ascending order.

    Args:
        path: a file that can be read more than once.
        progress: called with the number of bytes of each part that is read.
        texts: the text in blocks, where the file holds the same in another format.

    Raises:
        TraceError: the file holds no event.
        OSError: the file cannot be opened.
    """
    lost, collector = ReadLosses(), Collector(event_limit(path), text_limit(path))
    with path.open("rb") as file:
        chunks = EventChunks(path, texts or read_blocks(path, file, lost, progress), collector.take, lost)
        chunks.read()
    about: dict[str, Any] = {}
    if head := chunks.head.removeprefix(b"\xef\xbb\xbf").rstrip(b", \t\r\n"):
        about |= metadata(head + b"}", lost)
    if (tail := chunks.tail.strip(b", \t\r\n")) not in (b"", b"}"):
        about |= metadata(b"{" + tail, lost)
    if not collector.count and lost:
        raise TraceError(path, f"none of its events can be read: {'; '.join(lost.reasons)}")
    unread = list(collector.unread.items())
    lost.left_out |= {f"events of phase {phase!r}": count for phase, count in unread[:_PHASES]}
    if more := unread[_PHASES:]:
        lost.left_out[f"events of {len(more):,} more phases"] = sum(count for _, count in more)
    note = note_of(about) or merge_note(about)
    add_losses(note, lost)
    distributed = mapping(about.get("distributedInfo"))
    columns = collector.columns()
    close_ranges(collector.ends, columns, list(collector.strings), lost)
    own = own_threads(note, collector.threads)
    for part in columns.values():
        if "thread" in part:
            part["thread"] = own[part["thread"]]
    threads = [Thread(*place, collector.thread_names.get(place, "")) for place in collector.threads]
    processes = [thread.process for thread in threads]
    devices = _devices(about.get("deviceProperties"))
    threads_of: dict[int, Array] = {}
    if merged := about_ranks(about):  # of `merge_traces`, and one trace
        devices = _devices_of_ranks(number_gpus(columns, processes, merged), merged)
    else:
        threads_of = ranks_in(columns, processes, collector.processes, collector.strings)
    _take_unknown(columns, [collector.processes.get(process, "") for process in processes], collector.strings)
    trace_of = partial(_trace, path, collector, devices, about, lost, chunks.index)
    if not threads_of:
        said = (natural(distributed.get(name)) for name in ("rank", "world_size"))
        return [trace_of(columns, threads, *(None if number < 0 else number for number in said))]
    return [
        trace_of(part_of(columns, own, len(threads)), [threads[row] for row in own], rank, len(threads_of))
        for rank, own in threads_of.items()
    ]


def _trace(
    path: Path,
    collector: Collector,
    devices: list[Device],
    about: Mapping[str, Any],
    lost: ReadLosses,
    look_up: EventIndex,
    columns: Tables,
    threads: list[Thread],
    rank: int | None,
    world_size: int | None,
) -> Trace:
    jax = HOST in collector.processes.values() and "others" in columns
    if jax:
        sort_events(columns, collector.strings, threads, collector.processes)
    trace = assemble(
        path,
        "jax" if jax else "kineto",
        columns,
        collector.strings,
        threads,
        devices=devices,
        metadata=about,
        lost=lost,
        rank=rank,
        world_size=world_size,
        epoch_ns=max(natural(about.get("baseTimeNanoseconds")), 0),
        look_up=look_up,
    )
    if not (jax and trace.gpu):  # beside the streams of a device, JAX shows lanes that it derives from them
        trace.unread_devices = unread_devices(trace, collector.processes)
    return trace


def unread_devices(trace: Trace, processes: Mapping[Any, str]) -> dict[str, UnreadDevice]:
    """Return the devices with events of unknown categories, or any process if no event has a known one.

    Args:
        trace: the trace.
        processes: the name of each process.
    """
    others = trace.others.where((trace.others.duration_ns > 0) & ~trace.others.matching("category", _OF_PROFILER))
    anything = trace.operators or trace.regions or trace.gpu
    names = [processes.get(thread.process, "") for thread in trace.threads]
    unread = {}
    for name in dict.fromkeys(names if others else ()):
        if DEVICE.search(name) or not anything:
            threads = [number for number, each in enumerate(names) if each == name]
            rows = others.where(np.isin(others.thread, threads))
            if rows:
                busy = merge_overlaps(rows.start_ns, rows.end_ns)
                unread[name or "an unnamed process"] = UnreadDevice(len(rows), total_ns(busy))
    return unread


def _take_unknown(columns: Tables, names: Sequence[str], strings: Strings) -> None:
    """Take the events of the program as regions, where a tool wrote them that this library does not know.

    Args:
        columns: the columns of the tables, changed in place.
        names: the name of the process of each thread.
        strings: the numbers of the strings in the columns.
    """
    if HOST in names or "others" not in columns or not columns.keys().isdisjoint(_OF_TORCH):
        return
    own = [strings[category] for category in ("trace", "overhead")]
    if not np.isin(columns["others"]["category"], own).any():
        take_others(
            columns, np.array([row for row, name in enumerate(names) if not DEVICE.search(name)], np.int64)
        )


def _devices_of_ranks(
    numbers: Mapping[tuple[int, int], int], ranks: Mapping[int, Mapping[str, Any]]
) -> list[Device]:
    """Return the devices of a merged trace, with their new numbers."""
    by_rank = {rank: _devices(metadata_of(about).get("deviceProperties")) for rank, about in ranks.items()}
    places = [(rank, device) for rank, devices in by_rank.items() for device in devices]
    return [
        replace(device, id=numbers[rank, device.id]) for rank, device in places if (rank, device.id) in numbers
    ]


def _devices(properties: Any) -> list[Device]:
    return [
        Device(
            max(natural(item.get("id")), 0),
            str(item.get("name", "")),
            *(max(natural(item.get(name)), 0) for name in _DEVICE_NUMBERS),
        )
        for item in map(mapping, properties if isinstance(properties, list) else [])
    ]
