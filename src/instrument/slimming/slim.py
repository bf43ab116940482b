"""`slim`: writes the smallest trace that gives the same metrics and findings, and checks that it does."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ..diagnosis.diagnose import Diagnosis, diagnose
from ..traces.chunks import EventIndex
from ..traces.read import read_trace
from ..traces.slim_note import KEY, note_losses, note_of
from ..traces.trace import Trace
from .choice import chosen_parts
from .event_texts import EventTexts, json_text
from .gpu import may_renumber
from .lane_names import LaneNames
from .verify import differences

SUFFIX = ".slim.json.gz"
"""The end of the names of slim traces."""

_METADATA = (
    *("displayTimeUnit", "schemaVersion", "baseTimeNanoseconds", "deviceProperties", "distributedInfo"),
    *("record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops", "instrument_steps"),
    *("cuda_runtime_version", "cuda_driver_version", "CudaDriverVersion", "hip_runtime_version", KEY),
)
_DEVICE = ("id", "name", "numSms", "maxThreadsPerMultiprocessor", "totalGlobalMem")


@dataclass(frozen=True)
class SlimTrace:
    """A slim trace, and how it compares with the file that it was made from.

    Attributes:
        path: the slim trace.
        source: the file that it was made from.
        bytes: the size of the slim trace.
        source_bytes: the size of that file.
        events: the number of events that stay, without names of processes and threads.
        source_events: the number of events of that file.
        changed: the metrics, findings and other parts of the diagnosis that differ; empty if none does.
    """

    path: Path
    source: Path
    bytes: int
    source_bytes: int
    events: int
    source_events: int
    changed: tuple[str, ...]


def slim(trace: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> SlimTrace:
    """Write the smallest trace that gives the same metrics and findings.

    The file is read back and diagnosed, and `SlimTrace.changed` lists what differs. An existing file is replaced
    once the new one is complete.

    Args:
        trace: a trace of torch.profiler, plain or gzip.
        out: the file to write, gzipped if its name ends in ".gz"; by default the name of the trace with
            ".slim.json.gz" in place of ".json" or ".json.gz".

    Raises:
        TypeError: ``trace`` or ``out`` is not a path.
        ValueError: the trace comes from another profiler, or ``out`` is the trace itself or is not a file.
        TraceError, OSError: the trace cannot be read, or ``out`` cannot be written.
    """
    source = Path(trace)
    target = default_out(source) if out is None else Path(out)
    _check_out(source, target)
    recorded = read_trace(source)
    index = _index(recorded)
    before = diagnose(recorded)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        events = _write(recorded, index, before, part, target)
        changed = differences(before, diagnose(replace(read_trace(part), path=source)))
        with _writing(target):
            part.replace(target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    sizes = target.stat().st_size, source.stat().st_size
    return SlimTrace(target, source, *sizes, events, index.events, changed)


def default_out(source: Path) -> Path:
    """Return the path of the slim trace of a file, beside it."""
    name = source.name.removesuffix(".gz").removesuffix(".json")
    return source.with_name(name.removesuffix(".slim") + SUFFIX)


def _check_out(source: Path, out: Path) -> None:
    """Raise ValueError if ``out`` is the source, or cannot be a file."""
    if out.exists() and source.exists() and out.samefile(source):
        raise ValueError(f'"out" must be another file than the trace: {out}')
    if out.exists() and not out.is_file():
        raise ValueError(f'"out" must be a file: {out}')


def _index(trace: Trace) -> EventIndex:
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f'"trace" must be a trace of torch.profiler (.json, .json.gz): {trace.path} is a {trace.format} file'
        )
    return trace.look_up


def _write(trace: Trace, index: EventIndex, diagnosis: Diagnosis, out: Path, target: Path) -> int:
    """Write the slim trace, and return the number of its events."""
    if diagnosis.facts is None:
        raise ValueError("the diagnosis has no facts")
    parts = chosen_parts(trace, diagnosis.facts, {found.rule for found in diagnosis.findings})
    names = LaneNames(trace.threads)
    texts = EventTexts(index, parts, names, renumber=may_renumber(trace))
    about = json_text(_metadata(trace, index.events))[1:-1]
    named = [json_text(event) for event in names.events()]
    with _writing(target), out.open("xb") as file:
        _write_blocks(file, _document(about, [*named, *texts]), packed=target.suffix == ".gz")
    return sum(len(each.rows) for each in parts.values())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise errors of the system as errors of writing a file, which is what the user named."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from None


def _document(about: str, events: Iterable[str]) -> Iterable[str]:
    yield f'{{{about},"traceEvents":[' if about else '{"traceEvents":['
    separator = "\n"
    for event in events:
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _write_blocks(file: IO[bytes], texts: Iterable[str], *, packed: bool) -> None:
    """Write text; Z_FILTERED, which favors single digits over short matches, saves 8 %."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31, 8, zlib.Z_FILTERED) if packed else None
    for text in texts:
        data = text.encode()
        file.write(packer.compress(data) if packer else data)
    if packer:
        file.write(packer.flush())


def _metadata(trace: Trace, events: int) -> Mapping[str, Any]:
    known = {name: trace.metadata[name] for name in _METADATA if name in trace.metadata}
    devices = known.get("deviceProperties")
    if isinstance(devices, list):
        known["deviceProperties"] = [
            {name: each[name] for name in _DEVICE if name in each} for each in devices if isinstance(each, dict)
        ]
    note = {"source_events": events} | dict(note_of(trace.metadata))
    if trace.lost:
        note["lost"] = note_losses(trace.lost)
    return known | {KEY: note}
