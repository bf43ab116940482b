"""Splits rocprofv3's JSON into records while it is read, even if it is cut off or damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import msgspec
from msgspec import Raw

from ..kineto.salvage import after, value_end
from ..kineto.text import BLOCK

DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
FILE = "rocprofiler-sdk-tool"

_NESTED = ("strings", "callback_records", "buffer_records")
_MAX_VALUE_BYTES = 1 << 24  # bytes of one list item, and of the metadata
_SPACE, _GAP = re.compile(rb"[ \t\r\n]*"), re.compile(rb"[, \t\r\n]*")
_COMMA = b", \t\r\n"
_BEGINS = b'{["-0123456789tfn'  # the first characters of values

_split = msgspec.json.Decoder(list[Raw]).decode


class DamagedJsonError(Exception):
    """The text is cut off or is not JSON; the message says where."""


class UnexpectedJsonError(Exception):
    """The text is JSON, but not the JSON that rocprofv3 writes; the message says what was expected."""


class JsonStream:
    """JSON text of which only the current part is in memory.

    All methods that read raise DamagedJsonError if the text is damaged, and UnexpectedJsonError if the value has
    another type.

    Args:
        blocks: the text, in blocks that are not empty.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._text = b""
        self._place = 0
        self._before = 0  # bytes of the text that were dropped

    def peek(self, skipped: re.Pattern[bytes] = _SPACE) -> bytes:
        """Return the next character that is not white space; empty at the end of the text."""
        while True:
            self._place = after(skipped, self._text, self._place)
            if self._place < len(self._text) or not self._read_more():
                return self._text[self._place : self._place + 1]

    def members(self, name: str) -> Iterator[str]:
        """Yield the keys of an object; the caller must read the value after each."""
        for _ in self._entries(b"{", b"}", f"an object as {name}"):
            if self.peek() != b'"':
                raise self._damaged()
            key = self.value("a key")
            self._take(b":")
            yield key[1:-1].decode("utf-8", "replace")

    def objects(self, name: str) -> Iterator[int]:
        """Yield the indexes of a list; the caller must read the item after each."""
        return (number for number, _ in enumerate(self._entries(b"[", b"]", f"a list as {name}")))

    def items(self, name: str) -> Iterator[bytes]:
        """Yield the text of a list, some MiB at a time, as whole items with commas between them.

        All items before any damage are yielded.
        """
        self._open(b"[", f"a list as {name}")
        while self.peek(_GAP) != b"]":
            if end := self._guess_end():  # in a long list, faster than to search the end of each item
                yield self._cut(end)
                self._read_more()
                continue
            *_, end = self._place, *_item_ends(self._text, self._place)
            if end > self._place:
                yield self._cut(end)
            else:
                self._read_for(f"an item of {name}")
        self._place += 1

    def value(self, name: str) -> bytes:
        """Return the text of a value."""
        self.peek()
        while (end := value_end(self._text, self._place)[0]) == self._place:
            self._read_for(name)
        return self._cut(end)

    def skip(self) -> None:
        """Skip a value: a list of any length, or a value that is not too long."""
        if self.peek() == b"[":
            for _ in self.items("a list"):
                pass
        else:
            self.value("a value")

    def rest(self) -> int:
        """Read the rest of the text, and return its number of bytes."""
        return len(self._text) - self._place + sum(map(len, self._blocks))

    def _entries(self, begin: bytes, end: bytes, expected: str) -> Iterator[None]:
        self._open(begin, expected)
        while self.peek() != end:
            yield
            if self.peek() != end:
                self._take(b",")
        self._take(end)

    def _guess_end(self) -> int:
        """Return the probable end of the last whole item; 0 if that guess is wrong."""
        end = self._text.rfind(b"},{", self._place) + 1
        try:
            return end if _split(b"[" + self._text[self._place : end] + b"]") else 0
        except DECODE_ERRORS:
            return 0

    def _cut(self, end: int) -> bytes:
        begin, self._place = self._place, end
        return self._text[begin:end]

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

    def _read_for(self, name: str) -> None:
        """Read more of the value at the place, which does not end in the text so far."""
        if len(self._text) - self._place > _MAX_VALUE_BYTES:
            raise DamagedJsonError(f"{name} is longer than {_MAX_VALUE_BYTES >> 20} MiB")
        _, unfinished = value_end(self._text, self._place)
        if not unfinished:
            raise self._damaged()
        if not self._read_more():
            raise DamagedJsonError("it is cut off")

    def _read_more(self) -> bool:
        held = self._text[self._place :]
        block = b"".join(islice(self._blocks, 1 + len(held) // BLOCK))  # more for a long value
        self._before += self._place
        self._text, self._place = held + block, 0
        return bool(block)


def _item_ends(text: bytes, place: int) -> Iterator[int]:
    """Yield where each whole item of a list ends."""
    while (end := value_end(text, place)[0]) > place:
        yield end
        place = after(_GAP, text, end)


def split_items(text: bytes) -> list[bytes]:
    """Return the items in a text that `JsonStream.items` yields."""
    try:
        return [bytes(raw) for raw in _split(b"[" + text + b"]")]
    except DECODE_ERRORS:
        ends = [0, *_item_ends(text, 0)]
        return [text[begin:end].strip(_COMMA) for begin, end in pairwise(ends)]


def sections(text: JsonStream) -> Iterator[tuple[int, str, str]]:
    """Yield the parts of each process: its number, a key, and a key inside that part or "".

    The caller must read the value after each. An empty key begins a process, and has no value.

    Raises:
        DamagedJsonError: the text is damaged.
        UnexpectedJsonError: the text is not JSON of rocprofv3.
    """
    has_file = False
    for key in text.members("the file"):
        if has_file or key != FILE:
            text.skip()
            continue
        has_file = True
        single = text.peek() == b"{"
        for number in [0] if single else text.objects(FILE):
            yield number, "", ""
            for part in text.members("a process"):
                for inner in text.members(part) if part in _NESTED else [""]:
                    yield number, part, inner
    if not has_file:
        raise UnexpectedJsonError(f'it has no "{FILE}"')


def decode_record(text: bytes) -> Any:
    """Decode a whole record; bytes that are not UTF-8 become U+FFFD."""
    return msgspec.json.decode(text.decode("utf-8", "replace"))


def clip_integers(value: Any) -> Any:
    """Return a value with -1 in place of integers of more than 64 bits."""
    if isinstance(value, dict):
        return {key: clip_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clip_integers(item) for item in value]
    return -1 if isinstance(value, int) and value >> 63 not in (0, -1) else value
