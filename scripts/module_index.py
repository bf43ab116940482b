"""Prints every module with the first sentence of its docstring: ``python -m scripts.module_index``."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "instrument"


def subject(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", first.replace("\n", " "), maxsplit=1)[0]


if __name__ == "__main__":
    modules = sorted((path.parent, path) for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    for room, paths in groupby(modules, key=lambda pair: pair[0]):
        about = room / "__init__.py"
        print(f"\n{room.relative_to(SOURCE)}/: {subject(about) if about.exists() else ''}")
        for _, path in paths:
            print(f"    {path.stem}: {subject(path)}")
