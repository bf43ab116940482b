"""`ServedFolders`: which files an agent may read and write, whatever it, a link or a trace asks for."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_MOST_FILES = 20_000
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}", re.ASCII)
_OWN_COPIES = "instrument-"  # how the readers' temporary files begin
_PROCESS = re.compile(r"/proc/\d+/stat")  # whether the process that writes a window lives
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LISTS = ("os.listdir", "os.scandir")
_serving: ContextVar[ServedFolders | None] = ContextVar("_serving", default=None)


class RefusedError(Exception):
    """A question that is not answered.

    Args:
        reason: why, in a sentence without names from files.
        advice: what to do instead.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice


class ServedFolders:
    """The folders below which an agent may read, and the one into which it may write.

    Args:
        folders: the folders to read below.
        out: the folder to write into; None if nothing may be written.

    Raises:
        ValueError: one of them is not a folder.
    """

    def __init__(self, folders: Sequence[Path], out: Path | None = None) -> None:
        for folder in (*folders, *([out] if out else [])):
            if not folder.is_dir():
                raise ValueError(f"not a folder: {folder}")
        self.folders = [folder.resolve() for folder in folders]
        self.out = out and out.resolve()
        code = [*sysconfig.get_paths().values(), *filter(None, sys.path), f"{sys.base_prefix}/lib"]
        self._code = {Path(path).resolve() for path in code} | {Path(__file__).resolve().parents[3]}
        self._copies = Path(tempfile.gettempdir()).resolve()

    def to_read(self, path: str) -> Path:
        """Return the file or folder that an agent names, with links resolved.

        Args:
            path: an absolute path, or one relative to a served folder.

        Raises:
            RefusedError: it is not below a served folder, or not there, or a pipe or device, whose reading may
                never end, or a folder with one of these or with a link that leads out.
        """
        named = [folder / path for folder in self.folders]
        inside = [each.resolve() for each in named if self.serves(each)]
        if not inside:
            raise RefusedError(
                "The path is not below the folders that this server serves.", "Call runs to see what it serves."
            )
        found = next((each for each in inside if each.exists()), None)
        if found is None:
            raise RefusedError(
                "The served folders have no such file or folder.", "Call runs to see what there is."
            )
        if found.is_dir():
            self._check_entries(found)
        elif not found.is_file():
            raise RefusedError("This is neither a file nor a folder.", "Call runs to see what there is.")
        return found

    def to_write(self, name: str, *suffixes: str) -> Path:
        """Return the path of a new file.

        Args:
            name: its name in the folder that may be written to.
            suffixes: how it may end.

        Raises:
            RefusedError: the name has other characters or another end, there is such a file, or no folder.
        """
        if self.out is None:
            raise RefusedError(
                "This server writes no files.", "Leave out the file; instrument mcp --out FOLDER allows one."
            )
        if not _NAME.fullmatch(name) or not name.endswith(suffixes):
            raise RefusedError(
                f"A new file is named by letters, digits, '_', '-' and '.', and ends in {' or '.join(suffixes)}.",
                "Give such a name, without a folder.",
            )
        path = self.out / name
        if path.is_symlink() or path.exists():
            raise RefusedError("There is such a file already.", "Give another name.")
        return path

    def serves(self, path: Path) -> bool:
        """Return whether a path, with links resolved, is below a served folder."""
        try:
            target = path.resolve()
        except (OSError, ValueError, RuntimeError):  # a name that no file can have, or a circle of links
            return False
        return any(target.is_relative_to(folder) for folder in self.folders)

    def _check_entries(self, folder: Path) -> None:
        """Check that no link below a folder leads out of the served ones, and that there are no pipes.

        Raises:
            RefusedError: one does, it holds a pipe or a device, or there are too many files to tell.
        """
        waiting, seen, files = [folder], {folder}, 0
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    path = Path(entry.path)
                    if not self.serves(path):
                        raise RefusedError(
                            "The folder holds a link that leads out of the folders that this server serves.",
                            "Name a file, or a folder without such a link.",
                        )
                    if path.exists() and not (path.is_file() or path.is_dir()):
                        raise RefusedError(
                            "The folder holds a pipe or a device.",
                            "Name a file, or a folder without such a thing.",
                        )
                    if files > _MOST_FILES:
                        raise RefusedError(
                            f"The folder holds more than {_MOST_FILES:,} files.",
                            "Name a file or the folder of one run.",
                        )
                    if path.is_dir() and path.resolve() not in seen:
                        seen.add(path.resolve())
                        waiting.append(path)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Let the body open only what this server serves; `install_guard` was called before."""
        token = _serving.set(self)
        try:
            yield
        finally:
            _serving.reset(token)

    def _allows(self, path: Path, writes: bool) -> bool:
        """Return whether the library may open a file while it answers, for itself or because a trace names it."""
        if any(path.is_relative_to(folder) for folder in self._code):
            return not writes or "__pycache__" in path.parts
        own_copy = path.is_relative_to(self._copies) and any(part.startswith(_OWN_COPIES) for part in path.parts)
        if own_copy or path == Path(os.devnull) or (self.out and path.is_relative_to(self.out)):
            return True
        return not writes and (self.serves(path) or bool(_PROCESS.fullmatch(str(path))))


def install_guard() -> None:
    """Have the interpreter ask, for the rest of the process, before files are opened or folders are listed.

    A trace names source files, a manifest names traces, and either may be a link: whatever code opens one of them
    in `ServedFolders.guarding`, a file that is not served cannot be read.
    """
    sys.addaudithook(_check)


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise PermissionError if a file may not be opened, or a folder may not be listed."""
    if event != "open" and event not in _LISTS:
        return
    served = _serving.get()
    if served is None or not arguments or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    path = Path(os.fsdecode(arguments[0])).resolve()
    if event == "open" and path == served._copies:  # a temporary file is opened by its folder, then by its name
        return
    if not served._allows(path, event == "open" and bool((arguments[2] or 0) & _WRITES)):
        raise PermissionError(13, "not below the folders that are served", str(path))
