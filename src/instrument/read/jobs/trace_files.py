"""Finds the trace files of a job, and the ranks in their names."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ...base.errors import TraceError
from ...base.run_folder import BLACK_BOX, DIAGNOSIS, without_files
from ...base.units import counted, natural_key
from ..kineto.text import GZIP, read_head
from .kinds import SUFFIXES, kind_of

MERGED_MARK = "instrument_merged"
"""A key at the beginning of merged traces, which are not read with the ranks."""

MAX_FILES = 20_000
"""The number of files that are read together; each takes at least some ms and 25 kB."""

_MAX_NAMES = 1_000_000  # of files and folders that are searched
_BESIDE = (BLACK_BOX, DIAGNOSIS)  # files that this library writes beside a trace
_MAX_PROBED_BYTES = 1 << 16
_NOTHING = (b"", b"null", b"[]", b"{}")
_HEAD_BYTES = 1 << 10  # the mark of a merged trace is in these
_LABELLED = re.compile(rb'"pid":\s*"\[')  # SGLang writes the rank before each process id

_NAMED = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<!local)(?<!local[-_])rank[-_=. ]?(\d{1,6})(?!\d)",
        r"worker[-_]?(\d{1,6})(?!\d)",
        r"(?<![a-z0-9])r(\d{1,6})(?![a-z0-9])",
        r"(?:^|[-_.])(?:trace|traces|profile|report|gpu|device|local_rank)[-_]?(\d{1,3})$",
    )
]
_SUFFIX = re.compile(rf"(\.pt)?(\.trace)?({'|'.join(map(re.escape, SUFFIXES))})$")
_FOLDER = re.compile(r"^rank[-_=]?(\d{1,6})$", re.IGNORECASE)


def rank_from_name(path: Path) -> int | None:
    """Return the rank in the name of a file or of its folder; None if neither has one."""
    stem = _SUFFIX.sub("", path.name)
    for pattern in _NAMED:
        if match := pattern.search(stem):
            return int(match[1])
    match = _FOLDER.match(path.parent.name)
    return int(match[1]) if match else None


def process_from_name(path: Path) -> str:
    """Return the process id in the name of a file, as ", process 4711", or ""."""
    match = re.search(r"-pid(\d+)\.", path.name)
    return f", process {match[1]}" if match else ""


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A folder, a pattern or a file; or several files."""

Reasons = Mapping[Path, str]
"""Files, each with why it is not read."""


class FoundFiles(NamedTuple):
    """The files to read; the files and the folders whose traces are left out, each with the reason."""

    files: list[Path]
    left_out: Reasons = MappingProxyType({})


def find_trace_files(paths: Paths) -> FoundFiles:
    """Return the files that ``paths`` selects, as `read_ranks` describes, and what is left out.

    Merged traces are left out unless there are no other files.

    Raises:
        TraceError: no file is found, or too many.
    """
    several = None if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if not (str(paths) if several is None else several):
        raise TraceError(Path(), '"paths" must be a folder, a pattern or files: it is empty')
    if several is not None:
        return _of_ranks(several)
    path = Path(str(paths))
    if path.is_dir():
        files, others = _in_folder(path)
    else:
        files, others = [path] if path.exists() else _natural_order(_matching(path)), []
    if not files:
        raise TraceError(path, "no such file or folder, and no file that matches it as a pattern")
    if len(files) > MAX_FILES:
        raise TraceError(
            path,
            f"it holds {len(files):,} files that may be traces, and up to {MAX_FILES:,} are read together: "
            'choose some with a pattern such as "rank1*.json"',
        )
    return _of_ranks(files, others)


def _of_ranks(files: list[Path], others: Sequence[Path] = ()) -> FoundFiles:
    """Return the files without merged traces, unless all are; ``others`` are the folders that are left out."""
    left_out = dict.fromkeys(others, "only the last of these folders is read")
    merged = dict.fromkeys(filter(is_merged, files), "it is a merged trace")
    own = [path for path in files if path not in merged]
    return FoundFiles(own, left_out | merged) if own else FoundFiles(files, left_out)


def _in_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files in a folder or in those below it, and the folders that are left out."""
    chosen = _traces(_with_trace_suffix(_matches(folder, ["*"])))
    if not all(map(is_merged, chosen)):
        return chosen, []
    by_folder: dict[Path, list[Path]] = {}
    for path in _with_trace_suffix(_matches(folder, ["**", "*"])):
        by_folder.setdefault(path.parent, []).append(path)
    folders = [(path, _traces(by_folder[path])) for path in _natural_order(by_folder)]
    folders = [(path, files) for path, files in folders if not all(map(is_merged, files))]
    if folders and all(_FOLDER.match(path.name) for path, _ in folders):
        return [path for _, files in folders for path in files], []
    if folders:
        last = _last_of_each_rank(folders)
        return dict(folders)[last], [path for path, _ in folders if path != last]
    if chosen:
        return chosen, []
    if others := _natural_order(path for files in by_folder.values() for path in files):
        named = f"it holds {counted(len(others), 'file')} named like traces, *.json"
        kind = kind_of(others[0], read_head(others[0], _HEAD_BYTES))
        if kind.read is None:  # such as pointers of Git LFS
            raise TraceError(folder, f"{named}, but none is one. {others[0].relative_to(folder)}: {kind.text}")
        raise TraceError(folder, f'{named}, but none contains "traceEvents" or "rocprofiler"')
    if windows := without_files(folder, "skipped", "failed", "not reached"):
        raise TraceError(folder, f"the run has no trace; {windows[-1]}")
    raise TraceError(folder, f"the folder holds no file that ends in {', '.join(SUFFIXES)}{but_pickles(folder)}")


def but_pickles(folder: Path) -> str:
    """Return how the files in a folder that may be memory snapshots are read; empty without any."""
    pickles = _natural_order(folder.glob("*.pickle"))
    files = counted(len(pickles), ".pickle file")
    return f", but {files}: instrument memory reads one, such as {pickles[0]}" if pickles else ""


def _last_of_each_rank(folders: Sequence[tuple[Path, list[Path]]]) -> Path:
    """Return the last folder by name; with several runs, of the run that was written last."""
    written = {path: max(file.stat().st_mtime_ns for file in files) for path, files in folders}
    newest = max(written.values())
    runs = {path.parent for path, time_ns in written.items() if time_ns == newest}
    return [path for path in written if path.parent in runs][-1]


def _matching(pattern: Path) -> Iterator[Path]:
    """Yield each file that matches a pattern once, like `glob`."""
    pairs = zip(pattern.parts, ("", *pattern.parts), strict=False)
    parts = [part for part, before in pairs if not part == before == "**"]
    if "\0" not in str(pattern):
        anchored = int(bool(pattern.anchor))
        yield from _matches(Path(pattern.anchor), [*parts[anchored:], *["*"] * (parts[-1] == "**")])


def _matches(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files below a folder that match the parts of a pattern; symbolic links may form cycles."""
    todo, links = deque([(folder, 0)]), deque[tuple[Path, int]]()
    seen: set[tuple[int, int, int]] = set()
    names = 0
    while todo or links:
        path, at = (todo or links).popleft()  # links come last, so that files keep their own names
        with suppress(OSError):
            stat = path.stat()
            if (stat.st_dev, stat.st_ino, at) in seen:
                continue
            seen.add((stat.st_dev, stat.st_ino, at))
            if at == len(parts):
                if path.is_file():
                    yield path
                continue
            if parts[at] == "**":
                todo.append((path, at + 1))
            elif not glob.has_magic(parts[at]):
                todo.append((path / parts[at], at + 1))
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    names += 1
                    if names > _MAX_NAMES:
                        raise TraceError(
                            folder, f"it holds more than {_MAX_NAMES:,} files and folders: name a folder inside it"
                        )
                    following = _next_parts(entry, parts, at)
                    if following is not None:
                        (links if entry.is_symlink() else todo).append((path / entry.name, following))


def _next_parts(entry: os.DirEntry[str], parts: list[str], at: int) -> int | None:
    """Return the part of the pattern that comes after this name; None if the name does not match."""
    hidden = entry.name.startswith(".")
    if parts[at] == "**":
        return at if not hidden and entry.is_dir() else None
    if hidden != parts[at].startswith(".") or not fnmatch.fnmatch(entry.name, parts[at]):
        return None
    return at + 1 if at + 1 == len(parts) or entry.is_dir() else None


def _with_trace_suffix(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.name.endswith(SUFFIXES) and path.is_file()]


def _traces(paths: Iterable[Path]) -> list[Path]:
    own = (path for path in paths if not path.name.startswith(".") and not path.name.endswith(_BESIDE))
    files = set(filter(_could_be_trace, own))
    # nsys writes the .sqlite of a report beside it, and JAX both of these, of which the first needs protobuf
    twins = {path.with_suffix(".nsys-rep") for path in files if path.suffix == ".sqlite"}
    jax = ".trace.json.gz"
    twins |= {
        path.with_name(f"{path.name.removesuffix(jax)}.xplane.pb") for path in files if path.match(f"*{jax}")
    }
    return _natural_order(files - twins)


def is_merged(path: Path) -> bool:
    """Return whether a file is a merged trace, as its beginning says."""
    if ".json" not in path.suffixes:
        return False
    head = b""
    with suppress(OSError):  # its reader says what is wrong
        head = read_head(path, _HEAD_BYTES)
    return f'"{MERGED_MARK}":'.encode() in head or _LABELLED.search(head) is not None


def _could_be_trace(path: Path) -> bool:
    """Return whether a file may be a trace, and is not a small JSON file of another kind, such as settings.

    A file with the name of a rank that holds nothing is a trace that was lost.
    """
    if ".json" not in path.suffixes or not 0 < path.stat().st_size < _MAX_PROBED_BYTES:
        return True
    text = path.read_bytes()
    if text.startswith(GZIP) or (text.strip() in _NOTHING and rank_from_name(path) is not None):
        return True
    return any(word in text for word in (b"traceEvents", b'"ph"', b"rocprofiler"))


def _natural_order(paths: Iterable[Path]) -> list[Path]:
    """Sort paths by the numbers in them: step-20 before step-100."""
    return sorted(paths, key=lambda path: natural_key(str(path)))
