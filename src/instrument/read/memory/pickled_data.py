"""Reads pickles of plain data, such as memory snapshots, in pieces; runs nothing that a pickle names.

`pickle.Unpickler` can refuse globals too, but a file of 20 bytes makes it take 64 GB for its memo, and it keeps
apart the equal lists of frames in a snapshot, which are most of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

_BLOCK = 1 << 22  # bytes that are read at once
_LONGEST = 9  # bytes of an opcode and its number, or the size of its text
_FREE_CONTAINERS = 50_000  # for small files
_BYTES_PER_CONTAINER = 8  # at least, in larger files: a list of one byte takes 60 in memory
_BATCH = 1000  # a pickler adds the items of a list in batches of so many

# A list of objects that the memo has, such as the frames of an event.
_KNOWN_LIST = re.compile(rb"\](\x94|q.|r.{4})?\(((?:h.|j.{4}){1,%d})e" % (_BATCH - 1), re.DOTALL)
_KNOWN = re.compile(rb"h(.)|j(.{4})", re.DOTALL)

_SIZED: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    0x8C: (1, bytes.decode),  # SHORT_BINUNICODE
    0x58: (4, bytes.decode),  # BINUNICODE
    0x8D: (8, bytes.decode),  # BINUNICODE8
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x42: (4, bytes),  # BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x8A: (1, lambda data: int.from_bytes(data, "little", signed=True)),  # LONG1
    0x8B: (4, lambda data: int.from_bytes(data, "little", signed=True)),  # LONG4
}
"""Opcodes with a size: the bytes of the size, and what makes the value."""
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_KEYS = {str}  # a file can choose numbers that all have one hash, which takes quadratic time
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}


class PickleError(Exception):
    """A pickle that is damaged, holds more than plain data, or is too large; the message says which."""


class DataReader:
    """Reads one pickle of dictionaries by text, lists, tuples, texts, bytes and numbers, of protocol 2 to 5.

    Lists that only repeat objects become tuples, of which equal ones are one object.

    Args:
        file: the file, at the beginning of the pickle.
        size: its size in bytes, which bounds the memory that is taken.
        take: called with each dictionary when several items were added. It may clear it.
    """

    def __init__(self, file: BinaryIO, size: int, take: Callable[[dict[Any, Any]], object]) -> None:
        self._file = file
        self._size = size
        self._take = take
        self._containers_left = _FREE_CONTAINERS + size // _BYTES_PER_CONTAINER
        self._data = b""
        self._offset = 0  # of the data in the file
        self._memo: list[Any] = []
        self._lists: dict[bytes, tuple[Any, ...]] = {}

    def read(self) -> Any:
        """Return the data.

        Raises:
            PickleError: it cannot be read.
            OSError: the file cannot be read.
        """
        try:
            return self._read()
        except (IndexError, TypeError, ValueError, struct.error) as error:
            raise PickleError(f"it is damaged after byte {self._offset:,}: {error}") from None

    def _read(self) -> Any:
        # The opcodes of most bytes of a snapshot are here, without a call, which would take most of the time.
        memo, take = self._memo, self._take
        stack: list[Any] = []
        outer: list[list[Any]] = []
        data, at, end = b"", 0, 0
        while True:
            if at >= end:
                data, end = self._more(at, _LONGEST)
                at = 0
            op = data[at]
            if op == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                at += 1
            elif op == 0x28:  # MARK
                outer.append(stack)
                stack = []
                at += 1
                self._count_container()
            elif op in _SIZED:
                width, convert = _SIZED[op]
                start = at + 1 + width
                stop = start + int.from_bytes(data[at + 1 : start], "little")
                if stop - at > self._size:
                    raise ValueError("a text or a number is longer than the file")
                if stop > len(data):
                    data, end = self._more(at, stop - at)
                    start, stop, at = 1 + width, stop - at, 0
                    if stop > len(data):
                        raise ValueError("it ends in a text or a number")
                stack.append(convert(data[start:stop]))
                at = stop
            elif op == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif op == 0x4D:  # BININT2
                stack.append(data[at + 1] | data[at + 2] << 8)
                at += 3
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(data[at + 1 : at + 5], "little", signed=True))
                at += 5
            elif op == 0x75:  # SETITEMS
                items, stack = stack, outer.pop()
                _add_items(stack[-1], items)
                take(stack[-1])
                at += 1
            elif op == 0x5D:  # EMPTY_LIST
                repeated = _KNOWN_LIST.match(data, at)
                stack.append([] if repeated is None else self._known_list(repeated))
                at = at + 1 if repeated is None else repeated.end()
                self._count_container()
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
                at += 1
                self._count_container()
            elif op == 0x65:  # APPENDS
                items, stack = stack, outer.pop()
                _list(stack[-1]).extend(items)
                at += 1
            elif op == 0x2E:  # STOP
                (result,) = stack
                return result
            elif op == 0x74:  # TUPLE
                items, stack = stack, outer.pop()
                stack.append(tuple(items))
                at += 1
                self._count_container()
            else:
                at += self._rare(op, data, at, stack)

    def _rare(self, op: int, data: bytes, at: int, stack: list[Any]) -> int:
        """Do what an opcode says; return its length."""
        if op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
            return 1
        if op in _TUPLES:
            count = _TUPLES[op]
            if len(stack) < count:
                raise ValueError("a tuple lacks items")
            stack[-count:] = [tuple(stack[-count:])]
            self._count_container()
            return 1
        if op == 0x95:  # FRAME
            return 9
        if op == 0x80:  # PROTO
            return 2
        if op == 0x47:  # BINFLOAT
            stack.append(*struct.unpack(">d", data[at + 1 : at + 9]))
            return 9
        if op == 0x71:  # BINPUT
            self._put(data[at + 1], stack[-1])
            return 2
        if op == 0x72:  # LONG_BINPUT
            self._put(int.from_bytes(data[at + 1 : at + 5], "little"), stack[-1])
            return 5
        if op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _add_items(stack[-1], [key, value])
            return 1
        if op == 0x61:  # APPEND
            value = stack.pop()
            _list(stack[-1]).append(value)
            return 1
        raise PickleError(f"it holds more than plain data: opcode {bytes([op])!r} at byte {self._offset + at:,}")

    def _more(self, at: int, least: int) -> tuple[bytes, int]:
        """Drop the data before ``at``, and read a block, or more if ``least`` bytes are more.

        Returns:
            The data, and the last place at which a whole opcode begins.
        """
        data = self._data[at:]
        self._offset += at
        read = self._file.read(max(_BLOCK, least - len(data)))
        self._data = data = data + read
        if not data:
            raise ValueError("it ends too early")
        return data, len(data) - _LONGEST if read else len(data)

    def _count_container(self) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise PickleError("it holds more lists, tuples and dictionaries than its size allows")

    def _put(self, number: int, value: Any) -> None:
        if number > len(self._memo):
            raise ValueError(f"the memo has no place {number}")
        if number == len(self._memo):
            self._memo.append(value)
        else:
            self._memo[number] = value
            self._lists.clear()  # their numbers have other meanings now

    def _known_list(self, match: re.Match[bytes]) -> tuple[Any, ...]:
        """Return the tuple for a list of `_KNOWN_LIST`."""
        put, items = match.groups()
        repeated = self._lists.get(items)
        if repeated is None:
            places = (one[0] if one else int.from_bytes(four, "little") for one, four in _KNOWN.findall(items))
            repeated = self._lists[items] = tuple([self._memo[place] for place in places])
        if put == b"\x94":
            self._memo.append(repeated)
        elif put:
            self._put(int.from_bytes(put[1:], "little"), repeated)
        return repeated


def _add_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise ValueError("it adds items to a value that is not a dictionary")
    keys = items[::2]
    if not _KEYS.issuperset(map(type, keys)):
        raise ValueError("a key is not a text")
    target.update(zip(keys, items[1::2], strict=True))


def _list(target: Any) -> list[Any]:
    if type(target) is not list:
        raise ValueError("it adds items to a value that is not a list")
    return target
