"""Writes protobuf messages field by field."""

from __future__ import annotations

import struct


def varint(number: int) -> bytes:
    """Return an integer of variable length; negative ones have ten bytes."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """Return a message with these fields: their numbers and values; floats are of 64 bits."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 1) + struct.pack("<d", value)
        else:
            content = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(content)) + content
    return out
