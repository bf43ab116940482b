"""Unpacks the one trace in a zip or tar archive, and files that xz or bzip2 compressed: one layer at a time."""

from __future__ import annotations

import bz2
import lzma
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO

from ...base.errors import TraceError
from ..kineto.text import BLOCK, GZIP, limit_ratio, read_blocks
from ..tables.trace import ReadLosses
from .trace_files import SUFFIXES

_XZ, _BZIP2, _ZIP = b"\xfd7zXZ\0", b"BZh", b"PK\x03\x04"
_XZ_MEMORY = 1 << 28  # bytes that decompressing may take
_MOST_MEMBERS = 10_000
_ERRORS = (
    EOFError, ValueError, NotImplementedError, RuntimeError,
    lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


def unpack(path: Path, head: bytes) -> tuple[str, Iterator[bytes]] | None:
    """Return the name and the content, in blocks, of what a file holds; None if it is not packed.

    Args:
        path: the file.
        head: its first bytes; of a gzip file, those of its content.

    Raises:
        TraceError: the archive holds several traces or no file. So do the blocks, if the file is damaged or
            encrypted, or unpacks to more than 200 times its size.
        OSError: the file cannot be opened.
    """
    tar = head[257:262] == b"ustar"
    if head.startswith((_XZ, _BZIP2)):
        return path.stem, _checked(path, _decompressed(path, xz=head.startswith(_XZ)))
    if not (tar or head.startswith(_ZIP)):
        return None
    with path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            return path.stem, _text_of(path)
    try:
        names = _names_in_tar(path) if tar else _names_in_zip(path)
    except _ERRORS as error:
        raise TraceError(path, f"it is a damaged archive: {error}") from None
    name = _one_of(path, names)
    return name, _checked(path, _tar_member(path, name) if tar else _zip_member(path, name))


def _one_of(path: Path, names: Sequence[str]) -> str:
    """Return the one trace among the files of an archive, or its one file."""
    own = [name for name in names if not Path(name).name.startswith(".") and "__MACOSX/" not in name]
    traces = [name for name in own if name.endswith(SUFFIXES)] or own
    if "data.pkl" in {Path(name).name for name in names}:
        raise TraceError(path, "it is a file of torch.save, such as a checkpoint, and no trace")
    if not traces:
        raise TraceError(path, "it is an archive without a file")
    if len(traces) > 1:
        raise TraceError(
            path,
            f"it is an archive of {len(traces):,} files, such as {Path(traces[0]).name:.40}: unpack it, and give "
            "the folder for the ranks of one job",
        )
    return traces[0]


def _names_in_zip(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [info.filename for info in islice(archive.infolist(), _MOST_MEMBERS) if not info.is_dir()]


def _names_in_tar(path: Path) -> list[str]:
    with tarfile.open(path, "r:") as archive:
        return [member.name for member in islice(archive, _MOST_MEMBERS) if member.isfile()]


def _zip_member(path: Path, name: str) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive, archive.open(name) as member:
        yield from _blocks(member)


def _tar_member(path: Path, name: str) -> Iterator[bytes]:
    with tarfile.open(path, "r:") as archive:
        found = next(member for member in archive if member.name == name and member.isfile())
        if (content := archive.extractfile(found)) is not None:
            yield from _blocks(content)


def _decompressed(path: Path, *, xz: bool) -> Iterator[bytes]:
    def new() -> lzma.LZMADecompressor | bz2.BZ2Decompressor:
        return lzma.LZMADecompressor(memlimit=_XZ_MEMORY) if xz else bz2.BZ2Decompressor()

    unpacker, data = new(), b""
    with path.open("rb") as file:
        while True:
            if unpacker.eof:
                data = unpacker.unused_data.lstrip(b"\0") or file.read(BLOCK)
                if not data:
                    return
                unpacker = new()
            elif unpacker.needs_input and not (data := file.read(BLOCK)):
                raise EOFError("it is cut off")
            yield unpacker.decompress(data, BLOCK)
            data = b""


def _checked(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from limit_ratio(path, blocks)
    except _ERRORS as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, f"it cannot be unpacked: {error}") from None


def _text_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from read_blocks(path, file, ReadLosses())


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(BLOCK), b"")
