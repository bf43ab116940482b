"""Writes the last section of docs/architecture.md: every module with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "instrument"
PAGE = ROOT / "docs" / "architecture.md"
TITLE = "## Every module\n"


def module_index() -> str:
    """Return the section without its title."""
    paths = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
    listed = sorted((path.parent, path) for path in paths if path.name != "__init__.py")
    parts = [
        "\nEach with the first sentence of its docstring; `python -m scripts.module_index` writes this list.\n"
    ]
    for room, modules in groupby(listed, key=lambda pair: pair[0]):
        rows = [f"- `{path}`: {_subject(SOURCE / path)}" for _, path in modules]
        parts.append("\n".join([f"**`{room}/`**" if room.name else "**Beside the rooms**", "", *rows, ""]))
    return "\n".join(parts)


def _subject(path: Path) -> str:
    """Return the first sentence of a module's docstring, in Markdown."""
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", first.replace("\n", " "), maxsplit=1)[0].replace("``", "`")


if __name__ == "__main__":
    page, title, _ = PAGE.read_text().partition(TITLE)
    PAGE.write_text(page.rstrip("\n") + "\n\n" + TITLE + module_index())
