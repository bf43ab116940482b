"""`MemoryFile`: a file that is never on a disk, for names that must not be left there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _SystemPath = Path
else:  # before Python 3.12, only the class of this system's paths can have subclasses
    _SystemPath = type(Path())


class MemoryFile(_SystemPath):
    """A path whose content is in memory; it has the name of another file, for errors."""

    content: bytes

    @classmethod
    def of(cls, path: Path, content: bytes) -> MemoryFile:
        """Return a file with this content, under the name of ``path``."""
        file = cls(path)
        file.content = content
        return file

    def open(self, *_: Any, **__: Any) -> Any:
        """Return a file object to read the bytes from."""
        return io.BytesIO(self.content)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return a result that has the size alone."""
        return os.stat_result((0, 0, 0, 0, 0, 0, len(self.content), 0, 0, 0))
