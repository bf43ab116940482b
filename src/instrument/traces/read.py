"""Reads a trace of any kind: what is in the file tells which reader is right."""

from __future__ import annotations

import glob
import os
import shutil
import stat
import sys
import tempfile
import weakref
import zlib
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TraceError
from .database import is_database, open_database
from .kineto import read_kineto
from .progress import progress
from .table import TooLargeError
from .trace import Trace

if TYPE_CHECKING:
    from .ranks import TraceSet

_DATABASES = (".sqlite", ".db")
_REPORTS = (".nsys-rep", ".qdrep")
_HEAD = 1 << 16


def read_trace(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, executor: Executor | None = None
) -> Trace | TraceSet:
    """Read what a profiler wrote.

    Kineto JSON of torch.profiler, plain or gzip, also damaged; reports of Nsight Systems, ``.sqlite`` or
    ``.nsys-rep``; JSON and databases of rocprofv3. What could not be read of a file is in `Trace.lost`.

    Args:
        path: a file, or "-" for standard input. A folder, a pattern such as ``"runs/*.json.gz"`` or several
            files make a `TraceSet`: the ranks of one job.
        executor: reads the files of a set; by default processes of this machine do.

    Raises:
        TraceError: if it is no trace, nothing in it can be read, or no file matches the pattern.
        OSError: if it cannot be opened; FileNotFoundError, if there is no such file or folder.
    """
    from .ranks import read_ranks

    if not isinstance(path, (str, os.PathLike, Iterable)):
        raise TypeError(f'"path" must be a path, a pattern or several paths: {path!r:.200}')
    if not isinstance(path, (str, os.PathLike)):
        return read_ranks(path, read_file, executor)
    file = Path(path)
    if str(path) == "-" or (file.exists() and not file.is_dir()):
        return read_file(file)
    if file.is_dir() or glob.has_magic(str(path)):
        return read_ranks(path, read_file, executor)
    raise FileNotFoundError(2, "No such file or folder", str(path))


def read_file(path: Path) -> Trace:
    """Read one file; errors as `read_trace`."""
    try:
        return _read_file(path)
    except TooLargeError as error:
        raise TraceError(path, str(error)) from None
    except MemoryError:
        raise TraceError(path, "there is not enough memory for what is in it") from None


def _read_file(path: Path) -> Trace:
    if str(path) == "-" or not stat.S_ISREG(path.stat().st_mode):
        return _spooled(path)
    head = _head(path)
    if is_database(path):
        return _database(path)
    if path.suffix in _DATABASES and not head.lstrip().startswith((b"{", b"[")):
        raise TraceError(path, "it is empty" if not head else "it is not an SQLite database")
    if path.suffix == ".ncu-rep":
        raise TraceError(
            path,
            "it is a report of Nsight Compute, which measures single kernels and has no timeline: open it with "
            "ncu-ui, or with ncu --import",
        )
    if path.suffix in _REPORTS:
        from .nsight import read_nsight

        return read_nsight(path)
    if b'"rocprofiler-sdk-tool"' in head and b'"traceEvents"' not in head:
        from .rocprof import read_rocprof

        return read_rocprof(path)
    with progress(path) as told:
        return read_kineto(path, told)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith(b"\x1f\x8b"):
        with suppress(zlib.error):
            return zlib.decompressobj(wbits=31).decompress(head, _HEAD)
    return head


def _database(path: Path) -> Trace:
    from .nsight import read_nsight
    from .rocpd import read_rocpd

    with open_database(path) as database:
        query = "SELECT count(*) FROM sqlite_master WHERE name LIKE 'rocpd%'"
        found = database.execute(query).fetchone()
    return read_rocpd(path) if found[0] else read_nsight(path)


def _spooled(path: Path) -> Trace:
    """Standard input or a pipe, copied to a file that goes when the trace does: args are read from it again."""
    with tempfile.NamedTemporaryFile(prefix="instrument-", suffix=".trace", delete=False) as copy:
        spool = Path(copy.name)
        try:
            if str(path) == "-":
                shutil.copyfileobj(sys.stdin.buffer, copy)
            else:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, copy)
            copy.close()
            trace = read_file(spool)
        except BaseException as error:
            spool.unlink(missing_ok=True)
            if isinstance(error, TraceError):
                raise TraceError(path, error.reason) from None
            raise
    trace.path = path
    weakref.finalize(trace, spool.unlink, missing_ok=True)
    return trace
