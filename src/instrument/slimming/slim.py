"""`slim`: writes the smallest trace that gives the same metrics and findings, and checks that it does."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from ..diagnosis.diagnose import Diagnosis, diagnose
from ..traces.chunks import EventIndex
from ..traces.read import read_trace
from ..traces.region_steps import with_steps
from ..traces.slim_note import KEY, kept_steps, note_losses, note_of
from ..traces.trace import Trace
from .choice import chosen_parts
from .event_texts import EventTexts, json_text
from .gpu import may_renumber
from .lane_names import LaneNames
from .names import Names
from .stand_ins import StandIns
from .steps import middle_steps, parts_of_steps
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
        steps: the number of steps that stay, and of those that were recorded; None if all stay.
        changed: the metrics, findings and other parts of the diagnosis that differ; empty if none does.
    """

    path: Path
    source: Path
    bytes: int
    source_bytes: int
    events: int
    source_events: int
    steps: tuple[int, int] | None
    changed: tuple[str, ...]


def slim(
    trace: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    anonymise: bool = False,
    key: str = "",
) -> SlimTrace:
    """Write the smallest trace that gives the same metrics and findings.

    The file is read back and diagnosed, and `SlimTrace.changed` lists what differs. An existing file is replaced
    once the new one is complete.

    Args:
        trace: a trace of torch.profiler, plain or gzip.
        out: the file to write, gzipped if its name ends in ".gz"; by default the name of the trace with
            ".slim.json.gz" in place of ".json" or ".json.gz".
        steps: how many steps stay, from the middle of the recording, with the work that they launched; None keeps
            everything. Metrics and findings are those of a recording of these steps.
        anonymise: whether stand-ins replace the names that identify people, machines and their code; all numbers
            stay.
        key: with ``anonymise``, a secret from which the stand-ins are made. The same name has the same stand-in in
            all files with the same key. Without one, anyone who guesses a name can check the guess.

    Raises:
        TypeError: an argument has another type.
        ValueError: the trace comes from another profiler, or has no steps; ``out`` is the trace itself or is not a
            file; ``steps`` is not positive; or ``key`` is given without ``anonymise``.
        TraceError, OSError: the trace cannot be read, or ``out`` cannot be written.
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise (ValueError if type(steps) is int else TypeError)(f'"steps" must be an integer >= 1: {steps!r}')
    if key and not anonymise:
        raise ValueError('"key" must be left out without "anonymise"')
    source, names = Path(trace), StandIns(key) if anonymise else Names()
    target = default_out(source) if out is None else Path(out)
    _check_out(source, target)
    recorded = read_trace(source)
    total = _index(recorded).events
    with _part(target) as cut, _part(target) as part:
        if steps is not None:
            recorded = _cut(recorded, steps, cut, target)
        before = diagnose(recorded)
        events = _write(recorded, before, names, part, target)
        changed = differences(before, diagnose(replace(read_trace(part), path=source)), numbers_only=anonymise)
        with _writing(target):
            part.replace(target)
    sizes = target.stat().st_size, source.stat().st_size
    return SlimTrace(target, source, *sizes, events, total, kept_steps(recorded.metadata), changed)


def _cut(trace: Trace, count: int, out: Path, target: Path) -> Trace:
    """Write the trace of some steps, with all that is known of them, and read it."""
    chosen = middle_steps(with_steps(trace, None), count)
    if chosen.kept == chosen.of:
        return trace
    lanes = LaneNames(trace.threads, Names())
    texts = EventTexts(_index(trace), parts_of_steps(trace, chosen), lanes, Names(), renumber=False)
    known = {name: value for name, value in chosen._asdict().items() if not name.endswith("_ns")}
    if before := kept_steps(trace.metadata):
        known["of"] = before[1]
    _write_file(out, target, _metadata(trace, {"steps": known}), lanes, texts, packed=False)
    return replace(read_trace(out), path=trace.path)


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """Yield a path for a temporary file beside the target, which is removed at the end."""
    path = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


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


def _write(trace: Trace, diagnosis: Diagnosis, names: Names, out: Path, target: Path) -> int:
    """Write the slim trace, and return the number of its events."""
    if diagnosis.facts is None:
        raise ValueError("the diagnosis has no facts")
    parts = chosen_parts(trace, diagnosis.facts, {found.rule for found in diagnosis.findings})
    lanes = LaneNames(trace.threads, names)
    texts = EventTexts(_index(trace), parts, lanes, names, renumber=may_renumber(trace))
    _write_file(out, target, names.metadata(_metadata(trace)), lanes, texts, packed=target.suffix == ".gz")
    return sum(len(each.rows) for each in parts.values())


def _write_file(
    out: Path, target: Path, about: Mapping[str, Any], lanes: LaneNames, texts: EventTexts, *, packed: bool
) -> None:
    named = map(json_text, lanes.events())
    with _writing(target), out.open("xb") as file:
        _write_blocks(file, _document(json_text(about)[1:-1], chain(named, texts)), packed=packed)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise an `OSError` as one that names the file that the user named, not the temporary one."""
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
    """Write texts, gzipped if ``packed``; Z_FILTERED, which prefers single bytes to short matches, saves 8 %."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31, 8, zlib.Z_FILTERED) if packed else None
    for text in texts:
        data = text.encode()
        file.write(packer.compress(data) if packer else data)
    if packer:
        file.write(packer.flush())


def _metadata(trace: Trace, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the metadata that stays, with ``more`` in the note."""
    known = {name: trace.metadata[name] for name in _METADATA if name in trace.metadata}
    devices = known.get("deviceProperties")
    if isinstance(devices, list):
        known["deviceProperties"] = [
            {name: each[name] for name in _DEVICE if name in each} for each in devices if isinstance(each, dict)
        ]
    lost = {"lost": note_losses(trace.lost)} if trace.lost else {}
    return known | {
        KEY: {"source_events": _index(trace).events} | dict(note_of(trace.metadata)) | dict(more) | lost
    }
