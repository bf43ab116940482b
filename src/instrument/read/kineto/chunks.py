"""Splits the text of a Kineto file into the part before the events, chunks of events, and the part after them."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ...base.errors import TraceError
from ..tables.trace import ReadLosses
from .salvage import BETWEEN, CLOSE, KEYS, first_event, recover_events
from .text import BLOCK, json_object, read_blocks

_EVENTS = re.compile(rb'\A(?:\xef\xbb\xbf)?\s*\[(?=\s*(?:\]|\{\s*"' + KEYS + rb'"\s*:))|"traceEvents"\s*:\s*\[')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")  # the decoder's message at the end of the array
_KEY = re.compile(rb'"([^"\\\x00-\x1f]{1,40})"\s*:')
_KEYS_IN = 1 << 12  # bytes
_COMMA = b", \t\r\n"
_MAX_EVENT_BYTES = 1 << 24  # bytes of one event, and of the parts before and after the events
_BOUNDARY_SEARCH_BYTES = 1 << 16

_TakeEvents = Callable[[bytes | bytearray], int]
_split = msgspec.json.Decoder(list[Raw]).decode


class EventChunks:
    """Passes the events of a file on in chunks.

    Args:
        path: the file, for errors.
        texts: the text of the file, in blocks.
        take: takes the text of an array of events and returns their number, or raises ValueError or
            RecursionError.
        lost: records what cannot be read.

    Attributes:
        head: the text before the array of events.
        tail: the text after the array of events.
        index: the place of each chunk.
    """

    def __init__(self, path: Path, texts: Iterator[bytes], take: _TakeEvents, lost: ReadLosses) -> None:
        self._path = path
        self._texts = texts
        self._take = take
        self._lost = lost
        self._offset = 0  # where the text that was not taken yet begins
        self.head = self.tail = b""
        self.index = EventIndex(path)

    def read(self) -> None:
        """Take all events, of one array or of several, as when several traces were written to one file.

        Raises:
            TraceError: the file has no array of events.
        """
        self.head, rest = self._begin()
        if rest is None:
            raise TraceError(self._path, "; ".join([*self._lost.reasons, _no_events_reason(self.head)]))
        while rest is not None:
            self._array(rest)
            tail, rest = self._begin()
            self.tail += tail
            if rest is not None:
                self._lost.add("events after the end of their array")

    def _begin(self) -> tuple[bytes, bytes | None]:
        """Read up to the array of events; return the text before it, and the text after its bracket or None."""
        text = b""
        for block in self._texts:
            searched, text = max(len(text) - _BOUNDARY_SEARCH_BYTES, 0), text + block
            array = _EVENTS.search(text, searched)
            if array:
                self._offset += array.end()
                return text[: array.start()], text[array.end() :]
            if len(text) > _MAX_EVENT_BYTES:
                break
        begin = first_event(text)
        if begin is None:
            return text, None
        self._lost.add("the beginning of the array of events is damaged")
        self._offset += begin
        return text[:begin], text[begin:]

    def _array(self, rest: bytes) -> None:
        """Take the events of one array; ``rest`` is its text that was already read."""
        ended = last = False
        damaged_bytes = self._lost.bytes
        while not ended and not last:
            block = b"".join(islice(self._texts, 1 + len(rest) // BLOCK))  # reads more for a long event
            last = not block
            events = rest.lstrip(_COMMA)
            self._offset += len(rest) - len(events)
            text = bytearray(b"[")  # built in place: a copy costs a tenth of the time of decoding
            text += events
            text += block
            whole = last or len(text) > _MAX_EVENT_BYTES
            cut = len(text) if last else _last_boundary(text, len(events))
            if whole and cut == 1:
                cut = len(text)
            rest = bytes(text[cut:])
            text[cut:] = b"]"
            after, ended = self._take_chunk(text, whole)
            rest = after + rest
        self._texts = chain([rest], self._texts)
        # Chrome's format allows an array outside of an object to have no end, and programs write it that way.
        bare = not self.head.strip(b"\xef\xbb\xbf \t\r\n")
        if not ended and not (bare and self._lost.bytes == damaged_bytes):
            self._lost.add("the file is cut off: its array of events does not end")

    def _take_chunk(self, text: bytearray, whole: bool) -> tuple[bytes, bool]:
        """Take the events; return the rest of the text, and whether the array ended before it."""
        try:
            self.index.add(self._take(text), self._offset, len(text) - 2)
            rest, ended = b"", False
        except (ValueError, RecursionError) as error:
            rest, ended = self._take_odd_chunk(bytes(text[1:-1]), whole, str(error))
        self._offset += len(text) - 2 - len(rest)
        return rest, ended

    def _take_odd_chunk(self, chunk: bytes, whole: bool, error: str) -> tuple[bytes, bool]:
        """Take the events of a chunk in which the array ends, or which is damaged."""
        trailing = _TRAILING.search(error)
        array = chunk[: int(trailing[1]) - 2].rstrip() if trailing else b""
        if array.endswith(b"]") and CLOSE.match(chunk, len(array) - 1):
            with suppress(ValueError, RecursionError):
                self.index.add(self._take(b"[" + array), self._offset, len(array) - 1)
                return chunk[len(array) :], True
        events, after, rest = recover_events(chunk, self._lost, last=whole)
        taken = self._take(b"[" + b",".join(events) + b"]")
        self.index.add(taken, self._offset, len(chunk), damaged=True, whole=whole)
        return (rest, False) if after is None else (after, True)


def _no_events_reason(text: bytes) -> str:
    if not text:
        return "it is empty"
    if not text.strip(b"\0"):
        return "it has nothing but zero bytes"
    keys = dict.fromkeys(key.decode("utf-8", "replace") for key in _KEY.findall(text[:_KEYS_IN]))
    but = ", but " + ", ".join(f'"{key}"' for key in list(keys)[:3])
    what = f'it has no array of "traceEvents"{but * bool(keys and "traceEvents" not in keys)}'
    if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        what = "it is a binary file of an unknown kind" if b"\0" in text else "it is a text file, and no JSON"
    return f"{what}: give a trace that torch.profiler, Nsight Systems or rocprofv3 wrote"


def _last_boundary(text: bytearray, searched: int) -> int:
    """Return where the next-to-last event seems to end; 1 if that is not beyond ``searched``."""
    size = 1 << 13
    while True:
        start = max(len(text) - size, searched - _BOUNDARY_SEARCH_BYTES, 0)
        ends = [match.end() for match in BETWEEN.finditer(text, start)]
        if ends or len(text) - size <= searched:
            return ends[-1] if ends else 1
        size *= 16


class _Chunk(NamedTuple):
    """A chunk: the number of its first event, its place in the text, and how it was read."""

    first: int
    offset: int
    length: int
    damaged: bool
    whole: bool


class EventIndex:
    """Finds events in the file again: called with the number of an event, returns its ``args``.

    Attributes:
        events: the number of events.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks: list[_Chunk] = []
        self._last: tuple[int, list[bytes]] = (-1, [])
        self.events = 0

    @property
    def begin(self) -> int:
        """The offset of the first event in the unpacked text, in bytes; 0 without events."""
        return self._chunks[0].offset if self._chunks else 0

    def add(self, events: int, offset: int, length: int, *, damaged: bool = False, whole: bool = False) -> None:
        """Record that ``events`` were taken from one more chunk of text."""
        if events:
            self._chunks.append(_Chunk(self.events, offset, length, damaged, whole))
            self.events += events

    def texts(self, first: int = 0) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the number of the first event of each chunk and the texts of its events, repaired where possible.

        Args:
            first: the number of the first chunk.

        Raises:
            OSError: the file cannot be read.
        """
        held, place = bytearray(), 0  # the text from ``place`` on
        with self._path.open("rb") as file:
            blocks = read_blocks(self._path, file, ReadLosses())
            for part in self._chunks[first:]:
                for block in chain([b""], blocks):
                    held += block
                    gone = min(part.offset - place, len(held))
                    del held[:gone]
                    place += gone
                    if place == part.offset and len(held) >= part.length:
                        break
                text = bytes(held[: part.length])
                if part.damaged:
                    yield part.first, recover_events(text, ReadLosses(), last=part.whole)[0]
                else:
                    yield part.first, [bytes(event) for event in _split(b"[" + text + b"]")]

    def __call__(self, event: int) -> dict[str, Any]:
        """Return the args of an event.

        Raises:
            IndexError: no event has this number.
            OSError: the file cannot be read.
        """
        if not 0 <= event < self.events:
            raise IndexError(f'"event" must be from 0 to {self.events - 1}: {event}')
        number = bisect.bisect_right(self._chunks, event, key=lambda part: part.first) - 1
        part = self._chunks[number]
        if self._last[0] != number:
            self._last = number, next(self.texts(number))[1]
        args = json_object(self._last[1][event - part.first]).get("args")
        return args if isinstance(args, dict) else {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": (-1, [])}
