"""Where a file is, said so that it is the same in another folder and on another machine."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MARKS = (".git", "pyproject.toml")


@lru_cache(maxsize=1024)
def root_of(folder: Path) -> Path | None:
    """Return the nearest folder from ``folder`` upward with ``.git``, else with ``pyproject.toml``, or None."""
    for mark in _MARKS:
        for candidate in (folder, *folder.parents):
            if os.path.lexists(candidate / mark):  # raises nothing where a folder may not be read
                return candidate
    return None


@lru_cache(maxsize=4096)
def portable(file: str) -> str:
    """Return ``file`` from the root of its repository, or of the packages it is installed with.

    Outside of both only its name is left; what is no absolute path (``<stdin>``) stays as it is.
    """
    for packages in INSTALLED:
        if packages in file:
            return Path(file.rpartition(packages)[2]).as_posix()
    path = Path(file)
    if not path.is_absolute():
        return path.as_posix()
    root = root_of(path.parent)
    return path.relative_to(root).as_posix() if root else path.name
