"""Says a report of synchronizations in sentences, and renders it for a terminal with lines of code and fixes."""

from __future__ import annotations

import linecache
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from ...base.findings import Site, SyncFinding
from ...base.printable import printable
from ...base.source_paths import portable
from ...base.units import count, duration
from ...explain.waits.events import CHOSEN
from ...explain.waits.report import SyncReport, times
from .lines import Line, diff, line, wrapped

_STEP_PHRASES = {0: "", 1: " in the step"}


def headline(results: SyncReport) -> str:
    """Return the first line: the result, and how it was found."""
    how = {"live": "live", "dry run": "dry run without a GPU, no timings", "trace": "trace"}[results.source]
    if results.steps:
        how += "; " if results.source == "dry run" else ", "
        how += f"{count(results.steps)} step{'s' * (results.steps > 1)}"
    syncs = results.syncs
    if not syncs and results.unavailable_reason:
        return f"Nothing could be checked ({how}): {printable(results.unavailable_reason)}"
    if not syncs and any(each.forbidden and not each.cause.startswith(CHOSEN) for each in results.not_covered):
        return f"The program would not run on a GPU ({how})"
    if not syncs:
        return f"No line makes the CPU wait for the GPU ({how})"
    usual, most = results.typical(*syncs), results.max_in_step(*syncs)
    where = _STEP_PHRASES.get(results.steps, " in most steps")
    often = f"{count(usual) if usual else 'no'} synchronization{'s' * (usual != 1)}{where}"
    often += f", up to {count(most)} in others" if most != usual else ""
    lines = f"{len(syncs)} lines make" if len(syncs) > 1 else "1 line makes"
    return f"{lines} the CPU wait for the GPU: {often} ({how})"


def call_text(finding: SyncFinding) -> str:
    """Return the operation, why it synchronizes, and what it copies."""
    size = f", {count(finding.bytes)} bytes{' in all' * (finding.count > 1)}" if finding.bytes is not None else ""
    copied = f" ({finding.direction}{size})" if finding.direction else ""
    return f"{finding.op}: {finding.cause}{copied}{', inside no_syncs' * finding.forbidden}"


def cost_text(results: SyncReport, finding: SyncFinding) -> str:
    """Return how often the finding synchronizes, and how long that took."""
    return f"{results.pattern(finding)}{_blocked(results, finding)}"


def context_text(finding: SyncFinding) -> str:
    """Return the region, the line of a library, the backward node and the thread; empty if none is known."""
    about = [f"region {'/'.join(finding.region)}"] if finding.region else []
    if finding.via and finding.site:
        more = len(finding.vias) - 1
        others = f", and {count(more)} more line{'s' * (more > 1)} (vias in the JSON)" if more else ""
        line = f":{finding.via.line}" if finding.via.line else ""
        about.append(f"via {portable(finding.via.file)}{line} in {finding.via.function}{others}")
    about += [f"backward of {finding.backward}"] if finding.backward else []
    about += [_thread(finding)] if finding.thread not in ("", "MainThread") else []
    return ", ".join(about)


def place_text(finding: SyncFinding) -> str:
    """Return the line of the program, or of a library, or the thread."""
    if finding.site is not None:
        return f"{finding.site} in {finding.site.function}"
    if finding.via is not None:
        return f"{finding.via} in {finding.via.function}, not called by your code"
    return f"no line of Python, {_thread(finding)}"


def _thread(finding: SyncFinding) -> str:
    name = finding.thread or "?"
    return name if name.startswith("thread ") else f"thread {name}"  # the name that some profilers write


def one_line(results: SyncReport, finding: SyncFinding) -> str:
    """Return the finding in one line: place, operation and how often."""
    return f"{place_text(finding)}: {finding.op}, {results.pattern(finding)}"


def ended_text(results: SyncReport) -> str:
    """Return what ended the run early."""
    return f"The run ended early, so the report covers a part of it: {results.ended}"


def dropped_text(results: SyncReport) -> str:
    """Return how often lines synchronized that are not listed."""
    return f"Lines that are not listed synchronized {times(results.dropped)}."


def inside_and_outside(results: SyncReport) -> tuple[list[SyncFinding], list[SyncFinding]]:
    """Return the synchronizations, and apart those outside the steps only that are not forbidden there."""
    groups: tuple[list[SyncFinding], list[SyncFinding]] = ([], [])
    for finding in results.syncs:
        outside = results.steps and not results.pattern(finding).counts and not finding.forbidden
        groups[bool(outside)].append(finding)
    return groups


def _blocked(results: SyncReport, finding: SyncFinding) -> str:
    if results.source == "dry run":
        return ""
    if finding.blocked_ns is None:
        return f"; how long is unknown: {results.why_untimed(finding)}"
    each = f" in all, {duration(finding.blocked_ns / finding.timed)} each time" if finding.timed > 1 else ""
    timed, calls = finding.timed, finding.count
    some = f" ({count(timed)} of {count(calls)} calls are timed)" if timed < calls else ""
    idle = f", which left the GPU without work for {duration(finding.idle_ns)}" if finding.idle_ns else ""
    little = "; less than 0.1 % of the time" if results.negligible(finding) else ""
    return f"; the CPU waited {duration(finding.blocked_ns)}{each}{some}{idle}{little}"


def source_lines(site: Site, around: int) -> dict[int, str]:
    """Return the line of code and as many before and after it, by number; empty if the file cannot be read.

    The lines are printable, and lack the indentation that they share.
    """
    code = linecache.getlines(site.file)
    if not 0 < site.line <= len(code):
        return {}
    first = max(site.line - around, 1)
    lines = [printable(line.rstrip().expandtabs(4)) for line in code[first - 1 : site.line + around]]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return dict(enumerate((line[margin:] for line in lines), first))


_MAX_BLOCKS = 20  # findings shown in full; the others take a line each
_CONTEXT_LINES = 2  # lines of code before and after
_COLORS = {"high": "bold red", "medium": "yellow", "low": "cyan"}
_INDENT = " " * 4
_LEAST_WIDTH = 30  # of a line
_OUTSIDE = "Outside the steps, where a synchronization costs little"


def lines(results: SyncReport, width: int) -> Iterator[Line]:
    """Yield the lines of the report.

    Prose and code fit ``width``; a path is never broken, so that it can be copied.
    """
    width = max(width, _LEAST_WIDTH)
    yield from wrapped(headline(results), width, "bold")
    if results.ended is not None:
        yield from wrapped(ended_text(results), width, indent=_INDENT, hanging=_INDENT)
    syncs, outside = inside_and_outside(results)
    for finding in syncs[:_MAX_BLOCKS]:
        yield line()
        yield from _block(results, finding, width)
    yield from _list("More", [one_line(results, finding) for finding in syncs[_MAX_BLOCKS:]], width)
    listed = [f"{place_text(finding)}: {finding.op}, {times(finding.count)}" for finding in outside]
    yield from _list(_OUTSIDE, listed, width)
    if results.dropped:
        yield from wrapped(dropped_text(results), width, indent=_INDENT, hanging=_INDENT)
    allowed = [f"{one_line(results, finding)}: {finding.allowed}" for finding in results.allowed]
    yield from _list("Allowed", allowed, width)
    not_covered = [
        f"{place_text(finding)}: {finding.cause} ({results.pattern(finding)})" for finding in results.not_covered
    ]
    yield from _list("Not covered", not_covered, width)
    yield from _list("Coverage", results.coverage, width)


def _block(results: SyncReport, finding: SyncFinding, width: int) -> Iterator[Line]:
    severity = results.severity(finding)
    yield (*line(f"{severity:<8}", _COLORS[severity]), *line(place_text(finding), "bold"))
    for text in (call_text(finding), cost_text(results, finding), context_text(finding)):
        yield from wrapped(text, width, indent=_INDENT, hanging=_INDENT)
    site = finding.site or finding.via
    if site is not None:
        yield from _excerpt(site, width)
    if finding.fix is not None:
        yield from wrapped(f"Fix: {finding.fix.text}", width, indent=_INDENT, hanging=_INDENT)
        yield from diff(finding.fix, f"{_INDENT}  ")


def _excerpt(site: Site, width: int) -> Iterator[Line]:
    """Yield the line of code and its neighbors, with an arrow; nothing if the file cannot be read."""
    shown = source_lines(site, _CONTEXT_LINES)
    digits = len(str(max(shown, default=0)))
    for number, code in shown.items():
        current = number == site.line
        text = f"{_INDENT}{'>' if current else ' '} {number:>{digits}} | {code}"
        yield line(_cut(text.rstrip(), width), "bold" if current else "dim")


def _list(title: str, items: list[str], width: int) -> Iterator[Line]:
    if items:
        yield line()
        yield line(f"{title}:", "bold")
        for item in items:
            yield from wrapped(f"- {item}", width, indent=_INDENT[:2], hanging=_INDENT)


def _cut(text: str, width: int) -> str:
    """Return the text, cut off if it takes more columns of a terminal than ``width``."""
    columns = list(accumulate(map(_width_of, text)))
    if not columns or columns[-1] <= width:
        return text
    return text[: bisect_right(columns, width - 3)] + "..."


def _width_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
