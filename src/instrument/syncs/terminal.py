"""Renders a report for a terminal: worst first, each finding with its line of code and its fix."""

from __future__ import annotations

import textwrap
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from ..findings import Site, SyncFinding
from ..printable import printable
from .finding_text import (
    call_text,
    context_text,
    cost_text,
    headline,
    is_outside,
    one_line,
    place_text,
    source_lines,
)
from .report_data import ReportData, times

_MAX_BLOCKS = 20  # findings shown in full; the others take a line each
_CONTEXT_LINES = 2  # lines of code before and after
_COLORS = {"high": "bold red", "medium": "yellow", "low": "cyan"}
_INDENT = " " * 4
_OUTSIDE = "Outside the steps, where a synchronization costs little"


class Line(NamedTuple):
    """A line of the report, with styles of rich, which is not imported: a program may have a module `rich`."""

    text: str = ""
    style: str = ""
    head: str = ""
    head_style: str = ""


def lines(results: ReportData, width: int) -> Iterator[Line]:
    """Yield the lines of the report.

    Prose and code fit ``width``; a path is never broken, so that it can be copied.
    """
    for line in textwrap.wrap(headline(results), max(width, 30), break_long_words=False):
        yield Line(line, style="bold")
    if results.ended is not None:
        yield from _prose(f"The run ended early, so the report covers a part of it: {results.ended}", width)
    outside = [found for found in results.syncs if is_outside(results, found)]
    syncs = [found for found in results.syncs if not is_outside(results, found)]
    for found in syncs[:_MAX_BLOCKS]:
        yield Line()
        yield from _block(results, found, width)
    yield from _list("More", [one_line(results, found) for found in syncs[_MAX_BLOCKS:]], width)
    listed = [f"{place_text(found)}: {found.op}, {times(found.count)}" for found in outside]
    yield from _list(_OUTSIDE, listed, width)
    if results.dropped:
        yield from _prose(f"Lines that are not listed synchronized {times(results.dropped)}.", width)
    allowed = [f"{one_line(results, found)}: {found.allowed}" for found in results.allowed]
    yield from _list("Allowed", allowed, width)
    not_covered = [
        f"{place_text(found)}: {found.cause} ({results.pattern(found)})" for found in results.not_covered
    ]
    yield from _list("Not covered", not_covered, width)
    yield from _list("Coverage", results.coverage, width)


def _block(results: ReportData, found: SyncFinding, width: int) -> Iterator[Line]:
    severity = results.severity(found)
    yield Line(printable(place_text(found)), "bold", f"{severity:<8}", _COLORS[severity])
    for text in (call_text(found), cost_text(results, found), context_text(found)):
        yield from _prose(text, width)
    site = found.site or found.via
    if site is not None:
        yield from _excerpt(site, width)
    if found.fix is None:
        return
    yield from _prose(f"Fix: {found.fix.text}", width)
    for sign, code, style in (("-", found.fix.before, "red"), ("+", found.fix.after, "green")):
        for line in code.splitlines():
            yield Line(f"{_INDENT}  {sign} {line}", style=style)


def _excerpt(site: Site, width: int) -> Iterator[Line]:
    """Yield the line of code and its neighbors, with an arrow; nothing if the file cannot be read."""
    shown = source_lines(site, _CONTEXT_LINES)
    digits = len(str(max(shown, default=0)))
    for number, line in shown.items():
        current = number == site.line
        text = f"{_INDENT}{'>' if current else ' '} {number:>{digits}} | {line}"
        yield Line(_cut(text.rstrip(), width), style="bold" if current else "dim")


def _list(title: str, items: list[str], width: int) -> Iterator[Line]:
    if items:
        yield Line()
        yield Line(f"{title}:", style="bold")
        for item in items:
            yield from _prose(f"- {item}", width, _INDENT[:2], hanging=2)


def _prose(text: str, width: int, indent: str = _INDENT, hanging: int = 0) -> Iterator[Line]:
    """Yield ``text`` in lines of ``width``, broken between words only."""
    wrapped = textwrap.wrap(
        printable(text), max(width, 30), initial_indent=indent, subsequent_indent=indent + " " * hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return map(Line, wrapped)


def _cut(text: str, width: int) -> str:
    """Return the text, cut off if it takes more columns of a terminal than ``width``."""
    columns = list(accumulate(map(_width_of, text)))
    if not columns or columns[-1] <= width:
        return text
    return text[: bisect_right(columns, max(width, 30) - 3)] + "..."


def _width_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
