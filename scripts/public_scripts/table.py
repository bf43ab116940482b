"""Writes the results of all scripts as a Markdown page."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from .compare import found_syncs, last_loss
from .script import Script
from .ways import Outcome

SHOWN = ("plain again", "run", "run --steps A-B", "run --steps all", "syncs")

HEAD = """\
# Public scripts

`make public-scripts` runs training scripts of other projects, plain and under `instrument`, and compares.
It clones them from GitHub at the commits below, or takes them from the folder that `PUBLIC_SCRIPTS` names, with
clones at `OWNER/NAME` or `OWNER+NAME`, bare or not; no code of theirs is kept. `make public-scripts SCRIPTS=mnist`
runs one.

Each script runs in a fresh copy, on a CPU, with tiny random data made on the spot:

- **plain again**: standard output, standard error, last loss and exit code are those of the first plain run.
- **run**, **run --steps A-B**, **run --steps all**: the same. The recorded steps are 2 to 4, A to B (the last but
  one and the two before it), and all up to the last update; the updates were counted by hand. The regions that
  the script has are there.
- **syncs**: the script completes. It prints the same lines except for numbers and the device, since it takes
  the branches and the random numbers of a GPU. It has as many steps as updates, and the lines that wait for the
  GPU are those that a person found by reading the script.

What `instrument` prints on standard error is left out. Times, rates and process numbers are masked; the patterns
are the `times` of each script in `scripts/public_scripts/manifest.py`, with the hand counts, data and edits.
"""


@dataclass(frozen=True)
class Result:
    """The results of one script; `missing` is the reason if it was not run."""

    script: Script
    outcomes: dict[str, Outcome]
    problems: dict[str, list[str]]
    missing: str = ""

    @property
    def passed(self) -> bool:
        """Whether the script was run and nothing differed."""
        return not self.missing and not any(self.problems.values())


def _cell(result: Result, way: str) -> str:
    if way not in result.outcomes:
        return "-"
    return "differs" if result.problems[way] else "same"


def _row(result: Result) -> str:
    script, plain = result.script, result.outcomes.get("plain")
    name = f"[{script.name}](https://github.com/{script.repository}/tree/{script.commit}/{script.parts[0]})"
    if plain is None:
        return f"| {name} | {script.updates} | not run | | | | | | |"
    loss = last_loss(script, plain) or "not repeatable"
    found = len(found_syncs(result.outcomes["syncs"])) if "syncs" in result.outcomes else "-"
    cells = " | ".join(_cell(result, way) for way in SHOWN)
    return f"| {name} | {script.updates} | {loss} | {cells} | {found} |"


def _details(result: Result) -> list[str]:
    lines = [f"- **{result.script.name}**: {result.missing}"] if result.missing else []
    for way, problems in result.problems.items():
        lines += [f"- **{result.script.name}**, {way}: {problem}" for problem in problems]
    return lines


def _about(script: Script) -> list[str]:
    lines = [
        f"### {script.name}",
        "",
        f"{script.repository} at {script.commit[:12]}: {script.shows}.",
        "",
        f"    {' '.join([*script.launcher, script.file, script.args])}",
        "",
        f"Updates: {script.counted}.",
    ]
    if script.edits:
        shown = "; ".join(f"`{edit.old}` becomes `{edit.new}`" for edit in script.edits)
        lines += ["", f"Edits: {shown}."]
    if script.env:
        lines += ["", f"Environment: {', '.join(f'`{name}={value}`' for name, value in script.env.items())}."]
    if script.without_syncs:
        lines += ["", f"Without `syncs`: {script.without_syncs}."]
    return [*lines, ""]


def page(results: Sequence[Result], left_out: Sequence[str] = ()) -> str:
    """Return the page: a table with a line for each script, what differed, and the scripts.

    Args:
        results: the results, in the order of the manifest.
        left_out: the names of scripts that were not requested.
    """
    import torch

    passed = sum(result.passed for result in results)
    details = [line for result in results for line in _details(result)]
    return "\n".join(
        [
            HEAD,
            f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}: "
            f"{passed} of {len(results)} scripts without a difference."
            + (f" Left out of this run: {', '.join(left_out)}." if left_out else ""),
            "",
            f"| script | updates | last loss | {' | '.join(SHOWN)} | lines that wait |",
            f"|---|---|---|{'---|' * (len(SHOWN) + 1)}",
            *map(_row, results),
            "",
            "## What differed",
            "",
            *(details or ["Nothing."]),
            "",
            "## The scripts",
            "",
            *(line for result in results for line in _about(result.script)),
        ]
    )
