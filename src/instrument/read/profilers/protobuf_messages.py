"""Parses protobuf messages by a short schema of what is read, and the fields of millions of them as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import TraceError
from ..tables.table import Array

Schema = Mapping[str, Mapping[str, tuple[int, str]]]
"""For each message, its fields: number and type, such as "int64", "bytes*" for several, or a message's name."""

# as FieldDescriptorProto numbers them
_TYPES = {"double": 1, "int64": 3, "uint64": 4, "fixed64": 6, "bool": 8, "bytes": 12}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def parse(path: Path, schema: Schema, root: str, data: bytes) -> Any:
    """Return the message that a file holds; fields that the schema lacks are skipped.

    Texts are declared as bytes: a file may hold text that is not UTF-8.

    Args:
        path: the file, for errors.
        schema: the messages.
        root: the name of the outermost one.
        data: the content.

    Raises:
        TraceError: protobuf is not installed, or the content is damaged.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError:
        raise TraceError(path, "reading it needs protobuf: pip install 'torch-instrument[xplane]'") from None
    file = descriptor_pb2.FileDescriptorProto(name=f"{root}.proto", package="instrument", syntax="proto2")
    for name, fields in schema.items():
        kind = file.message_type.add(name=name)
        for field, (number, said) in fields.items():
            of, label = said.rstrip("*"), _REPEATED if said.endswith("*") else _OPTIONAL
            added = kind.field.add(name=field, number=number, label=label, type=_TYPES.get(of, _MESSAGE))
            if of in schema:
                added.type_name = f".instrument.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"instrument.{root}"))()
    try:
        found.ParseFromString(data)
    except message.DecodeError as error:
        raise TraceError(path, f"it is cut off or damaged: {error}") from None
    return found


def text_of(content: bytes) -> str:
    """Return text, which may hold bytes that are not UTF-8."""
    return content.decode("utf-8", "replace")


PADDING = b"\0" * 16
"""What follows the messages that `fields` reads."""

_MOST_FIELDS = 64  # of a message; what follows is not read
_LONG = 0x80  # the high bit of a byte: more of the integer follows
_FIXED = {1: 8, 5: 4}  # the types of fields of a fixed size, as the low bits of a key say, and that size
_OF_BYTES = 2  # the type of bytes and messages


def fields(data: Array, begins: Array, ends: Array) -> Iterator[tuple[Array, int, Array, Array | int]]:
    """Yield the first field of each message, then the second of each, and so on: those of one key together.

    Args:
        data: the bytes of all messages, and `PADDING`.
        begins: where each message begins.
        ends: where it ends.

    Yields:
        The rows of the messages; the number of the field, which is below 16, as others are skipped; its value,
        which of bytes and messages is where they begin; and their size.
    """
    rows, at = np.arange(len(begins)), begins
    for _ in range(_MOST_FIELDS):
        if not (rest := at < ends).all():
            rows, at, ends = rows[rest], at[rest], ends[rest]
        if not len(rows):
            return
        keys = data[at]
        if (keys == keys[0]).all():  # as in most, for which selecting rows would take half of the time
            value, size, at = _field(data, at, ends, int(keys[0]))
            if keys[0] < _LONG:
                yield rows, int(keys[0]) >> 3, value, size
            continue
        after = np.empty_like(at)
        for key in np.flatnonzero(np.bincount(keys)).tolist():
            chosen = np.flatnonzero(keys == key)
            value, size, after[chosen] = _field(data, at[chosen], ends[chosen], key)
            if key < _LONG:
                yield rows[chosen], key >> 3, value, size
        at = after


def _field(data: Array, at: Array, ends: Array, key: int) -> tuple[Array, Array | int, Array]:
    """Return the values, sizes and ends of fields whose keys begin with the same byte."""
    begin = at + 1 if key < _LONG else _varints(data, at)[1]
    if size := _FIXED.get(key & 7):
        return begin, 0, begin + size
    value, end = _varints(data, begin)
    if key & 7 != _OF_BYTES:
        return value, 0, end
    sizes = np.clip(value, 0, np.maximum(ends - end, 0))
    return end, sizes, end + sizes


def _varints(data: Array, at: Array) -> tuple[Array, Array]:
    """Return the integers of variable length that begin at these places, and where they end.

    Eight bytes are taken at once, as one word: the last byte of an integer is the first without its high bit.
    """
    at = np.minimum(at, len(data) - len(PADDING))
    if ((first := data[at]) < _LONG).all():
        return first.astype(np.int64), at + 1
    words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))[at]
    last = ~words & _HIGH_BITS
    last &= ~last + np.uint64(1)
    words &= last - np.uint64(1)
    for low, high, shift in _JOINED:  # neighbours of 7 bits, of 14, of 28
        words = (words & low) | ((words & high) >> shift)
    end = at + ((last >> np.uint64(7)) * _PLACE >> np.uint64(56)).astype(np.int64)
    value = words.astype(np.int64)
    if (longer := np.flatnonzero(last == 0)).size:
        ninth, tenth = data[at[longer] + 8].astype(np.int64), data[at[longer] + 9].astype(np.int64)
        value[longer] |= (ninth & 0x7F) << 56 | np.where(ninth >= 0x80, tenth & 1, 0) << 63
        end[longer] = at[longer] + 9 + (ninth >= 0x80)
    return value, end


_HIGH_BITS = np.uint64(0x8080808080808080)
_PLACE = np.uint64(0x0102030405060708)  # times 1 << 8 * n, its highest byte is n + 1
_JOINED = [
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
]
