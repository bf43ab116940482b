"""Files of lines with a reason and, after `` # ``, a place: text that may have comments, and that merges well."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .files import part_file, publish

_COMMENT = re.compile(r"(?:^|\s)#(?:\s|$)")


def read_lines(path: str | Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield the number of each line that is neither empty nor a comment, the line, its content and its place.

    Raises:
        ValueError: it is not a text file.
        OSError: it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"cannot read {path}: it is not a text file") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            content, *where = _COMMENT.split(line, maxsplit=1)
            yield number, line, content.rstrip(), "".join(where).strip()


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write a file whole or not at all, as at Ctrl-C; a symbolic link stays, and its target is written.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path).resolve()
    with part_file(target) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        publish(part, target)


def with_place(content: str, where: str) -> str:
    """Return a line: the content and, if there is one, the place."""
    return content.rstrip() + (f"  # {where}" if where else "")
