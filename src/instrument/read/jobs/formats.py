"""Says what a file is by its first bytes: unpacks archives and compression, one layer at a time.

Of a file that is not read, it says what to do with it.
"""

from __future__ import annotations

import bz2
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, cast

from ...base.errors import TraceError
from ..kineto.text import BLOCK, GZIP, file_blocks, limit_ratio, read_blocks
from ..profilers.compile_log import is_compile_log
from ..tables.trace import ReadLosses
from .trace_files import SUFFIXES

_PICKLE = re.compile(rb"\x80[\x02-\x05]")  # and its protocol

IS_PICKLE = "it is a pickle, such as a memory snapshot, which instrument memory reads"
"""The error for a pickle that is given where a trace is wanted."""

_COMPRESSED = "it is compressed with {}: unpack it first, with {}"

# What a file begins with, and what to say; the first that fits decides.
_BY_CONTENT = tuple(
    (re.compile(pattern, re.DOTALL), text)
    for pattern, text in (
        (_PICKLE.pattern, IS_PICKLE),
        (rb"\x28\xb5\x2f\xfd", _COMPRESSED.format("Zstandard", "zstd -d")),
        (rb"\x04\x22\x4d\x18", _COMPRESSED.format("LZ4", "lz4 -d")),
        (rb"7z\xbc\xaf\x27\x1c", _COMPRESSED.format("7-Zip", "7z x")),
        (rb"Rar!\x1a\x07", _COMPRESSED.format("RAR", "unrar x")),
        (
            rb"version https://git-lfs\.github\.com/spec/",
            "it is a pointer of Git LFS: git lfs pull fetches the file",
        ),
        (
            rb"<!doctype html>.{0,800}<title>[^<]*\.(?:json|sqlite|pickle)",
            "it is a page, such as instrument diagnose --html writes: give its trace, or open it in a browser",
        ),
        (
            rb"\s*(?i:<!doctype html|<html|<head|<body)",
            "it is an HTML page, such as a login or an error page: download the file itself",
        ),
        (rb"\s*<\?xml|\s*<Error>", "it is XML, such as the error message of a store: download the file itself"),
        (
            rb"\{\s*\"version\": \d+,\s*\"path\": [^\n]*\s*\"verdict\": ",
            "it is a diagnosis: give its trace instead",
        ),
        (
            rb"\{\s*\"step\": \d+,\s*\"usual_ns\": ",
            "it has the times of the steps that a black box wrote beside a trace: give the trace instead",
        ),
        (rb"\{\"run\": \"[^\"]*\", \"rank\": ", "it is the manifest of a run: give the folder that it is in"),
        (rb"\{\s*\"cells\": ", "it is a notebook, and no trace"),
        (
            rb"\{\s*\"verdict\": \"[^\"]*\",\s*\"before\": ",
            "it is a comparison, as instrument compare --json writes it: give the traces",
        ),
        (
            rb"NVR\0",
            "it is a report of Nsight Compute, which measures single kernels and has no timeline: open it with "
            "ncu-ui, or with ncu --import",
        ),
        (rb"\x93NUMPY", "it is a NumPy array, and no trace: numpy.load reads it"),
        (rb"PAR1", "it is a Parquet file, such as Trace.to_parquet writes: pandas.read_parquet reads it"),
        (rb"ARROW1", "it is an Arrow file, and no trace: pyarrow.feather.read_table reads it"),
        (rb"\x89HDF\r\n", "it is an HDF5 file, and no trace: h5py reads it"),
        (rb"\x89PNG|\xff\xd8\xff|GIF8", "it is a picture, and no trace"),
        (rb"%PDF", "it is a PDF, and no trace"),
        (
            rb"\s*\[\s*\{\s*\"(?:children|frame|metrics)\"\s*:",
            "it is a Hatchet profile, as Triton's Proton writes: it has sums and no timeline. proton-viewer shows "
            'it; Proton writes a trace with data="trace"',
        ),
        (
            rb"\s*\[\s*\{\s*\"(?:count\"\s*:\s*\d+\s*\}|startH2dMs\"|name\"[^{}]{0,2000}\"(?:timeMs|averageMs)\")",
            "it is a profile of TensorRT, which has times of layers and no timeline: record the program with "
            "nsys profile",
        ),
        (
            rb"\s*\[\s*\{[^{}]{0,500}\"cat\"\s*:\s*\"(?:Session|Node)\"",
            "it is a profile of ONNX Runtime, which has its nodes and no GPU work of PyTorch: ui.perfetto.dev "
            "shows it; record the program with nsys profile",
        ),
        (
            rb"\s*\{(?=.{0,2000}\"nodes\"\s*:).{0,2000}?\"schema\"\s*:\s*\"\d",
            "it is an execution trace (PyTorch ET, Chakra), which has operators and no timeline: give the trace "
            "that torch.profiler wrote in the same run",
        ),
        (
            rb"\s*\{.{0,500}?speedscope\.app/file-format-schema",
            "it is a profile for speedscope, which has no GPU work: www.speedscope.app shows it",
        ),
        (
            rb"\n[\x80-\xff]{0,4}[\0-\x7f](?:\x08[\x80-\xff]{0,9}[\0-\x7f])?\x12[\0-\x7f]"
            rb"(?:/host:|/device:|Task )",
            "it is XProf's .xplane.pb: give the .trace.json.gz that jax.profiler.trace writes beside it",
        ),
        (
            # a packet with one of the fields that begin packets, which no text has here
            rb"\n[\x80-\xff]{0,4}[\0-\x7f](?:[\x38\x40\x50\x58\x62\x68]|[\x80-\xff][\x01-\x0f])(?=.{0,400}[\0-\x08])",
            "it is a binary trace of Perfetto: traceconv json FILE makes JSON of it; torch.profiler's "
            "export_chrome_trace writes JSON",
        ),
    )
)
_NAMED = {".zst": "Zstandard", ".ncu-rep": "Nsight Compute", ".xplane.pb": "XProf", ".et": "Chakra"}
_NAMED |= dict.fromkeys((".pftrace", ".perfetto-trace"), "binary trace of Perfetto")
_BY_NAME = {end: next(text for _, text in _BY_CONTENT if word in text) for end, word in _NAMED.items()} | {
    ".qdstrm": "it is a raw recording of Nsight Systems: QdstrmImporter of Nsight Systems makes a report of it"
}
_LOG = "it is a log of torch.compile: give it beside a trace, instrument diagnose TRACE --compile-log LOG"


def is_pickle(head: bytes) -> bool:
    """Return whether a file that begins with these bytes, two or more, is a pickle of protocol 2 to 5."""
    return _PICKLE.match(head) is not None


def foreign_format(path: Path, head: bytes) -> str:
    """Return what a file is and what to do with it; "" for a trace, or for what is not known.

    Args:
        path: the file; its name counts only where its content does not say.
        head: its first bytes, unpacked if it is gzip.
    """
    if is_compile_log(head):
        return _LOG
    if text_for_content := next((text for pattern, text in _BY_CONTENT if pattern.match(head)), ""):
        return text_for_content
    if not head or head.lstrip()[:1] in (b"{", b"["):
        return ""
    return next((text for end, text in _BY_NAME.items() if path.name.endswith(end)), "")


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
        names = _names(path, tar=tar)
    except _ERRORS as error:
        raise TraceError(path, f"it is a damaged archive: {error}") from None
    name = _one_of(path, names)
    return name, _checked(path, _member(path, name, tar=tar))


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


def _names(path: Path, *, tar: bool) -> list[str]:
    if tar:
        with tarfile.open(path, "r:") as members:
            return [member.name for member in islice(members, _MOST_MEMBERS) if member.isfile()]
    with zipfile.ZipFile(path) as archive:
        return [info.filename for info in islice(archive.infolist(), _MOST_MEMBERS) if not info.is_dir()]


def _member(path: Path, name: str, *, tar: bool) -> Iterator[bytes]:
    if tar:
        with tarfile.open(path, "r:") as members:
            member = next(member for member in members if member.name == name and member.isfile())
            yield from file_blocks(cast(IO[bytes], members.extractfile(member)))
    else:
        with zipfile.ZipFile(path) as archive, archive.open(name) as content:
            yield from file_blocks(content)


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
    except TraceError:
        raise
    except _ERRORS as error:
        raise TraceError(path, f"it cannot be unpacked: {error}") from None


def _text_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from read_blocks(path, file, ReadLosses())
