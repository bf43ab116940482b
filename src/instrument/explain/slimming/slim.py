"""`slim`: writes a smaller trace that gives the same metrics and findings, and checks that it does."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import TraceError
from ...base.files import part_file, publish, writing
from ...base.units import integer
from ...read.jobs.read import read_trace
from ...read.kineto.kineto import read_kineto
from ...read.measures.region_steps import with_steps
from ...read.tables.notes import kept_steps
from ...read.tables.trace import Trace
from ..diagnosis.diagnose import diagnose
from ..diagnosis.diagnosis import Diagnosis, as_dict, plain
from .choice import chosen_parts, may_renumber, middle_steps, parts_of_steps
from .names import Names, StandIns
from .write import index_of, trace_bytes

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
        content = trace_bytes(recorded, parts, names, renumber=renumber, packed=packed)
        with writing(part.parent), part.open("xb") as file:
            file.writelines(content)
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
    note = {name: value for name, value in chosen._asdict().items() if not name.endswith("_ns")}
    if before := kept_steps(trace.metadata):
        note["of"] = before[1]
    parts = parts_of_steps(trace, chosen)
    content = b"".join(trace_bytes(trace, parts, Names(), renumber=False, packed=True, steps=note))
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


_ELSEWHERE = {"metrics", "findings", "path", "source", "left_out", "definitions", "version"}
_REPLAYED = {"plan"}  # replays of several changes at once may differ by what threads without operators did
_SITE = "site"  # its line is known where the source of the named file is
_WORDS = {"rule", "severity", "confidence"}  # keys of a finding whose texts are no names of the trace


def differences(before: Diagnosis, after: Diagnosis, *, numbers_only: bool = False) -> tuple[str, ...]:
    """Return what differs between two diagnoses: metrics, findings and other parts, each in words.

    Metrics are compared with their windows and coverage, findings with rule, place, evidence, time to win and
    replayed time.

    Args:
        before: the diagnosis of the trace.
        after: the diagnosis of the slim trace.
        numbers_only: whether names, and the order of rows that follows from names, may differ.
    """
    one, two = as_dict(before), as_dict(after)
    metrics = before.metrics, after.metrics
    pairs = {f"metric {name}": [(each[name], each.about(name)) for each in metrics] for name in metrics[0]}
    pairs |= {name: [one[name], two[name]] for name in one if name not in _ELSEWHERE | _REPLAYED}
    strip = _without_names if numbers_only else lambda value: value
    changed = [name for name, values in pairs.items() if _text(strip(values[0])) != _text(strip(values[1]))]
    texts = ([_text(strip(finding)) for finding in each["findings"]] for each in (one, two))
    return (*changed, *_findings(*texts))


def _findings(before: list[str], after: list[str]) -> list[str]:
    count = Counter(before)
    count.subtract(after)
    changed = [(json.loads(text)["rule"], more) for text, more in count.items() if more]
    texts = [f"finding {rule}" if more > 0 else f"new finding {rule}" for rule, more in changed]
    return texts or ["order of the findings"] * (before != after)


def _without_names(value: Any) -> Any:
    """Return a value without texts and lines, with lists of rows in an order that does not follow from names."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key in _WORDS}
        sites = {key: each is not None for key, each in value.items() if key == _SITE}
        return {key: _without_names(each) for key, each in value.items()} | kept | sites
    if isinstance(value, (list, tuple)):
        parts = [_without_names(each) for each in value]
        return sorted(parts, key=_text) if all(isinstance(each, dict) for each in parts) else parts
    return "" if isinstance(value, str) else value


def _text(value: Any) -> str:
    return json.dumps(value, default=plain, sort_keys=True)


if TYPE_CHECKING:
    _SystemPath = Path
else:  # before Python 3.12, only the class of this system's paths can have subclasses
    _SystemPath = type(Path())


class MemoryFile(_SystemPath):
    """A path whose content is in memory; it has the name of another file, for errors."""

    content: bytes

    @classmethod
    def of(cls, path: Path, content: bytes) -> MemoryFile:
        """Return a file with this content, under the name of ``path``."""
        file = cls(path)
        file.content = content
        return file

    def open(self, *_: Any, **__: Any) -> Any:
        """Return a file object to read the bytes from."""
        return io.BytesIO(self.content)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return a result that has the size alone."""
        return os.stat_result((0, 0, 0, 0, 0, 0, len(self.content), 0, 0, 0))
