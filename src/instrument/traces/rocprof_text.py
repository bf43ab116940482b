"""Takes the JSON of rocprofv3 apart a piece at a time, also where it is cut off or damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from .table import Array

DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
FILE = "rocprofiler-sdk-tool"

_NESTED = ("strings", "callback_records", "buffer_records")
_LONGEST = 1 << 24  # of one item of a list, and of the metadata: 16 MiB
_LONGEST_KEY = 1 << 16
_SHORT = 1 << 17
_SPACE = re.compile(rb"[ \t\r\n]*")
_COMMA = b", \t\r\n"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR = re.compile(rb'[^"{}\[\],:\s]+')
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_BEGINS = b'{["-0123456789tfn'  # of a value

_QUOTE = 2
_KINDS = np.zeros(256, np.int8)
_KINDS[list(b"{[")] = 1
_KINDS[list(b"}]")] = -1
_KINDS[ord('"')] = _QUOTE

_split = msgspec.json.Decoder(list[Raw]).decode


class DamagedJsonError(Exception):
    """The text is cut off, or is not JSON; the message says where."""


class UnexpectedJsonError(Exception):
    """The text is JSON that rocprofv3 does not write; the message says what it is."""


class JsonStream:
    """JSON of which only the piece that is looked at is in memory.

    Args:
        blocks: the text, in parts that are not empty.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._text = b""
        self._place = 0
        self._before = 0  # bytes of the file that are gone

    def peek(self) -> bytes:
        """Return the next character that is not a space; none at the end of the text."""
        while True:
            found = _SPACE.match(self._text, self._place)
            self._place = found.end() if found else self._place
            if self._place < len(self._text):
                return self._text[self._place : self._place + 1]
            if not self._more():
                return b""

    def members(self, name: str) -> Iterator[str]:
        """Yield the keys of an object; after each, the value has to be taken.

        Raises:
            DamagedError: the text is.
            UnlikeError: it is not an object.
        """
        self._open(b"{", f"an object as {name}")
        while self.peek() != b"}":
            yield self._key()
            if self.peek() != b"}":
                self._take(b",")
        self._take(b"}")

    def objects(self, name: str) -> Iterator[int]:
        """Yield the places in a list; after each, the item has to be taken. Errors as `members`."""
        self._open(b"[", f"a list as {name}")
        count = 0
        while self.peek() != b"]":
            yield count
            count += 1
            if self.peek() != b"]":
                self._take(b",")
        self._take(b"]")

    def items(self, name: str) -> Iterator[bytes]:
        """Yield the text of a list, whole items with commas between them: some MiB at a time.

        Raises:
            DamagedError: the text is; all items before that place were yielded.
            UnlikeError: it is not a list.
        """
        self._open(b"[", f"a list as {name}")
        scan = _BracketScanner()
        while True:
            places, depth = self._scanned(scan)
            closed = np.flatnonzero(depth < 0)[:1]
            decode_record = places[closed] if len(closed) else places[depth == 0][-1:] + 1
            if len(decode_record) and (text := self._cut(scan, int(decode_record[0])).strip(_COMMA)):
                yield text
            if len(closed):
                self._place += 1
                return
            if len(self._text) - self._place > _LONGEST:
                raise DamagedJsonError(f"an item of {name} is longer than {_LONGEST >> 20} MiB")
            if (
                len(decode_record) and scan.step > _SHORT
            ):  # a long list: to look for its brackets takes longer than to guess
                while text := self._guessed():
                    yield text
                    self._more()
                scan = _BracketScanner()

    def value(self, name: str) -> bytes:
        """Return the text of a value.

        Raises:
            DamagedError: the text is, or the value is longer than 16 MiB.
        """
        parts = []
        for part in self._value():
            parts.append(part)
            if sum(map(len, parts)) > _LONGEST:
                raise DamagedJsonError(f"{name} is longer than {_LONGEST >> 20} MiB")
        return b"".join(parts)

    def skip(self) -> None:
        """Pass by a value, however long.

        Raises:
            DamagedError: the text is.
        """
        for _ in self._value():
            pass

    def rest(self) -> int:
        """Return how many bytes are left, all of which are read."""
        return len(self._text) - self._place + sum(map(len, self._blocks))

    def _value(self) -> Iterator[bytes]:
        first = self.peek()
        if first not in (b"{", b"["):
            yield self._match(_STRING if first == b'"' else _SCALAR, _LONGEST)
            return
        yield first
        self._place += 1
        scan = _BracketScanner()
        while True:
            places, depth = self._scanned(scan)
            closed = np.flatnonzero(depth < 0)[:1]
            yield self._cut(scan, int(places[closed[0]]) + 1 if len(closed) else scan.ahead)
            if len(closed):
                return

    def _scanned(self, scan: _BracketScanner) -> tuple[Array, Array]:
        """The places and depths of the brackets in the next part of the text."""
        if self._place + scan.ahead >= len(self._text) and not self._more():
            raise DamagedJsonError("it is cut off")
        begin, before = self._place + scan.ahead, scan.ahead
        places, depth = scan.feed(self._text[begin : begin + scan.step])
        return places + before, depth

    def _cut(self, scan: _BracketScanner, size: int) -> bytes:
        text = self._text[self._place : self._place + size]
        self._place += size
        scan.ahead -= size
        return text

    def _guessed(self) -> bytes:
        """The items up to what looks like the end of the last whole one, if it is."""
        end = self._text.rfind(b"},{", self._place) + 1
        text = self._text[self._place : end].strip(_COMMA)
        try:
            decode_record = bool(_split(b"[" + text + b"]"))
        except DECODE_ERRORS:
            return b""
        self._place = end if decode_record else self._place
        return text

    def _key(self) -> str:
        key = self._match(_STRING, _LONGEST_KEY)
        self._take(b":")
        return key[1:-1].decode("utf-8", "replace")

    def _match(self, pattern: re.Pattern[bytes], most: int) -> bytes:
        self.peek()
        while not (found := pattern.match(self._text, self._place)) or found.end() == len(self._text):
            if len(self._text) - self._place > most or not self._more():
                break
        if not found:
            raise self._damaged()
        self._place = found.end()
        return found[0]

    def _open(self, bracket: bytes, expected: str) -> None:
        first = self.peek()
        if first and first != bracket and first in _BEGINS:
            raise UnexpectedJsonError(f"Expected {expected}")
        self._take(bracket)

    def _take(self, char: bytes) -> None:
        if self.peek() != char:
            raise self._damaged()
        self._place += 1

    def _damaged(self) -> DamagedJsonError:
        return DamagedJsonError(
            f"byte {self._before + self._place:,} is wrong" if self.peek() else "it is cut off"
        )

    def _more(self) -> bool:
        block = next(self._blocks, b"")
        self._before += self._place
        self._text = self._text[self._place :] + block
        self._place = 0
        return bool(block)


class _BracketScanner:
    """Finds the brackets and braces of text that comes in parts, and how deep each of them leads.

    Attributes:
        ahead: how much of the text, from the place on that was taken last, was looked at.
        step: how much is to be looked at next: little at first, as most lists are short.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.step = 1 << 12
        self._quoted = False
        self._escaped = False
        self._depth = 0

    def feed(self, text: bytes) -> tuple[Array, Array]:
        """Return the places of brackets outside of strings, and the depth after each; it is 0 at the start."""
        self.ahead += len(text)
        self.step = min(4 * self.step, 1 << 20)
        before = int(self._escaped)
        if before or b"\\" in text:
            text = _ESCAPE.sub(b"__", b"\\" * before + text)
            self._escaped = text.endswith(b"\\")
        kinds = _KINDS[np.frombuffer(text, np.uint8)]
        places = np.flatnonzero(kinds)
        kinds = kinds[places]
        quoted = (np.cumsum(kinds == _QUOTE) + self._quoted) & 1
        bracket = (kinds != _QUOTE) & (quoted == 0)
        depth = self._depth + np.cumsum(kinds[bracket], dtype=np.int64)
        self._quoted = bool(quoted[-1]) if len(quoted) else self._quoted
        self._depth = int(depth[-1]) if len(depth) else self._depth
        return places[bracket] - before, depth


def sections(text: JsonStream) -> Iterator[tuple[int, str, str]]:
    """Yield what each process has: its number, a key, and a key inside of that or "".

    After each, the value has to be taken; where the key is "", a process begins and there is nothing to take.

    Raises:
        DamagedError: the text is.
        UnlikeError: it is not what rocprofv3 writes.
    """
    found = False
    for key in text.members("the file"):
        if found or key != FILE:
            text.skip()
            continue
        found = True
        if text.peek() == b"{":
            yield from _process(text, 0)
        else:
            for number in text.objects(FILE):
                yield from _process(text, number)
    if not found:
        raise UnexpectedJsonError(f'it has no "{FILE}"')


def _process(text: JsonStream, number: int) -> Iterator[tuple[int, str, str]]:
    yield number, "", ""
    for key in text.members("a process"):
        if key in _NESTED:
            for inner in text.members(key):
                yield number, key, inner
        else:
            yield number, key, ""


def split_items(items: bytes) -> tuple[list[Raw], str]:
    """Return the items of a list; and where not all of them are JSON, those before, and what is wrong."""
    for text in (items, items.decode("utf-8", "replace").encode()):
        try:
            return _split(b"[" + text + b"]"), ""
        except DECODE_ERRORS:
            continue
    found, begin = [], 0
    places, depth = _BracketScanner().feed(items)
    for end in (places[depth == 0] + 1).tolist():
        try:
            found += _split(b"[" + items[begin:end].strip(_COMMA) + b"]")
        except DECODE_ERRORS as error:
            return found, str(error)
        begin = end
    return found, "it is no list"


def decode_record(raw: Raw) -> Any:
    """Decode all of a record; what is no UTF-8 becomes U+FFFD."""
    return msgspec.json.decode(bytes(raw).decode("utf-8", "replace"))


def clip_integers(value: Any) -> Any:
    """Replace integers of more than 64 bits by -1."""
    if isinstance(value, dict):
        return {key: clip_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clip_integers(item) for item in value]
    return -1 if isinstance(value, int) and value >> 63 not in (0, -1) else value
