"""Writes a copy of a torch.profiler trace with additional events, such as lanes that a viewer shows."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from ...base.files import part_file, publish
from ..tables.notes import about_ranks
from ..tables.trace import ReadLosses, Trace
from .chunks import EventIndex
from .text import read_blocks

FIRST_LANE = 1_000_000_000
"""The thread id of the first added lane, above all streams and system threads."""


def check_copy(trace: Trace, out: Path, category: str) -> None:
    """Check that a copy of the file of a trace can be written with lanes of a category.

    Raises:
        ValueError: the trace comes from another profiler, is a merged one, or has such lanes already; its file is
            missing; or ``out`` is the same file or cannot be replaced.
    """
    check_out(check_source(trace.path), out)
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f"TRACE must be a trace of torch.profiler (.json, .json.gz), not of {trace.format}: {trace.path}"
        )
    if about_ranks(trace.metadata):
        raise ValueError(f"TRACE must be the trace of one rank, not a merged one: {trace.path}")
    if trace.others.matching("category", re.compile(f"^{category}$")).any():
        raise ValueError(f"{trace.path} already has such lanes")


def taken_lanes(trace: Trace) -> set[tuple[int | str, int | str]]:
    """Return the process and thread ids of the trace."""
    return {(thread.process, thread.thread) for thread in trace.threads}


def check_source(source: Path) -> Path:
    """Return ``source`` if it is a file.

    Raises:
        ValueError: ``source`` is not a file.
    """
    if not source.is_file():
        raise ValueError(f"TRACE must be the file of one process: {source}")
    return source


def check_out(source: Path, out: Path) -> None:
    """Check that a copy of ``source`` can be written to ``out``.

    Raises:
        ValueError: ``out`` is the source, is not a file, or is in a missing folder.
    """
    if out.exists() and (not out.is_file() or out.samefile(source)):
        raise ValueError(f"{out} is {'the trace itself' if out.is_file() else 'not a file that can be replaced'}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"the folder of OUT does not exist: {out.absolute().parent}")


def event_text(about: Mapping[str, Any], times: str, args: Mapping[str, Any]) -> str:
    """Return the JSON text of an event; ``times`` is the text of its time and more that follows."""
    return f'{json.dumps(about)[:-1]}, "ts": {times}, "args": {json.dumps(args)}}}'


def microseconds(ns: int) -> str:
    """Return microseconds as the text of a JSON number, because a float of the time since 1970 is not exact."""
    whole, rest = divmod(abs(ns), 1000)
    return f"{'-' * (ns < 0)}{whole}" + (f".{rest:03}".rstrip("0") if rest else "")


def insert_events(trace: Trace, out: Path, events: Iterable[str]) -> None:
    """Copy the file of a trace that passed `check_copy`, with new events before the first.

    Raises:
        OSError: the file cannot be read, or ``out`` cannot be written.
    """
    source, begin = trace.path, cast(EventIndex, trace.look_up).begin
    with part_file(out) as part:
        with source.open("rb") as read, open_copy(part, packed=out.suffix == ".gz") as write:
            place = 0
            for block in read_blocks(source, read, ReadLosses()):
                before = begin - place
                place += len(block)
                if 0 <= before < len(block):
                    write.write(block[:before])
                    write.writelines(f"{event},\n".encode() for event in events)
                    block = block[before:]
                write.write(block)
        publish(part, out)


def open_copy(path: Path, *, packed: bool) -> IO[bytes]:
    """Open a file to write a trace to, packed at level 1 of gzip or plain."""
    return cast(IO[bytes], gzip.open(path, "wb", compresslevel=1)) if packed else path.open("wb")
