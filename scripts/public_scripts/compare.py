"""Compares a run under `instrument` with the plain run and with the manifest's facts about the script."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from typing import Any

from .script import Script
from .ways import Outcome, middle

WORST_EXIT_CODE_OF_SYNCS = 1  # synchronizations were found; 2 is an error


def lines(script: Script, text: str, *, numbers: bool = True) -> list[str]:
    """Return the lines of `text` without values that differ from run to run: times, rates and process ids.

    With `numbers` False, numbers, devices and flags are removed as well: a dry run takes a GPU's branches and
    draws random numbers as a GPU would.
    """
    for pattern in script.times:
        text = re.sub(pattern, "<time>", text)
    if not numbers or not script.repeatable:
        text = re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?%?|\bnan\b", "0", text)
        text = re.sub(r"\b(cpu|cuda(:0)?|True|False)\b", "<device>", text)
        text = re.sub(r" +", " ", text)
    found = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return found if script.ordered else sorted(found)


def last_loss(script: Script, outcome: Outcome) -> str | None:
    """Return the loss printed last, to the last digit; of several processes all last losses, sorted."""
    found = re.findall(script.loss, f"{outcome.out}\n{outcome.err}")
    if not found or not script.repeatable:
        return None
    return found[-1] if script.ordered else " ".join(sorted(found))


def _missing(expected: list[str], found: list[str]) -> list[str]:
    """Return the lines of `expected` that `found`, which may have more, lacks in this order."""
    matcher = difflib.SequenceMatcher(None, expected, found, autojunk=False)
    blocks = [(block.a, block.size) for block in matcher.get_matching_blocks()]
    kept = {index for start, size in blocks for index in range(start, start + size)}
    return [line for index, line in enumerate(expected) if index not in kept]


def _first_difference(expected: list[str], found: list[str]) -> str | None:
    for one, other in zip(expected, found, strict=False):
        if one != other:
            return f"printed {other!r} for {one!r}"
    if len(expected) != len(found):
        return f"printed {len(found)} lines, plain {len(expected)}"
    return None


def same_output(script: Script, plain: Outcome, other: Outcome) -> list[str]:
    """Compare exit code, standard output, the script's part of standard error, and the last loss."""
    problems = []
    if plain.code != other.code:
        last_line = (other.err.strip().splitlines() or ["nothing on stderr"])[-1]
        problems.append(f"exit code {other.code}, plain {plain.code}: {last_line}")
    difference = _first_difference(lines(script, plain.out), lines(script, other.out))
    if difference:
        problems.append(difference)
    lost = _missing(lines(script, plain.err), lines(script, other.err))
    if lost:
        problems.append(f"{len(lost)} lines of stderr differ, first {lost[0]!r}")
    if last_loss(script, plain) != last_loss(script, other):
        problems.append(f"last loss {last_loss(script, other)}, plain {last_loss(script, plain)}")
    return problems


def recorded(script: Script, way: str, outcome: Outcome) -> list[str]:
    """Compare the windows with the schedule, and their regions with the script's."""
    first, last = {"run": (2, 4), "run --steps A-B": middle(script)}.get(way, (0, script.updates - 1))
    windows = [window for window in outcome.windows if window["status"] != "not reached"]
    problems = []
    to_the_end = way.endswith("all")
    expected = [(first, last, "recorded")] * script.processes
    if script.evaluations > first:
        ends = min(last, script.evaluations - 1)
        expected.append((first, ends, "recorded" if to_the_end else "partial"))
    if len(windows) != len(expected):
        problems.append(f"{len(windows)} windows, expected {len(expected)}")
    for window in windows:
        found = (*(window["steps"] or (None, None)), window["status"])
        late_start = (
            to_the_end and (first, *found[1:]) in expected
        )  # the first steps passed before they were known
        if found not in expected and not late_start:
            planned = " or ".join(f"{first}-{last} {status}" for first, last, status in dict.fromkeys(expected))
            reason = f": {window['reason']}" if window["reason"] else ""
            problems.append(f"steps {found[0]}-{found[1]} {found[2]}{reason}, expected {planned}")
    lost = [name for name in script.regions if not any(_is(name, region) for region in outcome.regions)]
    if windows and lost:
        problems.append(f"no region {', '.join(lost)}")
    return problems


def _is(name: str, region: str) -> bool:
    """Return whether `region` has the expected name, alone or with a label."""
    return re.fullmatch(rf"{re.escape(name)}([ \[#].*)?", region) is not None


def found_syncs(outcome: Outcome) -> Counter[str]:
    """Return ``FILE:LINE OP`` of each line that `instrument syncs` found."""
    findings = [found for found in (outcome.report or {}).get("findings", []) if found["status"] == "sync"]
    return Counter(f"{_line(found)} {found['op']}" for found in findings if found["site"])


def _line(found: dict[str, Any]) -> str:
    site = found["site"]
    return f"{site['file'].rpartition('/')[2]}:{site['line']}" if site else "an unknown line"


def dry_run(script: Script, plain: Outcome, outcome: Outcome) -> list[str]:
    """Compare the report of `instrument syncs`: a complete run, the number of steps, and the lines."""
    report = outcome.report
    if report is None:
        last_line = (outcome.err.strip().splitlines() or ["nothing on stderr"])[-1]
        return [f"no report, exit code {outcome.code}: {last_line}"]
    problems = []
    if report["error"] or not report["finished"]:
        problems.append(f"did not come to its end: {report['error']}")
    problems += [
        f"{_line(found)} is said to be {found['status']}: {found['cause']}"
        for found in report["findings"]
        if found["status"] not in ("sync", "allowed")
    ]
    if outcome.code > WORST_EXIT_CODE_OF_SYNCS:
        problems.append(f"exit code {outcome.code}")
    expected = [line for line in lines(script, plain.out, numbers=False) if line not in script.cpu_lines]
    lost = _missing(sorted(expected), sorted(lines(script, outcome.out, numbers=False)))
    if lost:
        problems.append(f"{len(lost)} kinds of lines were not printed, first {lost[0]!r}")
    if report["steps"] != script.updates * script.processes:
        problems.append(f"{report['steps']} steps, expected {script.updates * script.processes}")
    found = set(found_syncs(outcome))
    for title, names in (("not found", set(script.syncs) - found), ("not expected", found - set(script.syncs))):
        if names:
            problems.append(f"lines {title}: {', '.join(sorted(names))}")
    return problems


def problems(script: Script, outcomes: dict[str, Outcome]) -> dict[str, list[str]]:
    """Return the problems of each run; an empty list is a pass."""
    plain = outcomes["plain"]
    found: dict[str, list[str]] = {}
    for way, outcome in outcomes.items():
        if way == "plain":
            found[way] = _problems_of_plain_run(script, plain)
        elif way == "plain again":
            found[way] = same_output(script, plain, outcome)
        elif way == "syncs":
            found[way] = dry_run(script, plain, outcome)
        else:
            found[way] = same_output(script, plain, outcome) + recorded(script, way, outcome)
    return found


def _problems_of_plain_run(script: Script, plain: Outcome) -> list[str]:
    """Return the problems of the plain run, which must succeed and print a loss."""
    if plain.code:
        last_line = (plain.err.strip().splitlines() or ["nothing on stderr"])[-1]
        return [f"exit code {plain.code}: {last_line}"]
    if script.repeatable and last_loss(script, plain) is None:
        return [f"printed no loss that matches {script.loss!r}"]
    return []
