"""Unpacks archives and compression, one layer at a time, with limits for hostile ones."""

from __future__ import annotations

import bz2
import errno
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO

from ...base.errors import TraceError
from ..kineto.text import BLOCK, GZIP, check_ratio, file_blocks, read_blocks
from ..tables.trace import ReadLosses
from .kinds import SUFFIXES

_XZ, _BZIP2, _ZSTD, _ZIP = b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_XZ_MEMORY = 1 << 28  # bytes that decompressing may take
_ZSTD_WINDOW = 1 << 27
_MOST_MEMBERS = 10_000
_ODD = re.compile(r"[^\w.,+=@ -]")
_ERRORS = (
    EOFError, ValueError, NotImplementedError, RuntimeError,
    lzma.LZMAError, struct.error, tarfile.TarError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_Member = tuple[str, Iterator[bytes]]


@dataclass
class Allowance:
    """How much may be unpacked of a file, in all of its layers together.

    Attributes:
        packed: the size of the outermost file in bytes.
        layers: how many layers of archives and compression are left; an archive may hold itself.
        unpacked: the bytes that were unpacked so far.
    """

    packed: int
    layers: int = 3
    unpacked: int = 0

    def take(self, path: Path, size: int) -> None:
        """Count ``size`` more bytes; `check_ratio` says what it raises."""
        self.unpacked += size
        check_ratio(path, self.unpacked, self.packed)


def is_packed(head: bytes) -> bool:
    """Return whether a file with these first bytes, unpacked if it is gzip, is an archive or compressed."""
    return head.startswith((_XZ, _BZIP2, _ZSTD, _ZIP)) or head[257:262] == b"ustar"


def unpack(path: Path, head: bytes, allowance: Allowance, folder: Path) -> list[Path]:
    """Write what a file holds below a folder: one file or, of an archive, those that are named like traces.

    No member is written elsewhere, whatever its name; links are left out.

    Args:
        path: the file.
        head: its first bytes, for which `is_packed` is true.
        allowance: how much may be unpacked.
        folder: an empty folder.

    Returns:
        The files.

    Raises:
        TraceError: the archive holds no trace, is damaged or encrypted, or unpacks to more than 200 times the
            size of the outermost file.
        OSError: the file cannot be opened, or the folder is full.
    """
    files, alike = [], Counter[Path]()
    try:
        for name, blocks in _members(path, head):
            target = _free(folder, _safe(name), alike)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as copy:
                for block in blocks:
                    allowance.take(path, len(block))
                    copy.write(block)
            files.append(target)
    except TraceError:
        raise
    except (*_ERRORS, OSError) as error:
        # None is damage of bzip2, and EINVAL a place before the beginning of the file
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise TraceError(path, f"it cannot be unpacked: {error}") from None
    return files


def _free(folder: Path, name: Path, alike: Counter[Path]) -> Path:
    """Return a new path below a folder; a part of the name that is taken gets a number.

    Args:
        folder: the folder.
        name: the name, which may have folders of its own.
        alike: how many files wanted a path that was taken; it is counted on.
    """
    *folders, last = name.parts
    for part in folders:
        number, wanted = 1, folder / part
        while (folder := wanted.with_name(f"{number}_{part}") if number > 1 else wanted).is_file():
            number += 1
    wanted = target = folder / last
    while target.exists():
        alike[wanted] += 1
        target = wanted.with_name(f"{alike[wanted] + 1}_{last}")
    return target


def _safe(name: str) -> Path:
    """Return the name of a member as a path that stays in its folder."""
    parts = [_ODD.sub("_", part)[-100:] for part in _posix(name).parts]
    return Path(*[part for part in parts if part.strip(" .")][-8:] or ["file"])


def _posix(name: str) -> PurePosixPath:
    return PurePosixPath(name.replace("\\", "/"))


def _members(path: Path, head: bytes) -> Iterator[_Member]:
    for magic, blocks in ((_XZ, _of_xz), (_BZIP2, _of_bzip2), (_ZSTD, _of_zstd)):
        if head.startswith(magic):
            yield path.stem, blocks(path)
            return
    with path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            file.seek(0)
            yield path.stem, read_blocks(path, file, ReadLosses())
            return
    yield from _of_zip(path) if head.startswith(_ZIP) else _of_tar(path)


def _of_zip(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as archive:
        _check_count(path, archive.infolist())
        names = dict.fromkeys(info.filename for info in archive.infolist() if not info.is_dir())
        for name in _chosen(path, list(names)):
            with archive.open(name) as content:
                yield name, file_blocks(content)


def _of_tar(path: Path) -> Iterator[_Member]:
    with tarfile.open(path, "r:") as archive:
        entries = list(islice(archive, _MOST_MEMBERS + 1))
        _check_count(path, entries)
        members = {member.name: member for member in entries if member.isfile()}
        for name in _chosen(path, list(members)):
            if content := archive.extractfile(members[name]):
                yield name, file_blocks(content)


def _check_count(path: Path, entries: Sequence[object]) -> None:
    if len(entries) > _MOST_MEMBERS:
        raise TraceError(
            path,
            f"it is an archive of more than {_MOST_MEMBERS:,} files: unpack it, and give the folder of the traces",
        )


def _chosen(path: Path, names: Sequence[str]) -> list[str]:
    """Return the files of an archive that are named like traces, or its only file."""
    if "data.pkl" in {_posix(name).name for name in names}:
        raise TraceError(path, "it is a file of torch.save, such as a checkpoint, and no trace")
    own = [name for name in names if not ("__MACOSX/" in name or _posix(name).name.startswith("."))]
    traces = [name for name in own if name.endswith(SUFFIXES)]
    if not own:
        raise TraceError(path, "it is an archive without a file")
    if not traces and len(own) > 1:
        raise TraceError(
            path, f"it is an archive of {len(own):,} files, such as {own[0]:.40}, and none is named like a trace"
        )
    return traces or own


def _of_xz(path: Path) -> Iterator[bytes]:
    return _decompressed(path, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY))


def _of_bzip2(path: Path) -> Iterator[bytes]:
    return _decompressed(path, bz2.BZ2Decompressor)


def _decompressed(path: Path, new: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]) -> Iterator[bytes]:
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


def _of_zstd(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        reader, failed = _zstd_reader(path, file)
        try:
            yield from file_blocks(reader)
        except failed as error:
            raise ValueError(str(error)) from None


def _zstd_reader(path: Path, file: IO[bytes]) -> tuple[IO[bytes], type[Exception]]:
    """Return a reader of the content, and what it raises for damage."""
    try:
        from compression import zstd  # Python 3.14

        return zstd.ZstdFile(file), zstd.ZstdError
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise TraceError(
            path,
            "it is compressed with Zstandard, which needs a package: pip install 'torch-instrument[zstd]'; or "
            "unpack it first, with zstd -d",
        ) from None
    unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return unpacker.stream_reader(file, read_across_frames=True), zstandard.ZstdError
