"""Command line: ``python -m scripts.public_scripts [NAME...] [--out PAGE] [--keep FOLDER]``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import repositories
from . import compare, ways
from .manifest import SCRIPTS
from .script import Script
from .table import Result, page

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "public-scripts"
VARIABLE = "PUBLIC_SCRIPTS"


def prepare(script: Script, checkout: Path) -> None:
    """Write the script's files, edited, and its data into the empty folder `checkout`.

    Raises:
        MissingError: the repository or a package is missing.
    """
    for package in script.needs:
        if importlib.util.find_spec(package) is None:
            raise repositories.MissingError(f"the package {package} is not installed: pip install {package}")
    clone = repositories.locate(VARIABLE, script.repository, script.commit, CACHE)
    repositories.check_out(clone, script.commit, script.parts, checkout)
    for edit in script.edits:
        path = checkout / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise ValueError(f"{edit.file} has {edit.old!r} {text.count(edit.old)} times, expected once")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    script.data(checkout)


def examine(script: Script, base: Path, say: Callable[[str], None]) -> Result:
    """Run one script in all ways and compare."""
    checkout = base / "prepared"
    checkout.mkdir(parents=True)
    try:
        prepare(script, checkout)
    except repositories.MissingError as error:
        say(f"  {error}")
        return Result(script, {}, {}, missing=str(error))
    outcomes = {}
    for way in ways.commands(script):
        outcomes[way] = ways.run(script, way, checkout, base)
        say(f"  {way}: {outcomes[way].seconds:.1f} s")
    problems = compare.problems(script, outcomes)
    for way, found in problems.items():
        for problem in found:
            say(f"  {way}: {problem}")
    return Result(script, outcomes, problems)


def _keep(result: Result, folder: Path) -> None:
    """Write the output of each run."""
    folder.mkdir(parents=True, exist_ok=True)
    for way, outcome in result.outcomes.items():
        name = f"{result.script.name} {way}".replace(" ", "_")
        (folder / f"{name}.out").write_text(outcome.out, encoding="utf-8")
        (folder / f"{name}.err").write_text(outcome.err, encoding="utf-8")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.public_scripts",
        description="Run public training scripts plain and under instrument, and compare.",
        epilog=f"Clones come from GitHub, or from the folder that {VARIABLE} names.",
    )
    names = [script.name for script in SCRIPTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of these only: {', '.join(names)}")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--keep", type=Path, help="write what each run printed into this folder")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"unknown script: {', '.join(unknown)}; there are {', '.join(names)}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the scripts; return 0 without differences, 1 with differences, 2 if a script could not be run."""
    options = _parse(arguments)

    def say(line: str) -> None:
        print(line, flush=True)

    results = []
    began = time.perf_counter()
    for script in SCRIPTS:
        if options.names and script.name not in options.names:
            continue
        say(script.name)
        with tempfile.TemporaryDirectory(prefix="public-scripts-") as base:
            results.append(examine(script, Path(base), say))
        if options.keep:
            _keep(results[-1], options.keep)
    if options.out:
        run = {result.script.name for result in results}
        left_out = [script.name for script in SCRIPTS if script.name not in run]
        options.out.write_text(page(results, left_out), encoding="utf-8")
    passed = sum(result.passed for result in results)
    say(f"{passed} of {len(results)} scripts without a difference, in {time.perf_counter() - began:.0f} s")
    if any(result.missing for result in results):
        return 2
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
