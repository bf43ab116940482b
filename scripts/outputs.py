"""Writes what the commands print for many files, to compare it byte by byte before and after a change.

``python -m scripts.outputs FOLDER OUT`` runs the commands below on each file and folder in FOLDER, and writes what
they print into OUT; ``diff -r`` of two such folders shows what changed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

from instrument.start.cli import main

COMMANDS = ("summarize", "diagnose", "whatif", "memory", "syncs", "compare", "slim")
PROGRAMS = (".py", ".sh", ".ipynb")  # which `instrument syncs` would run


def targets(folder: Path) -> Iterator[Path]:
    """Yield the files and folders in ``folder``, relative to it."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in PROGRAMS and "__pycache__" not in path.parts:
            yield path.relative_to(folder)


def arguments(command: str, target: Path, out: Path) -> list[str]:
    """Return the arguments of a command; a recording is compared with itself, and made slim into ``out``."""
    given = [str(target)] * (2 if command == "compare" else 1)
    return [command, *given, *(["--out", str(out)] if command == "slim" else [])]


def write(folder: Path, target: Path, out: Path) -> None:
    """Write what each command prints for ``target``: as text, and as JSON where it has that option."""
    os.chdir(folder)
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    name = str(target).replace("/", "__")
    for command in COMMANDS:
        line = arguments(command, target, out / f"{name}.slim.json")
        for options in ([], ["--json"]) if command != "slim" else ([],):
            printed = run([*line, *options])
            (out / f"{name}.{command}{'.json' if options else '.txt'}").write_text(
                printed.replace(str(out), "OUT")
            )


def run(line: list[str]) -> str:
    """Return what a command prints on both streams, and its exit code."""
    printed, code = io.StringIO(), 0
    sys.argv = ["instrument", *line]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return f"{printed.getvalue()}exit code {code}\n"


def write_all(folder: Path, out: Path) -> None:
    """Write the outputs for all files in ``folder``."""
    out.mkdir(parents=True, exist_ok=True)
    with get_context("forkserver").Pool(maxtasksperchild=20) as pool:
        pool.starmap(write, [(folder, target, out) for target in targets(folder)], chunksize=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    write_all(given.folder.resolve(), given.out.resolve())
