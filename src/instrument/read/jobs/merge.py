"""`merge_traces`: writes one trace of several ranks, on one clock, that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np
from msgspec import Raw

from ...base.errors import TraceError
from ...base.files import part_file, writing
from ...base.run_folder import last_window
from ...base.trace_marks import MERGE
from ..kineto.chunks import EventIndex
from ..kineto.insert_events import check_out, open_copy
from ..tables.notes import add_losses, lanes_of, note_losses, note_of
from ..tables.table import Interner
from ..tables.trace import ReadLosses, Trace
from .align import Clock, align
from .ranks import TraceSet, read_ranks
from .read import RankContent, check_ranks_path, content_of, read_file
from .trace_files import MERGED_MARK, Paths, find_trace_files, rank_from_name

# The args that link an event to another one.
_IDS = re.compile(
    rb'("(?:correlation|[Ee]xternal [Ii]d|wait_on_cuda_event_record_corr_id)"\s*:\s*)([1-9]\d*)(?![\d.eE])'
)
_NUMBER = re.compile(rb"[1-9]\d*")
_METADATA = b'"M"'
_PROCESS = {b'"process_name"': "name", b'"process_labels"': "labels", b'"process_sort_index"': "sort_index"}

_Event = dict[str, Raw]
_decode = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class RankFile(RankContent):
    """What is kept of the file of a rank until its events are written.

    Attributes:
        kept_ns: the time whose events are written, on the clock of the rank: from the start of the first of the
            chosen steps to the end of the last one and of its work; None for all.
    """

    kept_ns: tuple[int, int] | None = None

    @property
    def index(self) -> EventIndex:
        """The places of the events in the file."""
        return cast(EventIndex, self.look_up)


def read_rank_file(path: Path, steps: tuple[int, int] | None) -> RankFile:
    """Read the file of a rank.

    Args:
        path: the file.
        steps: the first and the last step whose events are written; None writes all.

    Raises:
        TraceError: the file cannot be read, has no event, comes from another profiler, or is a merged trace.
        OSError: the file cannot be opened.
    """
    trace = read_file(path)
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise TraceError(path, f"only traces of torch.profiler can be merged, not those of {trace.format}")
    if MERGE in trace.metadata:
        raise TraceError(path, "it is a merged trace")
    if not trace.look_up.events:
        raise TraceError(path, "it has no event")
    own = {"look_up": trace.look_up, "metadata": trace.metadata}
    return RankFile(**vars(content_of(trace)) | own, kept_ns=None if steps is None else _time_of(trace, *steps))


def _time_of(trace: Trace, first: int, last: int) -> tuple[int, int] | None:
    """Return the time of some steps and of the work that they launched; None if the trace lacks one of them."""
    steps, gpu = trace.steps, trace.gpu
    chosen = (steps.number >= first) & (steps.number <= last)
    if len(np.unique(steps.number[chosen])) <= last - first:
        return None
    work_ends = gpu.end_ns[(gpu.step >= 0) & chosen[gpu.step]]
    return int(steps.start_ns[chosen].min()), int(work_ends.max(initial=steps.end_ns[chosen].max()))


class RankEvents:
    """The texts of the events of a rank, which are made while they are iterated over.

    Args:
        rank: the rank.
        file: its file.
        offset_ns: is added to all times.
        first_process: the lowest process id that no other rank has.
        digits: how many digits follow each id that links events; they are the rank.

    Attributes:
        processes: the number of each process id, as the file has it; they count from ``first_process``.
        events: the number of events so far, without names of processes and threads.
    """

    def __init__(self, rank: int, file: RankFile, offset_ns: int, *, first_process: int, digits: int) -> None:
        self._rank, self._file, self._first = rank, file, first_process
        self._offset_us = Decimal(offset_ns) / 1000
        self._suffix = f"{rank:0{digits}}".encode()
        self._about: dict[bytes, dict[str, Any]] = {}  # of each process: what a viewer shows of it
        self._threads: dict[bytes, _Event] = {}  # by their text, as each may be there several times
        self.processes: Interner[bytes] = Interner()
        self.events = 0

    def __iter__(self) -> Iterator[bytes]:
        for _, texts in self._file.index.texts():
            for text in texts:
                event = _decode(text)
                if bytes(event.get("ph", b"")) == _METADATA:
                    self._keep_name(text, event)
                elif self._file.kept_ns is None or _is_within(event, *self._file.kept_ns):
                    self.events += 1
                    yield _encode(self._rewritten(event))
        # Names come last, and only of processes with events: a file names every GPU of its machine.
        for event in self._threads.values():
            if _process(event) in self.processes:
                yield _encode(self._rewritten(event))
        yield from map(_encode, self._process_names())

    def process_ids(self) -> dict[int, Any]:
        """Return the process id in the file of each new process id."""
        return {self._first + number: msgspec.json.decode(text) for text, number in self.processes.items()}

    def lanes(self) -> list[list[Any]]:
        """Return the lanes of overlapping events as `slim_note.lanes_of` does, with the new process ids."""
        new = {before: process for process, before in self.process_ids().items()}
        lanes = lanes_of(note_of(self._file.metadata))
        return [[new[process], lane, thread] for process, lane, thread in lanes if process in new]

    def _rewritten(self, event: _Event) -> _Event:
        event["pid"] = Raw(b"%d" % (self._first + self.processes[_process(event)]))
        if self._offset_us and "ts" in event:
            event["ts"] = Raw(f"{_microseconds(event['ts']) + self._offset_us:f}".encode())
        for key in ("id", "bind_id"):
            if key in event:
                event[key] = self._own_id(event[key])
        if "args" in event:
            event["args"] = Raw(_IDS.sub(rb"\g<1>\g<2>" + self._suffix, bytes(event["args"])))
        return event

    def _own_id(self, raw: Raw) -> Raw:
        """Return an id with the digits of the rank; 0 and negative numbers mean none."""
        text = bytes(raw)
        if text.startswith(b'"'):
            return Raw(text[:-1] + self._suffix + b'"')
        return Raw(text + self._suffix) if _NUMBER.fullmatch(text) else raw

    def _keep_name(self, text: bytes, event: _Event) -> None:
        kind = _PROCESS.get(bytes(event.get("name", b"")))
        if kind is None:
            self._threads[text] = event
            return
        args = msgspec.json.decode(event.get("args", b"{}"))
        if isinstance(args, dict) and args.get(kind):
            self._about.setdefault(_process(event), {}).setdefault(kind, args[kind])

    def _process_names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of the processes, in the order in which the file alone is shown."""
        about = {process: self._about.get(process, {}) for process in self.processes}
        indexes = {process: of.get("sort_index") for process, of in about.items()}
        order = {each: index if isinstance(index, (int, float)) else 0 for each, index in indexes.items()}
        for place, process in enumerate(sorted(order, key=order.__getitem__)):
            labels, name = about[process].get("labels"), about[process].get("name")
            shown = name if name and labels in (None, "CPU") else labels
            number = self._first + self.processes[process]
            common = {"ph": "M", "pid": number, "tid": 0}
            title = f"rank {self._rank}" + (f": {shown}" if shown else "")
            yield common | {"name": "process_name", "args": {"name": title}}
            yield common | {"name": "process_sort_index", "args": {"sort_index": self._first + place}}


def _process(event: _Event) -> bytes:
    return bytes(event.get("pid", b'""'))


def _microseconds(raw: Raw) -> Decimal:
    return Decimal(bytes(raw).decode())


def _is_within(event: _Event, begin_ns: int, end_ns: int) -> bool:
    """Return whether an event lasts at any moment of a time, or has no time itself."""
    if "ts" not in event:
        return True
    start = 1000 * _microseconds(event["ts"])
    end = start + 1000 * _microseconds(event["dur"]) if "dur" in event else start
    return start < end_ns and (start >= begin_ns or end > begin_ns)


StrPath = str | os.PathLike[str]

_FIRST_PROCESS = 1000  # larger than any number of a GPU: some events have the process in its place


@dataclass(frozen=True)
class MergedTrace:
    """A merged trace, and what is in it.

    Attributes:
        path: the merged trace.
        bytes: its size.
        events: the number of its events, without names of processes and threads.
        clocks: by rank, the offset that was added to its times, what it comes from and how sure it is.
        files: by rank, the file that was read.
        missing: the ranks of the job that are neither merged nor left out by ``ranks``.
        failed: the files that could not be read, each with the reason.
        left_out: the files of other windows and the other folders, each with the reason.
        damaged: what could not be read of the files of ranks, by rank.
    """

    path: Path
    bytes: int
    events: int
    clocks: Mapping[int, Clock]
    files: Mapping[int, Path]
    missing: tuple[int, ...]
    failed: Mapping[Path, str]
    left_out: Mapping[Path, str]
    damaged: Mapping[int, ReadLosses]


def merge_traces(
    paths: StrPath | Iterable[StrPath],
    out: StrPath | None = None,
    *,
    ranks: Iterable[int] | None = None,
    steps: tuple[int, int] | None = None,
    skip_unreadable: bool = False,
) -> MergedTrace:
    """Write one trace of several ranks, on one clock, that Perfetto and chrome://tracing open.

    Each process of a rank gets an id of its own and a name such as "rank 3: GPU 0", in order of the ranks. Ids
    that link events are followed by the digits of the rank. Times are those of the lowest rank, by the offsets of
    `TraceSet.clocks`; all else stays as it is. An existing file is replaced once the new one is complete.

    Args:
        paths: the folder of a run, whose last window is taken; a folder or pattern of files; or several files.
        out: the file to write, gzipped if its name ends in ".gz"; by default the name of the folder of the files
            with ".merged.json.gz", beside that folder.
        ranks: the ranks to merge; None takes all that have a trace.
        steps: the first and the last step to merge, with what runs meanwhile, until their work ends; of the folder
            of a run, the last window with these steps is taken. None takes all steps.
        skip_unreadable: whether the other ranks are merged if files cannot be read.

    Returns:
        The merged trace.

    Raises:
        ValueError: a rank or a step is not in the traces, the ranks have no step in common, or ``out`` is one of
            the traces or not a file.
        TraceError: no file is found; or one cannot be read, comes from another profiler than torch.profiler or is
            a merged trace, unless the others are merged without it.
        OSError: a file cannot be read or written.
    """
    chosen = None if ranks is None else frozenset(ranks)
    if chosen is not None and not chosen:
        raise ValueError('"ranks" must hold at least one rank: it is empty')
    if steps is not None and not 0 <= steps[0] <= steps[1]:
        raise ValueError(f'"steps" must be the first and the last step, such as (10, 12): {steps!r}')
    traces = _read(paths, chosen, steps, skip_unreadable=skip_unreadable)
    files = {rank: file for rank, file in traces.items() if isinstance(file, RankFile)}
    if chosen is not None:
        files = {rank: file for rank, file in files.items() if rank in chosen}
    _check_steps(files, steps)
    if out is None:
        folder = Path(os.path.commonpath([file.path.absolute().parent for file in files.values()]))
        target = folder.with_name(f"{folder.name}.merged.json.gz")
    else:
        target = Path(out)
    for file in files.values():
        check_out(file.path, target)
    clocks = align(files)
    with part_file(target) as part, writing(target.parent):
        with open_copy(part, packed=target.suffix == ".gz") as output:
            events = _write(output, files, clocks)
        part.replace(target)
    return MergedTrace(
        target,
        target.stat().st_size,
        events,
        clocks,
        {rank: file.path for rank, file in files.items()},
        tuple(traces.missing) if chosen is None else (),
        traces.failed,
        traces.left_out,
        {rank: file.lost for rank, file in files.items() if file.lost},
    )


def _read(
    paths: Paths, chosen: frozenset[int] | None, steps: tuple[int, int] | None, *, skip_unreadable: bool
) -> TraceSet:
    """Read the files of the chosen ranks, one after the other in each process; keep little of each.

    Raises:
        ValueError: a chosen rank has no trace.
        TraceError, OSError: as `merge_traces`.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = last_window(os.fspath(paths), steps)
        if not Path(paths).is_file():
            check_ranks_path(paths)
    files, left_out = find_trace_files(paths)
    traces = _read_chosen(files, chosen, partial(read_rank_file, steps=steps))
    traces.left_out |= left_out
    if chosen is not None:
        traces.failed = {
            path: why for path, why in traces.failed.items() if rank_from_name(path) in {None, *chosen}
        }
    if traces.failed and not skip_unreadable:
        path, reason = next(iter(traces.failed.items()))
        others = "".join(f"; {other}: {why}" for other, why in list(traces.failed.items())[1:])
        raise TraceError(path, f"{reason}{others}; skip_unreadable=True merges the other ranks")
    if unknown := (chosen or frozenset()) - traces.keys() - set(map(rank_from_name, traces.failed)):
        with_trace = ", ".join(map(str, traces))
        raise ValueError(f'"ranks" must be among those with a trace, {with_trace}: {sorted(unknown, key=str)}')
    return traces


def _read_chosen(files: list[Path], chosen: frozenset[int] | None, read: Callable[[Path], RankFile]) -> TraceSet:
    """Read the files that may be of chosen ranks by their names, or all if the ranks in the files are others."""
    named = {path: rank_from_name(path) for path in files}
    if chosen is not None and chosen <= set(named.values()):
        traces = read_ranks([path for path, rank in named.items() if rank in {None, *chosen}], read)
        if chosen <= traces.keys() or traces.failed:
            return traces
    return read_ranks(files, read)


def _check_steps(files: Mapping[int, RankFile], steps: tuple[int, int] | None) -> None:
    """Check that the ranks are of one window, and have the chosen steps.

    Raises:
        ValueError: they have no step in common, or not these steps.
    """
    numbers = {rank: set(file.steps.number.tolist()) for rank, file in files.items()}
    spans = {rank: f"{min(own)}-{max(own)}" if own else "none" for rank, own in numbers.items()}
    if steps is not None:
        lacking = [f"rank {rank} has {spans[rank]}" for rank, file in files.items() if file.kept_ns is None]
        if lacking:
            raise ValueError(f'"steps" must be recorded on all ranks: {steps[0]}-{steps[1]}; {", ".join(lacking)}')
    marked = [own for own in numbers.values() if own]
    if marked and not set.intersection(*marked):
        each = ", ".join(f"rank {rank} has steps {span}" for rank, span in spans.items())
        raise ValueError(f'"paths" must be of one window, with steps that all ranks have: {each}')


def _write(output: IO[bytes], files: Mapping[int, RankFile], clocks: Mapping[int, Clock]) -> int:
    """Write the JSON of a merged trace, rank by rank; each file is read again. Return the number of events."""
    epoch_ns = files[min(files)].epoch_ns
    about = {"schemaVersion": 1, MERGED_MARK: True, "displayTimeUnit": "ms"}
    about |= {"baseTimeNanoseconds": epoch_ns} if epoch_ns else {}
    output.write(msgspec.json.encode(about)[:-1] + b',"traceEvents":[')
    process, separator, written, digits = _FIRST_PROCESS, b"\n", 0, len(str(max(files)))
    notes: dict[str, dict[str, Any]] = {}
    lanes: list[list[Any]] = []
    lost = ReadLosses()
    for rank, file in files.items():
        events = RankEvents(rank, file, clocks[rank].offset_ns, first_process=process, digits=digits)
        for event in events:
            output.write(separator + event)
            separator = b",\n"
        process += len(events.processes)
        written += events.events
        lanes += events.lanes()
        notes[str(rank)] = {
            "file": file.path.name,
            "clock": asdict(clocks[rank]),
            "processes": {str(new): before for new, before in events.process_ids().items()},
            "metadata": file.metadata,
        }
        add_losses({"lost": note_losses(file.lost)}, lost)
    note = {"ranks": notes, "lanes": lanes} | ({"lost": note_losses(lost)} if lost else {})
    output.write(b"\n]," + msgspec.json.encode({MERGE: note})[1:] + b"\n")
    return written
