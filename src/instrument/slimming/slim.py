"""`slim`: writes a smaller trace that gives the same metrics and findings, and checks that it does."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..arguments import integer
from ..diagnosis.diagnose import diagnose
from ..errors import TraceError
from ..part_file import part_file, publish, writing
from ..traces.kineto import read_kineto
from ..traces.read import read_trace
from ..traces.region_steps import with_steps
from ..traces.slim_note import kept_steps
from ..traces.trace import Trace
from .choice import chosen_parts
from .gpu import may_renumber
from .memory_file import MemoryFile
from .names import Names
from .stand_ins import StandIns
from .steps import middle_steps, parts_of_steps
from .verify import differences
from .write import index_of, trace_bytes, write_trace

SUFFIX = ".slim.json.gz"
"""The end of the names of slim traces."""


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
    anonymize: bool = False,
    key: str = "",
) -> SlimTrace:
    """Write a smaller trace that gives the same metrics and findings.

    The file is read back and diagnosed, and `SlimTrace.changed` lists what differs. An existing file is replaced
    once the new one is complete.

    Args:
        trace: a trace of torch.profiler, plain or gzip.
        out: the file to write, gzipped if its name ends in ".gz"; by default the name of the trace with
            ".slim.json.gz" in place of ".json" or ".json.gz".
        steps: how many steps stay, from the middle of the recording, with the work that they launched; None keeps
            everything. Metrics and findings are those of a recording of these steps.
        anonymize: whether stand-ins replace the names that identify people, machines and their code; all numbers
            stay.
        key: with ``anonymize``, a secret from which the stand-ins are made. The same name has the same stand-in in
            all files with the same key. Without one, anyone who guesses a name can check the guess.

    Raises:
        TypeError: an argument has another type.
        ValueError: the trace comes from another profiler, or has no steps; ``out`` is the trace itself or is not a
            file; ``steps`` is not positive; or ``key`` is given without ``anonymize``.
        TraceError, OSError: the trace cannot be read, or ``out`` cannot be written.
    """
    if steps is not None:
        steps = integer("steps", steps, least=1)
    if key and not anonymize:
        raise ValueError('"key" must be left out without "anonymize"')
    source, names = Path(trace), StandIns(key) if anonymize else Names()
    target = _target(source, out)
    recorded = read_trace(source)
    total = index_of(recorded).events
    if steps is not None:
        recorded = _cut(recorded, steps)
    with part_file(target) as part:
        before = diagnose(recorded)
        parts = chosen_parts(recorded, before)
        packed, renumber = target.suffix == ".gz", may_renumber(recorded)
        write_trace(recorded, parts, part, names, renumber=renumber, packed=packed)
        changed = differences(before, diagnose(replace(read_trace(part), path=source)), numbers_only=anonymize)
        with writing(target.parent):
            publish(part, target)
    events = sum(len(each.rows) for each in parts.values())
    sizes = target.stat().st_size, source.stat().st_size
    return SlimTrace(target, source, *sizes, events, total, kept_steps(recorded.metadata), changed)


def _cut(trace: Trace, count: int) -> Trace:
    """Return the trace of some steps, with all that is known of them; its real names are in memory alone."""
    chosen = middle_steps(with_steps(trace, None), count)
    if chosen.kept == chosen.of:
        return trace
    known = {name: value for name, value in chosen._asdict().items() if not name.endswith("_ns")}
    if before := kept_steps(trace.metadata):
        known["of"] = before[1]
    parts = parts_of_steps(trace, chosen)
    content = b"".join(trace_bytes(trace, parts, Names(), renumber=False, packed=True, steps=known))
    return replace(read_kineto(MemoryFile.of(trace.path, content)), path=trace.path)


def default_out(source: Path) -> Path:
    """Return the path of the slim trace of a file, beside it."""
    name = source.name.removesuffix(".gz").removesuffix(".json")
    return source.with_name(name.removesuffix(".slim") + SUFFIX)


def _target(source: Path, out: str | os.PathLike[str] | None) -> Path:
    """Return the file to write.

    Raises:
        TraceError: the trace is a folder.
        ValueError: the file to write is the trace, or cannot be a file.
    """
    if source.is_dir():
        raise TraceError(source, "this is a folder: give one file")
    target = default_out(source) if out is None else Path(out)
    if target.exists() and source.exists() and target.samefile(source):
        if out is None:
            raise ValueError(f'"out" must be given for a trace that has the name of a slim trace: {source}')
        raise ValueError(f'"out" must be another file than the trace: {target}')
    if target.exists() and not target.is_file():
        raise ValueError(f'"out" must be a file: {target}')
    return target
