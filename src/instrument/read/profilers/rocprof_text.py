"""Splits rocprofv3's JSON into records while it is read, even if it is cut off or damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from ..tables.table import Array

DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
FILE = "rocprofiler-sdk-tool"

_NESTED = ("strings", "callback_records", "buffer_records")
_MAX_ITEM_BYTES = 1 << 24  # bytes of one list item, and of the metadata
_MAX_KEY_BYTES = 1 << 16
_SHORT = 1 << 17
_SPACE = re.compile(rb"[ \t\r\n]*")
_COMMA = b", \t\r\n"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR = re.compile(rb'[^"{}\[\],:\s]+')
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_BEGINS = b'{["-0123456789tfn'  # the first characters of values

_QUOTE = 2
_KINDS = np.zeros(256, np.int8)
_KINDS[list(b"{[")] = 1
_KINDS[list(b"}]")] = -1
_KINDS[ord('"')] = _QUOTE

_split = msgspec.json.Decoder(list[Raw]).decode


class DamagedJsonError(Exception):
    """The text is cut off or is not JSON; the message says where."""


class UnexpectedJsonError(Exception):
    """The text is JSON, but not the JSON that rocprofv3 writes; the message says what was expected."""


class JsonStream:
    """JSON text of which only the current part is in memory.

    Args:
        blocks: the text, in blocks that are not empty.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._text = b""
        self._place = 0
        self._before = 0  # bytes of the text that were dropped

    def peek(self) -> bytes:
        """Return the next character that is not white space; empty at the end of the text."""
        while True:
            found = _SPACE.match(self._text, self._place)
            self._place = found.end() if found else self._place
            if self._place < len(self._text):
                return self._text[self._place : self._place + 1]
            if not self._read_more():
                return b""

    def members(self, name: str) -> Iterator[str]:
        """Yield the keys of an object; the caller must read the value after each.

        Raises:
            DamagedJsonError: the text is damaged.
            UnexpectedJsonError: the value is not an object.
        """
        self._open(b"{", f"an object as {name}")
        while self.peek() != b"}":
            yield self._key()
            if self.peek() != b"}":
                self._take(b",")
        self._take(b"}")

    def objects(self, name: str) -> Iterator[int]:
        """Yield the indexes of a list; the caller must read the item after each. Errors as `members`."""
        self._open(b"[", f"a list as {name}")
        count = 0
        while self.peek() != b"]":
            yield count
            count += 1
            if self.peek() != b"]":
                self._take(b",")
        self._take(b"]")

    def items(self, name: str) -> Iterator[bytes]:
        """Yield the text of a list, some MiB at a time, as whole items with commas between them.

        Raises:
            DamagedJsonError: the text is damaged; all items before the damage were yielded.
            UnexpectedJsonError: the value is not a list.
        """
        self._open(b"[", f"a list as {name}")
        scan = _BracketScanner()
        while True:
            places, depth = self._scanned(scan)
            closed = np.flatnonzero(depth < 0)[:1]
            whole = places[closed] if len(closed) else places[depth == 0][-1:] + 1
            if len(whole) and (text := self._cut(scan, int(whole[0])).strip(_COMMA)):
                yield text
            if len(closed):
                self._place += 1
                return
            if len(self._text) - self._place > _MAX_ITEM_BYTES:
                raise DamagedJsonError(f"an item of {name} is longer than {_MAX_ITEM_BYTES >> 20} MiB")
            if len(whole) and scan.step > _SHORT:  # in a long list, guessing is faster than searching brackets
                while text := self._guess_end():
                    yield text
                    self._read_more()
                scan = _BracketScanner()

    def value(self, name: str) -> bytes:
        """Return the text of a value.

        Raises:
            DamagedJsonError: the text is damaged, or the value is longer than 16 MiB.
        """
        parts = []
        for part in self._value():
            parts.append(part)
            if sum(map(len, parts)) > _MAX_ITEM_BYTES:
                raise DamagedJsonError(f"{name} is longer than {_MAX_ITEM_BYTES >> 20} MiB")
        return b"".join(parts)

    def skip(self) -> None:
        """Skip a value of any length.

        Raises:
            DamagedJsonError: the text is damaged.
        """
        for _ in self._value():
            pass

    def rest(self) -> int:
        """Read the rest of the text, and return its number of bytes."""
        return len(self._text) - self._place + sum(map(len, self._blocks))

    def _value(self) -> Iterator[bytes]:
        first = self.peek()
        if first not in (b"{", b"["):
            yield self._match(_STRING if first == b'"' else _SCALAR, _MAX_ITEM_BYTES)
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
        """Return the positions and depths of the brackets in the next part of the text."""
        if self._place + scan.ahead >= len(self._text) and not self._read_more():
            raise DamagedJsonError("it is cut off")
        begin, before = self._place + scan.ahead, scan.ahead
        places, depth = scan.feed(self._text[begin : begin + scan.step])
        return places + before, depth

    def _cut(self, scan: _BracketScanner, size: int) -> bytes:
        text = self._text[self._place : self._place + size]
        self._place += size
        scan.ahead -= size
        return text

    def _guess_end(self) -> bytes:
        """Return the items up to the probable end of the last whole one; empty if that guess is wrong."""
        end = self._text.rfind(b"},{", self._place) + 1
        text = self._text[self._place : end].strip(_COMMA)
        try:
            whole = bool(_split(b"[" + text + b"]"))
        except DECODE_ERRORS:
            return b""
        self._place = end if whole else self._place
        return text

    def _key(self) -> str:
        key = self._match(_STRING, _MAX_KEY_BYTES)
        self._take(b":")
        return key[1:-1].decode("utf-8", "replace")

    def _match(self, pattern: re.Pattern[bytes], most: int) -> bytes:
        self.peek()
        while not (found := pattern.match(self._text, self._place)) or found.end() == len(self._text):
            if len(self._text) - self._place > most or not self._read_more():
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

    def _read_more(self) -> bool:
        block = next(self._blocks, b"")
        self._before += self._place
        self._text = self._text[self._place :] + block
        self._place = 0
        return bool(block)


class _BracketScanner:
    """Finds the brackets and braces in text that comes in parts, and the depth after each of them.

    Attributes:
        ahead: the number of bytes that were scanned and not yet taken.
        step: the number of bytes to scan next: few at first, because most lists are short.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.step = 1 << 12
        self._quoted = False
        self._escaped = False
        self._depth = 0

    def feed(self, text: bytes) -> tuple[Array, Array]:
        """Return the positions of brackets outside strings, and the depth after each, which starts at 0."""
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
    """Yield the parts of each process: its number, a key, and a key inside that part or "".

    The caller must read the value after each. An empty key begins a process, and has no value.

    Raises:
        DamagedJsonError: the text is damaged.
        UnexpectedJsonError: the text is not JSON of rocprofv3.
    """
    found = False
    for key in text.members("the file"):
        if found or key != FILE:
            text.skip()
            continue
        found = True
        if text.peek() == b"{":  # a single process
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
    """Return the items of a list; if an item is not JSON, the items before it and the error."""
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
    return found, "it is not a list"


def decode_record(raw: Raw) -> Any:
    """Decode a whole record; bytes that are not UTF-8 become U+FFFD."""
    return msgspec.json.decode(bytes(raw).decode("utf-8", "replace"))


def clip_integers(value: Any) -> Any:
    """Return a value with -1 in place of integers of more than 64 bits."""
    if isinstance(value, dict):
        return {key: clip_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clip_integers(item) for item in value]
    return -1 if isinstance(value, int) and value >> 63 not in (0, -1) else value
