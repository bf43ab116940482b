"""Finds the files of a job's traces, and the ranks that their names tell."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import TraceError

SUFFIXES = (".json", ".json.gz", ".sqlite", ".nsys-rep", ".db")
"""The files of a folder that are taken for traces."""

_SMALL = 1 << 16

_NAMED = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<!local)(?<!local[-_])rank[-_=. ]?(\d{1,6})(?!\d)",
        r"worker[-_]?(\d{1,6})(?!\d)",
        r"(?<![a-z0-9])r(\d{1,6})(?![a-z0-9])",
        r"(?:^|[-_.])(?:trace|traces|profile|report|gpu|device|local_rank)[-_]?(\d{1,3})$",
    )
]
_FOLDER = re.compile(r"^rank[-_=]?(\d{1,6})$", re.IGNORECASE)


def rank_of(path: Path) -> int | None:
    """Return the rank that a file's name says, or its folder's; None if neither does."""
    stem = re.sub(r"(\.pt)?(\.trace)?(\.json|\.json\.gz|\.sqlite|\.nsys-rep|\.db)$", "", path.name)
    for pattern in _NAMED:
        if found := pattern.search(stem):
            return int(found[1])
    found = _FOLDER.match(path.parent.name)
    return int(found[1]) if found else None


def process_of(path: Path) -> str:
    """Return the process that a file's name tells, as ", process 4711"; else nothing."""
    found = re.search(r"-pid(\d+)\.", path.name)
    return f", process {found[1]}" if found else ""


def find(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that ``paths`` means, as `read_ranks` says.

    Raises:
        TraceError: there are none.
    """
    if not isinstance(paths, (str, os.PathLike)):
        files = [Path(path) for path in paths]
        if not files:
            raise TraceError(Path(), '"paths" is empty; a folder, a pattern or files are accepted')
        return files
    if not str(paths):
        raise TraceError(Path(), '"paths" is empty; a folder, a pattern or files are accepted')
    path = Path(paths)
    if path.is_dir():
        files = _in_folder(path)
        if not files:
            raise TraceError(path, f"the folder holds no file that ends in {', '.join(SUFFIXES)}")
        return files
    found = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
    files = sorted(found, key=_natural)
    if not files:
        raise TraceError(path, "there is no such file or folder, and no file that matches it as a pattern")
    return files


def _in_folder(folder: Path) -> list[Path]:
    files = _traces_in(folder)
    if files:
        return files
    below = sorted((path for path in folder.rglob("*") if path.is_dir()), key=_natural)
    found = [(path, files) for path in below if (files := _traces_in(path))]
    if found and all(_FOLDER.match(path.name) for path, _ in found):
        return [path for _, files in found for path in files]
    return found[-1][1] if found else []


def _traces_in(folder: Path) -> list[Path]:
    files = {path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and path.is_file()}
    files = {path for path in files if _may_be_trace(path)}
    # nsys leaves the .sqlite that it made of a report beside it
    twins = {path.with_suffix(".nsys-rep") for path in files if path.suffix == ".sqlite"}
    return sorted((path for path in files - twins if not path.name.startswith(".")), key=_natural)


def _may_be_trace(path: Path) -> bool:
    """Whether it is more than a small file of JSON with something else in it, such as settings."""
    if ".json" not in path.suffixes or not 0 < path.stat().st_size < _SMALL:
        return True
    text = path.read_bytes()
    if text.startswith(b"\x1f\x8b"):
        return True
    return any(word in text for word in (b"traceEvents", b'"ph"', b"rocprofiler"))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts step-20 before step-100."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", str(path))]
