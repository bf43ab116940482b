"""The findings for a person at a terminal: worst first, each at its line of code, with what to write instead."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..printable import printable
from ..report.plain import count, duration
from .finding import Finding, Site
from .fixes import fix_of
from .results import Results
from .roots import portable
from .suggestions import OUTSIDE

_BLOCKS = 20  # shown in full; of the others a line each
_AROUND = 2  # lines of code before and after
_COLOURS = {"high": "bold red", "medium": "yellow", "low": "cyan"}
_INDENT = " " * 4


def lines(results: Results, width: int) -> Iterator[Text]:
    """Yield the lines of the report.

    Prose and code fit ``width``; a path stays in one piece, so that it can be copied. Names are literal.
    """
    for line in textwrap.wrap(headline(results), max(width, 30), break_long_words=False):
        yield Text(line, style="bold")
    if results.ended is not None:
        yield from _prose(
            f"The run did not come to its end, and the rest was not looked at: {results.ended}", width
        )
    syncs = results.syncs
    for found in syncs[:_BLOCKS]:
        yield Text()
        yield from _block(results, found, width)
    yield from _list("And", [_short(results, found) for found in syncs[_BLOCKS:]], width)
    if results.dropped:
        yield from _prose(f"Further lines, not listed, waited {count(results.dropped)} times.", width)
    allowed = [f"{_short(results, found)}: {found.allowed}" for found in results.allowed]
    yield from _list("Allowed", allowed, width)
    unseen = [f"{_where(found)}: {found.cause} ({_times(results, found)})" for found in results.not_covered]
    yield from _list("Not covered", unseen, width)
    yield from _list("Coverage", results.coverage, width)


def headline(results: Results) -> str:
    """Return what was found, and where it was looked for."""
    looked = {"live": "live", "dry run": "dry run without a GPU, so without times", "trace": "trace"}[
        results.source
    ]
    if results.steps:
        looked += f", {count(results.steps)} step{'s' * (results.steps > 1)}"
    syncs = results.syncs
    if not syncs and results.blind:
        return f"Nothing was looked at ({looked}): {printable(results.blind)}"
    if not syncs:
        return f"No line makes the CPU wait for the GPU ({looked})"
    total = count(sum(map(results.per_step, syncs)))
    waits = f"{total} wait{'s' * (total != '1')}{' in a step' if results.steps else ''}"
    most = count(results.most(*syncs))
    waits += f", {most} at most" if results.steps and most != total else ""
    lines = f"{len(syncs)} lines make" if len(syncs) > 1 else "1 line makes"
    return f"{lines} the CPU wait for the GPU: {waits} ({looked})"


def _block(results: Results, found: Finding, width: int) -> Iterator[Text]:
    severity = results.severity(found)
    yield Text.assemble((f"{severity:<8}", _COLOURS[severity]), (printable(_where(found)), "bold"))
    size = f", {count(found.bytes)} bytes{' in all' * (found.count > 1)}" if found.bytes is not None else ""
    copied = f" ({found.direction}{size})" if found.direction else ""
    yield from _prose(f"{found.op}: {found.cause}{copied}{', inside no_syncs' * found.forbidden}", width)
    yield from _prose(f"{_times(results, found)}{_blocked(results, found)}", width)
    about = [f"region {'/'.join(found.region)}"] if found.region else []
    if found.via and found.site:
        others = f", and {count(len(found.vias) - 1)} more lines" if len(found.vias) > 1 else ""
        line = f":{found.via.line}" if found.via.line else ""
        about.append(f"via {portable(found.via.file)}{line} in {found.via.function}{others}")
    about += [f"backward of {found.backward}"] if found.backward else []
    about += [_thread(found)] if found.thread not in ("", "MainThread") else []
    if about:
        yield from _prose(", ".join(about), width)
    site = found.site or found.via
    if site is not None:
        yield from _excerpt(site, width)
    fix = OUTSIDE if results.steps and found.count == found.steps[None] else fix_of(found)
    yield from _prose(f"Fix: {fix.text}", width)
    for sign, code, style in (("-", fix.before, "red"), ("+", fix.after, "green")):
        for line in code.splitlines():
            yield Text(f"{_INDENT}  {sign} {line}", style=style)


def _where(found: Finding) -> str:
    if found.site is not None:
        return f"{found.site} in {found.site.function}"
    if found.via is not None:
        return f"{found.via} in {found.via.function}, called by no line of yours"
    return f"no line of Python, {_thread(found)}"


def _thread(found: Finding) -> str:
    name = found.thread or "?"
    return name if name.startswith("thread ") else f"thread {name}"  # some profilers call them so


def _short(results: Results, found: Finding) -> str:
    return f"{_where(found)}: {found.op}, {_times(results, found)}"


def _times(results: Results, found: Finding) -> str:
    """How often: "2 in a step", "3 in 100 steps", "1 outside of steps"."""
    if not results.steps:
        return f"{count(found.count)} time{'s' * (found.count != 1)}"
    outside = found.steps[None]
    inside = found.count - outside
    parts = []
    if inside >= results.steps:
        parts.append(f"{count(inside / results.steps)} in a step")
    elif inside:
        parts.append(f"{count(inside)} in {count(results.steps)} steps")
    if outside:
        parts.append(f"{count(outside)} outside of steps")
    return ", ".join(parts)


def _blocked(results: Results, found: Finding) -> str:
    if results.source == "dry run":
        return ""
    if found.blocked_ns is None:
        return f"; time unknown: {results.why_untimed(found)}"
    each = f", {duration(found.blocked_ns / found.timed)} each" if found.timed > 1 else ""
    timed = f" ({count(found.timed)} of {count(found.count)} timed)" if found.timed < found.count else ""
    idle = f"; then {duration(found.idle_ns)} of idle GPU" if found.idle_ns else ""
    return f"; blocked {duration(found.blocked_ns)}{each}{timed}{idle}"


def _excerpt(site: Site, width: int) -> Iterator[Text]:
    """The line of code between its neighbours, with an arrow; nothing where the file cannot be read."""
    code = linecache.getlines(site.file)
    if not 0 < site.line <= len(code):
        return
    first = max(site.line - _AROUND, 1)
    shown = [printable(line.rstrip().expandtabs(4)) for line in code[first - 1 : site.line + _AROUND]]
    digits = len(str(first + len(shown) - 1))
    margin = min((len(line) - len(line.lstrip()) for line in shown if line), default=0)
    for number, line in enumerate((line[margin:] for line in shown), first):
        here = number == site.line
        text = f"{_INDENT}{'>' if here else ' '} {number:>{digits}} | {line}"
        yield Text(_cut(text.rstrip(), width), style="bold" if here else "dim")


def _list(title: str, items: list[str], width: int) -> Iterator[Text]:
    if items:
        yield Text()
        yield Text(f"{title}:", style="bold")
        for item in items:
            yield from _prose(f"- {item}", width, _INDENT[:2], hanging=2)


def _prose(text: str, width: int, indent: str = _INDENT, hanging: int = 0) -> Iterator[Text]:
    """``text`` in lines of ``width``, broken between words only."""
    wrapped = textwrap.wrap(
        printable(text), max(width, 30), initial_indent=indent, subsequent_indent=indent + " " * hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return map(Text, wrapped)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(width, 30) - 3) + "..."
