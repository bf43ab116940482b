"""The files of traces that torch.profiler writes: whether they are complete, their counts, compression."""

from __future__ import annotations

import errno
import gzip
import re
import shutil
from pathlib import Path
from typing import IO, cast

from ...base.files import part_file, sync
from ...base.interrupts import Suppressed, is_interrupt


def packed(raw: Path) -> Path:
    """Return the path of the compressed trace."""
    return raw.with_name(f"{raw.name}.gz")


def compress(raw: Path) -> Path:
    """Write a compressed copy of the trace and return its path; ``raw`` stays.

    Raises:
        OSError: the trace cannot be read or the copy cannot be written; no incomplete copy is left.
    """
    with part_file(packed(raw)) as part:
        # Level 1: 3 ms a MB; the default level of torch's own .gz takes 45-120 ms.
        with (
            raw.open("rb") as source,
            part.open("wb") as file,
            gzip.GzipFile(raw.name, "wb", compresslevel=1, fileobj=file) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        sync(part)
        part.replace(packed(raw))  # the folder is synced later, for many windows at once
    return packed(raw)


def unpack(raw: Path) -> None:
    """Replace a compressed trace, if there is one, by the trace itself."""
    if packed(raw).exists():
        with gzip.open(packed(raw)) as source, raw.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed(raw).unlink()


def check_is_complete(part: Path) -> None:
    """Check that torch wrote all of a trace.

    Raises:
        OSError: it did not; the error is the system's.
    """
    if not _is_complete_json(part):
        error = _write_error(part)
        part.with_name(f"{part.name}.tmp").unlink(missing_ok=True)  # in which torch writes first
        raise OSError(error.errno, f"torch could not write the trace to {part.parent}: {error.strerror}")


def _is_complete_json(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")


def _write_error(path: Path) -> OSError:
    """Return the system's reason why a file cannot be written, by appending to it."""
    try:
        with path.open("ab", buffering=0) as file:
            for _ in range(16):
                file.write(bytes(1 << 20))
    except OSError as error:
        if is_interrupt(error):
            raise
        return error
    return OSError(errno.EIO, "unknown reason")


def copy_trace(raw: Path, path: str) -> None:
    """Copy the trace, which may be compressed meanwhile, to ``path``; gzipped if that ends in ".gz"."""
    with _read(raw) as source, _write(path) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _read(raw: Path) -> IO[bytes]:
    with Suppressed(FileNotFoundError):  # compressed meanwhile
        return raw.open("rb")
    return cast(IO[bytes], gzip.open(packed(raw)))


def _write(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=1))
    return Path(path).open("wb")


_BLOCK = 1 << 20  # bytes
_EVENT = re.compile(rb'"ph":\s*"X"')
_KERNEL = re.compile(rb'"cat":\s*"kernel"')
_LAUNCH = re.compile(rb'"name":\s*"(?:cuda|cu|hip)[A-Za-z]*LaunchKernel\w*"')


def trace_counts(raw: Path) -> dict[str, int]:
    """Return the counts of a trace of torch.profiler for the manifest.

    ``bytes`` is its size, ``events`` the number of events that have a duration, ``kernels_recorded`` the number
    of kernels, and ``kernels_launched`` the number of calls that launch one kernel each.

    Raises:
        OSError: the trace cannot be read.
    """
    size = events = kernels = launches = 0
    rest = b""
    with raw.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            # Kineto ends a line after the fields that are searched for.
            lines, _, rest = (rest + block).rpartition(b"\n")
            events += len(_EVENT.findall(lines))
            kernels += len(_KERNEL.findall(lines))
            if b"LaunchKernel" in lines:
                launches += len(_LAUNCH.findall(lines))
    return {"bytes": size, "events": events, "kernels_launched": launches, "kernels_recorded": kernels}


def launches_graphs(raw: Path) -> bool:
    """Return whether a trace has a launch of a CUDA graph, whose kernels `trace_counts` does not expect."""
    with raw.open("rb") as file:
        return any(b"GraphLaunch" in line for line in file)
