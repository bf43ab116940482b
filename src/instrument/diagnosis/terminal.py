"""Renders a diagnosis for a terminal: the verdict, one bar of the step, the findings and the longest regions."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..findings import Finding
from ..printable import printable
from ..units import counted, duration
from .diagnosis_data import DiagnosisData
from .markdown import value_of

if TYPE_CHECKING:
    from rich.text import Text

_WIDTH = 80  # columns, without a terminal
_LETTERS = {
    "compute": ("#", "green"), "communication": ("=", "magenta"), "copies": ("c", "cyan"),
    "input": ("i", "yellow"), "synchronization": ("s", "red"), "overhead": ("o", "bright_red"),
    "latency": ("-", "bright_yellow"), "other": (".", "dim"),
}  # fmt: skip
_NO_BREAK = "\N{NO-BREAK SPACE}"
_COLORS = {"high": "red", "medium": "yellow", "low": "cyan"}
_REGIONS, _EVIDENCE, _GAPS = 5, 4, 3
_GAP = 0.05  # of the step: shorter gaps are not shown


def as_text(diagnosis: DiagnosisData) -> str:
    """Return what `render` renders as plain text, 80 columns wide."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, legacy_windows=False)
    for line in render(diagnosis, _WIDTH):
        console.print(line, soft_wrap=True)
    return out.getvalue().rstrip("\n")


def render(diagnosis: DiagnosisData, width: int) -> Iterator[Text]:
    """Yield the lines of the diagnosis, wrapped to this width."""
    from rich.text import Text

    yield from (Text(line, style="bold") for line in _wrapped(diagnosis.verdict, width))
    if diagnosis.parts:
        yield _bar(diagnosis.parts, width)
        yield from _legend(diagnosis, width)
        said = "Based on" if diagnosis.bound else "Why no bound"
        yield from (Text(line, style="dim") for line in _wrapped(f"{said}: {diagnosis.coverage}.", width))
    if mfu := _mfu(diagnosis):
        yield from map(Text, _wrapped(mfu, width))
    yield from map(Text, _wrapped(diagnosis.memory_text, width))
    yield Text("")
    worth = diagnosis.worth()
    for number, found in enumerate(worth, 1):
        yield from _finding(number, found, diagnosis, width)
    if not worth:
        yield from map(Text, _wrapped(diagnosis.nothing_found, width))
        yield Text("")
    if hidden := len(diagnosis.findings) - len(worth):
        yield Text(f"{counted(hidden, 'finding')} worth less than 1 %: see --json.", style="dim")
    yield from _regions(diagnosis, width)
    yield from _gaps(diagnosis, width)
    if diagnosis.abstained:
        text = f"{counted(len(diagnosis.abstained), 'rule')} abstained for lack of evidence: see --json."
        yield Text(text, style="dim")
    if diagnosis.left_out:
        path, reason = next(iter(diagnosis.left_out.items()))
        text = f"{counted(len(diagnosis.left_out), 'file')} left out, such as {path}: {reason}."
        yield from (Text(line, style="dim") for line in _wrapped(text, width))
    for name, error in diagnosis.failed.items():
        yield Text(printable(f"The rule {name} failed: {error}"), style="red")


def _bar(parts: Mapping[str, int], width: int) -> Text:
    from rich.text import Text

    whole = max(sum(parts.values()), 1)
    bar, drawn, reached = Text(), 0, 0
    for name, ns in parts.items():
        letter, style = _LETTERS[name]
        reached += ns
        cells = round(reached * width / whole) - drawn
        drawn += cells
        bar.append(letter * cells, style)
    return bar


def _legend(diagnosis: DiagnosisData, width: int) -> Iterator[Text]:
    from rich.text import Text

    parts = sorted(diagnosis.parts.items(), key=lambda item: -item[1])
    shown = [
        f"{_LETTERS[name][0]} {name} {duration(ns)} ({100 * ns / diagnosis.step_ns:.1f} %)"
        for name, ns in parts
        if ns
    ]
    whole = "  ".join(text.replace(" ", _NO_BREAK) for text in shown)
    yield from (Text(line.replace(_NO_BREAK, " ")) for line in textwrap.wrap(whole, width))


def _mfu(diagnosis: DiagnosisData) -> str:
    known = diagnosis.goodput
    if known["mfu"] is None:
        return ""
    said = f": {known['unknown']}" if known["unknown"] else ""
    if known["recomputed_flops"]:
        said = f", and {100 * known['hfu']:.1f} % with what the backward pass computes again{said}"
    return f"Model FLOPs utilization: {100 * known['mfu']:.1f} % of the peak of {known['peak']}{said}."


def _finding(number: int, found: Finding, diagnosis: DiagnosisData, width: int) -> Iterator[Text]:
    from rich.text import Text

    head = f"{number}. {found.title}"
    for index, line in enumerate(_wrapped(head, width, "   ")):
        yield Text(line, style=f"bold {_COLORS[found.severity]}" if not index else _COLORS[found.severity])
    win = diagnosis.win_text(found)
    text = f"   To win: {win}; {found.severity}, confidence {found.confidence}; rule {found.rule}"
    yield from map(Text, _wrapped(text, width, "   "))
    if place := str(found.where):
        yield from map(Text, _wrapped(f"   At: {place}", width, "       "))
    for each in found.evidence[:_EVIDENCE]:
        text = f"   - {diagnosis.definition(each)}: {value_of(each)}"
        yield from (Text(line, style="dim") for line in _wrapped(text, width, "     "))
    if found.fix:
        yield from map(Text, _wrapped(f"   Fix: {found.fix.text}", width, "        "))
        for sign, code, style in (("-", found.fix.before, "red"), ("+", found.fix.after, "green")):
            for line in code.splitlines():
                yield Text(f"   {sign} {printable(line)}", style=style)
    yield Text("")


def _regions(diagnosis: DiagnosisData, width: int) -> Iterator[Text]:
    from rich.text import Text

    if not diagnosis.regions:
        return
    title = f"Longest regions, {diagnosis.each_step}"
    yield Text(f"{title:<{max(width - 24, 30)}}{'CPU':>11}{'GPU':>11}", style="bold")
    for name, cpu_ns, gpu_ns in diagnosis.regions[:_REGIONS]:
        room = max(width - 24, 30)
        cut = printable(name)
        cut = cut if len(cut) < room else cut[: room - 4] + "..."
        yield Text(f"{cut:<{room}}{duration(cpu_ns):>11}{duration(gpu_ns):>11}")
    yield Text("")


def _gaps(diagnosis: DiagnosisData, width: int) -> Iterator[Text]:
    from rich.text import Text

    shown = [gap for gap in diagnosis.idle_gaps if gap.duration_ns >= _GAP * diagnosis.step_ns][:_GAPS]
    if shown:
        yield Text("Longest idle gaps: length, start in the window, and cause", style="bold")
    for gap in shown:
        place = f", ended by {gap.where}" if str(gap.where) else ""
        text = f"   {duration(gap.duration_ns)} at {duration(gap.start_ns)}: {gap.cause.replace('_', ' ')}{place}"
        yield from map(Text, _wrapped(text, width, "      "))
    if shown:
        yield Text("")


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap text, with the control characters in names made visible."""
    return textwrap.wrap(
        printable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
