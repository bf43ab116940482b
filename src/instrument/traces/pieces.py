"""Takes the text of a Kineto file apart: what is before the events, the events in pieces, what is after them."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from ..errors import TraceError
from .salvage import BETWEEN, whole_events
from .text import blocks
from .trace import Lost

_EVENTS = re.compile(rb'\A(?:\xef\xbb\xbf)?\s*\[|"traceEvents"\s*:\s*\[')
_END = re.compile(rb"\}\s*\]")  # of the array, or of one inside an event
_ENDS = 64
_COMMA = b", \t\r\n"
_LONGEST = 1 << 24  # of one event, and of what is before or after them: 16 MiB
_NEAR = 1 << 16

_split = msgspec.json.Decoder(list[Raw]).decode


class Pieces:
    """The text of a file, whose events are taken a piece of some of them at a time.

    Args:
        path: the file, for errors.
        texts: the text, in blocks.
        take: takes the text of an array of events and returns how many; or raises ValueError or RecursionError.
        lost: gets what cannot be read.

    Attributes:
        head: the text before the array of events.
        tail: the text after it.
        index: where each piece is.
    """

    def __init__(self, path: Path, texts: Iterator[bytes], take: Callable[[bytes | bytearray], int], lost: Lost) -> None:
        self._path = path
        self._texts = texts
        self._take = take
        self._lost = lost
        self._offset = 0  # of the text that is not taken yet
        self._ended = False
        self.head = self.tail = b""
        self.index = Index(path)

    def read(self) -> None:
        """Take all events.

        Raises:
            TraceError: if the file has no array of events.
        """
        rest, last = self._begin(), False
        while not last:
            block = next(self._texts, b"")
            last = not block
            if self._ended:
                rest += block
            else:
                events = rest.lstrip(_COMMA)
                self._offset += len(rest) - len(events)
                text = bytearray(b"[")  # what is decoded is built in place: each copy costs a tenth of decoding
                text += events
                text += block
                cut = len(text) if last else _last_boundary(text)
                rest = bytes(text[cut:])
                text[cut:] = b"]"
                rest = self._piece(text, last) + rest
            if len(rest) > _LONGEST:
                self._lost.add("more than 16 MiB without the end of an event", size=len(rest))
                self._offset += len(rest)
                rest = b""
        if self._ended:
            self.tail = rest
        else:
            self._lost.add("the file is cut off: its array of events does not end")

    def _begin(self) -> bytes:
        """Read up to the array of events; return what follows in the same block."""
        text = b""
        for block in self._texts:
            searched, text = max(len(text) - _NEAR, 0), text + block
            found = _EVENTS.search(text, searched)
            if found:
                self.head = text[: found.start()]
                self._offset = found.end()
                return text[found.end() :]
            if len(text) > _LONGEST:
                break
        reason = 'it has no "traceEvents"' if text.strip() else "it is empty"
        raise TraceError(self._path, "; ".join([*self._lost.reasons, reason]))

    def _piece(self, text: bytearray, last: bool) -> bytes:
        """Take the events; return what is left of the text: the end, or what follows the array."""
        first, rest = self.index.events, b""
        try:
            self.index.events += self._take(text)
        except (ValueError, RecursionError):
            rest = self._odd_piece(bytes(text[1:-1]), last)
        taken = len(text) - 2 - len(rest)
        self.index.add(first, self._offset, taken)
        self._offset += taken
        return rest

    def _odd_piece(self, piece: bytes, last: bool) -> bytes:
        """The array ends in the piece, or it is damaged."""
        if piece.startswith(b"]"):
            self._ended = True
            return piece[1:]
        for match in islice(_END.finditer(piece), _ENDS):
            try:
                self.index.events += self._take(b"[" + piece[: match.start() + 1] + b"]")
            except (ValueError, RecursionError):
                continue
            self._ended = True
            return piece[match.end() :]
        events, after, rest = whole_events(piece, self._lost, last=last)
        self.index.events += self._take(b"[" + b",".join(events) + b"]")
        self._ended = after is not None
        return rest if after is None else after


def _last_boundary(text: bytearray) -> int:
    """Where the last event but one ends, as it seems."""
    size = _NEAR
    while True:
        start = max(len(text) - size, 0)
        ends = [match.end() for match in BETWEEN.finditer(text, start)]
        if ends or not start:
            return ends[-1] if ends else 1
        size *= 16


class Index:
    """Where the events of a file are; called with the number of one, it reads its ``args`` again.

    Attributes:
        events: how many there are.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces: list[tuple[int, int, int]] = []  # first event, offset in the text, length
        self._last: tuple[int, list[bytes]] = (-1, [])
        self.events = 0

    def add(self, first: int, offset: int, length: int) -> None:
        """One more piece of text was taken."""
        if self.events > first:
            self._pieces.append((first, offset, length))

    def __call__(self, event: int) -> dict[str, Any]:
        """Return the args of an event.

        Raises:
            IndexError: if there is none of this number.
            OSError: if the file cannot be read.
        """
        if not 0 <= event < self.events:
            raise IndexError(f'"event" must be from 0 to {self.events - 1}: {event}')
        number = bisect.bisect_right(self._pieces, event, key=lambda piece: piece[0]) - 1
        if self._last[0] != number:
            self._last = number, self._events(*self._pieces[number][1:])
        content = json.loads(self._last[1][event - self._pieces[number][0]])
        args = content.get("args")
        return args if isinstance(args, dict) else {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": (-1, [])}

    def _events(self, offset: int, length: int) -> list[bytes]:
        text = _part(self._path, offset, length).strip(_COMMA + b"]")
        try:
            return [bytes(event) for event in _split(b"[" + text + b"]")]
        except (ValueError, RecursionError):
            return whole_events(text, Lost(), last=True)[0]


def _part(path: Path, offset: int, length: int) -> bytes:
    """Some of the text of a file; of a gzip file all before it is unpacked on the way."""
    parts, place = [], 0
    with path.open("rb") as file:
        for block in blocks(path, file, Lost()):
            parts.append(block[max(offset - place, 0) : max(offset + length - place, 0)])
            place += len(block)
            if place >= offset + length:
                break
    return b"".join(parts)
