"""Rewrites the events of one rank, so that a viewer shows them beside the events of other ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from msgspec import Raw

from ..errors import TraceError
from ..trace_marks import MERGE
from .chunks import EventIndex
from .rank_content import RankContent, content_of
from .read import read_file
from .slim_note import lanes_of, note_of
from .table import Interner
from .trace import Trace

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
        order = sorted(about, key=lambda process: _sort_index(about[process]))
        for place, process in enumerate(order):
            labels, name = about[process].get("labels"), about[process].get("name")
            shown = name if name and labels in (None, "CPU") else labels
            number = self._first + self.processes[process]
            common = {"ph": "M", "pid": number, "tid": 0}
            title = f"rank {self._rank}" + (f": {shown}" if shown else "")
            yield common | {"name": "process_name", "args": {"name": title}}
            yield common | {"name": "process_sort_index", "args": {"sort_index": self._first + place}}


def _process(event: _Event) -> bytes:
    return bytes(event.get("pid", b'""'))


def _sort_index(about: dict[str, Any]) -> float:
    index = about.get("sort_index", 0)
    return index if isinstance(index, (int, float)) else 0


def _microseconds(raw: Raw) -> Decimal:
    return Decimal(bytes(raw).decode())


def _is_within(event: _Event, begin_ns: int, end_ns: int) -> bool:
    """Return whether an event lasts at any moment of a time, or has no time itself."""
    if "ts" not in event:
        return True
    start = 1000 * _microseconds(event["ts"])
    end = start + 1000 * _microseconds(event["dur"]) if "dur" in event else start
    return start < end_ns and (start >= begin_ns or end > begin_ns)
