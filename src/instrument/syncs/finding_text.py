"""Describes reports and findings in sentences, and shows the lines of code around a finding."""

from __future__ import annotations

import linecache

from ..findings import Site, SyncFinding
from ..printable import printable
from ..source_paths import portable
from ..units import count, duration
from .events import CHOSEN
from .report_data import ReportData

_STEP_PHRASES = {0: "", 1: " in the step"}


def headline(results: ReportData) -> str:
    """Return the first line: the result, and how it was found."""
    how = {"live": "live", "dry run": "dry run without a GPU, no timings", "trace": "trace"}[results.source]
    if results.steps:
        how += "; " if results.source == "dry run" else ", "
        how += f"{count(results.steps)} step{'s' * (results.steps > 1)}"
    syncs = results.syncs
    if not syncs and results.unavailable_reason:
        return f"Nothing could be checked ({how}): {printable(results.unavailable_reason)}"
    if not syncs and any(found.forbidden and not found.cause.startswith(CHOSEN) for found in results.not_covered):
        return f"The program would not run on a GPU ({how})"
    if not syncs:
        return f"No line makes the CPU wait for the GPU ({how})"
    usual, most = results.typical(*syncs), results.max_in_step(*syncs)
    where = _STEP_PHRASES.get(results.steps, " in most steps")
    found = f"{count(usual) if usual else 'no'} synchronization{'s' * (usual != 1)}{where}"
    found += f", up to {count(most)} in others" if most != usual else ""
    lines = f"{len(syncs)} lines make" if len(syncs) > 1 else "1 line makes"
    return f"{lines} the CPU wait for the GPU: {found} ({how})"


def call_text(found: SyncFinding) -> str:
    """Return the operation, why it synchronizes, and what it copies."""
    size = f", {count(found.bytes)} bytes{' in all' * (found.count > 1)}" if found.bytes is not None else ""
    copied = f" ({found.direction}{size})" if found.direction else ""
    return f"{found.op}: {found.cause}{copied}{', inside no_syncs' * found.forbidden}"


def cost_text(results: ReportData, found: SyncFinding) -> str:
    """Return how often the finding synchronizes, and how long that took."""
    return f"{results.pattern(found)}{_blocked(results, found)}"


def context_text(found: SyncFinding) -> str:
    """Return the region, the line of a library, the backward node and the thread; empty if none is known."""
    about = [f"region {'/'.join(found.region)}"] if found.region else []
    if found.via and found.site:
        more = len(found.vias) - 1
        others = f", and {count(more)} more line{'s' * (more > 1)} (vias in the JSON)" if more else ""
        line = f":{found.via.line}" if found.via.line else ""
        about.append(f"via {portable(found.via.file)}{line} in {found.via.function}{others}")
    about += [f"backward of {found.backward}"] if found.backward else []
    about += [_thread(found)] if found.thread not in ("", "MainThread") else []
    return ", ".join(about)


def place_text(found: SyncFinding) -> str:
    """Return the line of the program, or of a library, or the thread."""
    if found.site is not None:
        return f"{found.site} in {found.site.function}"
    if found.via is not None:
        return f"{found.via} in {found.via.function}, not called by your code"
    return f"no line of Python, {_thread(found)}"


def _thread(found: SyncFinding) -> str:
    name = found.thread or "?"
    return name if name.startswith("thread ") else f"thread {name}"  # the name that some profilers write


def one_line(results: ReportData, found: SyncFinding) -> str:
    """Return the finding in one line: place, operation and how often."""
    return f"{place_text(found)}: {found.op}, {results.pattern(found)}"


def is_outside(results: ReportData, found: SyncFinding) -> bool:
    """Return whether ``found`` synchronizes outside the steps only, and is not forbidden there."""
    return bool(results.steps) and not results.pattern(found).counts and not found.forbidden


def _blocked(results: ReportData, found: SyncFinding) -> str:
    if results.source == "dry run":
        return ""
    if found.blocked_ns is None:
        return f"; how long is unknown: {results.why_untimed(found)}"
    each = f" in all, {duration(found.blocked_ns / found.timed)} each time" if found.timed > 1 else ""
    timed = f" ({count(found.timed)} of {count(found.count)} calls are timed)" if found.timed < found.count else ""
    idle = f", which left the GPU without work for {duration(found.idle_ns)}" if found.idle_ns else ""
    little = "; less than 0.1 % of the time" if results.negligible(found) else ""
    return f"; the CPU waited {duration(found.blocked_ns)}{each}{timed}{idle}{little}"


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
