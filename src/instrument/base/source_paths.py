"""Paths of source files that are the same in another folder and on another machine."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ROOT_MARKERS = (".git", "pyproject.toml")
_IN_TORCH = re.compile(
    r".*[\\/]torch[\\/](?=(?:nn|optim|autograd|utils|distributed|cuda|fx|jit|functional|_\w+)[\\/.])"
)
_LIBRARY = re.compile(
    r"[\\/](?:site|dist)-packages[\\/]|[\\/]lib[\\/]python3|\\Lib\\|^<(?!stdin|ipython)"
)  # the last are texts that a library compiles, such as "<string>"


@lru_cache(maxsize=1024)
def root_of(folder: Path) -> Path | None:
    """Return the nearest folder from ``folder`` upward with ``.git``, else with ``pyproject.toml``, or None."""
    for marker in _ROOT_MARKERS:
        for candidate in (folder, *folder.parents):
            if os.path.lexists(candidate / marker):  # raises nothing if a folder may not be read
                return candidate
    return None


@lru_cache(maxsize=4096)
def portable(file: str) -> str:
    """Return ``file`` relative to the root of its repository, or to the folder of installed packages.

    A file in neither is reduced to its name; a path that is not absolute (``<stdin>``) stays the same.
    """
    for packages in INSTALLED:
        if packages in file:
            return Path(file.rpartition(packages)[2]).as_posix()
    path = Path(file)
    if not path.is_absolute():
        return path.as_posix()
    root = root_of(path.parent)
    return path.relative_to(root).as_posix() if root else path.name


def path_in_torch(file: str) -> str:
    """Return the path of a file inside torch, such as ``nn/modules/module.py``; empty for other files.

    By the path alone, with the separators of any system: the file may be on another machine.
    """
    folder = _IN_TORCH.match(file)
    return file[folder.end() :].replace("\\", "/") if folder else ""


def is_library(file: str) -> bool:
    """Whether a source file is one of an installed package or of Python, by the path alone as `path_in_torch`."""
    return bool(_LIBRARY.search(file) or path_in_torch(file))
