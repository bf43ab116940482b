"""Writes the events that stay, with the metadata that stays, as a trace of torch.profiler."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ..part_file import writing
from ..trace_marks import CORES, DETAIL, MACHINE, OPENED_BY, SLIM, STEPS
from ..traces.chunks import EventIndex
from ..traces.merge_note import about_ranks
from ..traces.slim_note import note_losses, note_of
from ..traces.trace import Trace
from .event_texts import EventTexts, json_text
from .lane_names import LaneNames
from .names import Names
from .parts import Part

_METADATA = (
    *("baseTimeNanoseconds", "deviceProperties", "distributedInfo"),
    *("record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"),
    *("cuda_runtime_version", "cuda_driver_version", "CudaDriverVersion", "hip_runtime_version"),
    *(STEPS, DETAIL, OPENED_BY, MACHINE, SLIM, CORES),
)
_DEVICE = ("id", "name", "numSms", "maxThreadsPerMultiprocessor", "totalGlobalMem")


def index_of(trace: Trace) -> EventIndex:
    """Return where the events of a trace are in its file.

    Raises:
        ValueError: the trace comes from another profiler, or is a merged one.
    """
    if about_ranks(trace.metadata):
        raise ValueError(f'"trace" must be the trace of one rank, not a merged one: {trace.path}')
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f'"trace" must be a trace of torch.profiler (.json, .json.gz), not of {trace.format}: {trace.path}'
        )
    return trace.look_up


def write_trace(
    trace: Trace, parts: Mapping[str, Part], out: Path, names: Names, *, renumber: bool, packed: bool
) -> None:
    """Write a new file.

    Args:
        trace: the trace.
        parts: the events that stay, by table.
        out: the path, where nothing is.
        names: which names are written.
        renumber: whether correlation ids get small numbers.
        packed: whether the file is gzipped.

    Raises:
        OSError: the file of the trace cannot be read, or ``out`` cannot be written.
    """
    content = trace_bytes(trace, parts, names, renumber=renumber, packed=packed)
    with writing(out.parent), out.open("xb") as file:
        file.writelines(content)


def trace_bytes(
    trace: Trace,
    parts: Mapping[str, Part],
    names: Names,
    *,
    renumber: bool,
    packed: bool,
    steps: Mapping[str, int] | None = None,
) -> Iterator[bytes]:
    """Return the content of a new file in parts.

    Args:
        trace: the trace.
        parts: the events that stay, by table.
        names: which names are written.
        renumber: whether correlation ids get small numbers.
        packed: whether the content is gzip.
        steps: what the note says of the steps, if only some stay.

    Raises:
        OSError: the file of the trace cannot be read.
    """
    lanes = LaneNames(trace.threads, names)
    texts = EventTexts(index_of(trace), parts, lanes, names, renumber=renumber)
    about = json_text(names.metadata(_metadata(trace, lanes, steps)))
    document = _document(about[1:-1], chain(map(json_text, lanes.events()), texts))
    return _packed(document) if packed else map(str.encode, document)


def _document(about: str, events: Iterable[str]) -> Iterator[str]:
    yield f'{{{about},"traceEvents":['
    separator = "\n"
    for event in events:
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _packed(texts: Iterable[str]) -> Iterator[bytes]:
    """Yield gzip; Z_FILTERED, which prefers single digits to short matches, saves 8 %."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31, 8, zlib.Z_FILTERED)
    for text in texts:
        yield packer.compress(text.encode())
    yield packer.flush()


def _metadata(trace: Trace, lanes: LaneNames, steps: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the metadata that stays: what is read, with a note on the file that the slim trace is made from."""
    known = {name: trace.metadata[name] for name in _METADATA if name in trace.metadata}
    if isinstance(devices := known.get("deviceProperties"), list):
        known["deviceProperties"] = [
            {name: each[name] for name in _DEVICE if isinstance(each, dict) and name in each} for each in devices
        ]
    if trace.steps and not trace.steps_from:  # the reader drops a last step in which nothing begins
        known.setdefault(STEPS, f"{trace.steps.number.min()}-{trace.steps.number.max()}")
    note: dict[str, Any] = {"events": index_of(trace).events} | dict(note_of(trace.metadata))
    before = note.get("lanes")
    more = {
        "lost": note_losses(trace.lost) if trace.lost else None,
        "lanes": [*(before if isinstance(before, list) else []), *lanes.lanes],
        "steps": steps,
    }
    return known | {SLIM: note | {name: value for name, value in more.items() if value}}
