"""Reads the text of a trace, plain or gzip, in blocks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from ...base.errors import TraceError

if TYPE_CHECKING:
    from ..tables.trace import ReadLosses

BLOCK = 1 << 20
GZIP = b"\x1f\x8b"
"""How gzip files begin."""
# Real traces shrink up to 40 to 1; gzip allows 1,032 to 1.
_MAX_COMPRESSION_RATIO = 200
_BOMB_BYTES = 1 << 28

_BYTES_PER_EVENT = 4  # of a gzip file; real traces have at least 20
_MIN_EVENT_LIMIT = 1 << 20  # allowed in any file


def event_limit(path: Path) -> int:
    """Return the number of events that a file may have: far more than a trace of its size holds."""
    return max(_MIN_EVENT_LIMIT, path.stat().st_size // _BYTES_PER_EVENT)


def text_limit(path: Path) -> int:
    """Return the number of characters that the distinct strings in a file may have together."""
    return _BOMB_BYTES + 40 * path.stat().st_size


def read_json(path: Path) -> Any:
    """Return the JSON in an untrusted file, plain or gzip; None if it is cut off or damaged.

    Raises:
        TraceError: the file unpacks to far more than its size.
        OSError: it cannot be opened.
    """
    from ..tables.trace import ReadLosses  # imports numpy

    with path.open("rb") as file:
        return _json(b"".join(read_blocks(path, file, ReadLosses())))


def json_object(text: bytes | str, **options: Any) -> dict[str, Any]:
    """Return a JSON object of an untrusted file, with what `json.loads` accepts; empty if it is none."""
    content = _json(text, **options)
    return content if isinstance(content, dict) else {}


def _json(text: bytes | str, **options: Any) -> Any:
    try:
        return json.loads(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, **options)
    except (ValueError, RecursionError):  # also integers of thousands of digits, deep nesting
        return None


def read_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file; of a gzip file, those of its content, as far as ``size`` bytes hold it."""
    with path.open("rb") as file:
        head = file.read(size)
    if head.startswith(GZIP):
        with suppress(zlib.error):
            return zlib.decompressobj(wbits=31).decompress(head, size)
    return head


def file_blocks(file: IO[bytes], progress: Callable[[int], None] = lambda size: None) -> Iterator[bytes]:
    """Yield the content of an open file in blocks, and call ``progress`` with the size of each."""
    while block := file.read(BLOCK):
        progress(len(block))
        yield block


def read_blocks(
    path: Path, file: BinaryIO, lost: ReadLosses, progress: Callable[[int], None] = lambda size: None
) -> Iterator[bytes]:
    """Yield the text in blocks; of a gzip file that is damaged or cut off, the text before the damage.

    Args:
        path: the file, for errors.
        file: the open file.
        lost: records the damage.
        progress: called with the number of bytes of each part that is read.

    Raises:
        TraceError: the file unpacks to more than 256 MiB and 200 times its size, which no trace does.
    """
    parts = file_blocks(file, progress)
    first = next(parts, b"")
    parts = chain([first] * bool(first), parts)
    yield from _ahead(_unpacked(path, parts, lost)) if first.startswith(GZIP) else parts


def _ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the blocks, and unpack the next one meanwhile: unpacking is a fifth of the time of reading."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, blocks, b"")
        while block := coming.result():
            coming = thread.submit(next, blocks, b"")
            yield block


def check_ratio(path: Path, unpacked: int, packed: int) -> None:
    """Check that a trace may unpack from so many bytes to so many.

    Raises:
        TraceError: it unpacks to more than 256 MiB and 200 times its size, which no trace does.
    """
    if unpacked > max(_BOMB_BYTES, _MAX_COMPRESSION_RATIO * packed):
        raise TraceError(
            path, f"it unpacks to more than {_MAX_COMPRESSION_RATIO} times its size, which no trace does"
        )


def _unpacked(path: Path, parts: Iterator[bytes], lost: ReadLosses) -> Iterator[bytes]:
    unpacker, inside = zlib.decompressobj(wbits=31), False
    data = next(parts)
    packed, unpacked = len(data), 0
    while data:
        before = unpacker.copy()
        try:
            text = unpacker.decompress(data, BLOCK)
        except zlib.error as error:
            text = _before_damage(before, data)
            if text or inside or not unpacked:
                reason = f"damaged gzip: {error}"
            else:
                reason = "data after the end of the gzip stream"
            if text:
                yield text
            lost.add(reason, size=len(data) + sum(map(len, parts)))
            return
        unpacked += len(text)
        check_ratio(path, unpacked, packed)
        if text:
            yield text
        inside = not unpacker.eof
        data = unpacker.unconsumed_tail if inside else unpacker.unused_data.lstrip(b"\0")
        if not data:
            data = next(parts, b"")
            packed += len(data)
        if not data and inside:
            if rest := unpacker.flush():
                yield rest
            if not unpacker.eof:
                lost.add("the gzip file is cut off")
        elif not inside:
            unpacker = zlib.decompressobj(wbits=31)


def _before_damage(unpacker: zlib._Decompress, data: bytes) -> bytes:
    """Unpack the data before the damage, byte by byte, because a failed call returns nothing."""
    text = bytearray()
    with suppress(zlib.error):
        for place in range(len(data)):
            text += unpacker.decompress(data[place : place + 1])
    return bytes(text)
