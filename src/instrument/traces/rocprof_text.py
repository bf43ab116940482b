"""The text of rocprofv3's JSON, also where it is cut off or damaged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from ..errors import TraceError
from .rocprof_records import File, Process
from .text import blocks
from .trace import Lost

UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
_PLACE = re.compile(r"\(byte (\d+)\)")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_ITEMS = 2  # a list this deep is one of items that are read whole; the one above is of processes

_decode = msgspec.json.Decoder(File).decode


def decoded_file(path: Path, lost: Lost) -> list[Process]:
    """Return the processes in a file; of a damaged one, what comes before the damage.

    Raises:
        TraceError: if it is not what rocprofv3 writes.
        OSError: if it cannot be opened.
    """
    text = bytearray()
    with path.open("rb") as file:
        for block in blocks(path, file, lost):
            text += block
    if not text:
        raise TraceError(path, next(iter(lost.reasons), "it is empty"))
    try:
        content = _decode(text)
    except msgspec.ValidationError as error:
        raise TraceError(path, f"it is not what rocprofv3 writes: {error}") from None
    except UNREADABLE:
        content = _damaged(path, text.decode("utf-8", "replace").encode(), lost)
    processes = content.processes
    return [processes] if isinstance(processes, Process) else processes


def whole(raw: Raw) -> Any:
    """Decode all of a record; what is no UTF-8 becomes U+FFFD."""
    return msgspec.json.decode(bytes(raw).decode("utf-8", "replace"))


def bounded(value: Any) -> Any:
    """Replace integers of more than 64 bits by -1."""
    if isinstance(value, dict):
        return {key: bounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bounded(item) for item in value]
    return -1 if isinstance(value, int) and value >> 63 not in (0, -1) else value


def _damaged(path: Path, text: bytes, lost: Lost) -> File:
    try:
        content = _decode(text)
        lost.add("invalid UTF-8")
    except UNREADABLE as error:
        place = _PLACE.search(str(error))
        kept, ends = _whole(text[: int(place[1])] if place else text)
        try:
            content = _decode(kept + ends)
        except UNREADABLE:
            raise TraceError(path, f"it is no JSON that rocprofv3 wrote: {error}") from None
        lost.add(f"the text is cut off or damaged: {error}", size=len(text) - len(kept))
    return content


def _whole(text: bytes) -> tuple[bytes, bytes]:
    """The text up to the last whole item of the list that it ends in, and what closes all that is open there."""
    codes = np.frombuffer(_ESCAPE.sub(b"__", text), np.uint8)
    quoted = np.bitwise_xor.accumulate(codes == ord('"'))
    opens = (codes == ord("{")) | (codes == ord("["))
    closes = (codes == ord("}")) | (codes == ord("]"))
    places = np.flatnonzero((opens | closes) & ~quoted)
    if not len(places):
        return b"", b""
    depth = np.cumsum(np.where(opens[places], 1, -1))
    lowest_after = np.minimum.accumulate(depth[::-1])[::-1]
    left_open = np.flatnonzero(opens[places] & (depth <= lowest_after))
    lists = np.flatnonzero(codes[places[left_open]] == ord("["))
    items = lists[lists >= _ITEMS][:1]
    kept, cut = np.split(left_open, items + 1 if len(items) else [len(left_open)])
    last = (cut[0] if len(cut) else len(places)) - 1
    ends = codes[places[kept[::-1]]] + 2  # in ASCII, brackets and braces close two places after they open
    return text[: places[last] + 1], ends.tobytes()
