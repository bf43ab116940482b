"""Renders a diagnosis as lines for a terminal, and as Markdown."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...base.findings import Evidence, Finding
from ...base.printable import printable
from ...base.units import count, counted, duration
from ...explain.diagnosis.diagnosis_data import DiagnosisData

if TYPE_CHECKING:
    from rich.text import Text

_MEGABYTE = 1e5  # from which sizes are given in MB
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def to_markdown(diagnosis: DiagnosisData) -> str:
    """Return what the terminal shows, with all evidence, as Markdown."""
    return "\n".join(_markdown_lines(diagnosis)) + "\n"


def _markdown_lines(diagnosis: DiagnosisData) -> Iterator[str]:
    if diagnosis.opened_text:
        yield _escaped(diagnosis.opened_text)
        yield ""
    yield f"**{_escaped(diagnosis.verdict)}**"
    yield ""
    if diagnosis.parts:
        yield f"| part of the {'step' if diagnosis.has_steps else 'window'} | time | share |"
        yield "|---|--:|--:|"
        for name, ns in diagnosis.parts.items():
            if ns:
                yield f"| {name} | {duration(ns)} | {100 * ns / diagnosis.step_ns:.1f} % |"
        yield ""
    texts = [diagnosis.coverage_text] if diagnosis.parts else []
    for text in (*texts, *diagnosis.source_texts, diagnosis.mfu_text, diagnosis.memory_text):
        if text:
            yield _escaped(text)
            yield ""
    worth = diagnosis.worth()
    for number, found in enumerate(worth, 1):
        yield from _markdown_finding(number, found, diagnosis)
    if not worth:
        yield _escaped(diagnosis.nothing_found)
        yield ""
    yield from _markdown_regions(diagnosis)
    yield from _markdown_gaps(diagnosis)
    if diagnosis.abstained:
        yield f"<sub>{counted(len(diagnosis.abstained), 'rule')} abstained for lack of evidence.</sub>"
    for text in diagnosis.rules_texts:
        yield f"<sub>{_escaped(text)}</sub>"


def _markdown_regions(diagnosis: DiagnosisData) -> Iterator[str]:
    if not diagnosis.regions:
        return
    gpu = diagnosis.has_gpu
    yield f"| longest regions, {diagnosis.each_step} | CPU |" + " GPU |" * gpu
    yield "|---|--:|" + "--:|" * gpu
    for name, cpu_ns, gpu_ns in diagnosis.longest_regions:
        yield f"| {_escaped(name)} | {duration(cpu_ns)} |" + f" {duration(gpu_ns)} |" * gpu
    yield ""
    if diagnosis.regions_note:
        yield _escaped(diagnosis.regions_note)
        yield ""


def _markdown_gaps(diagnosis: DiagnosisData) -> Iterator[str]:
    if shown := diagnosis.longest_gaps:
        yield "Longest idle gaps: length, start in the window, and cause"
        yield ""
        yield from (f"- {_escaped(text)}" for text in shown)
        yield ""


def _markdown_finding(number: int, found: Finding, diagnosis: DiagnosisData) -> Iterator[str]:
    yield f"### {number}. {_escaped(found.title)}"
    yield ""
    place = str(found.where)
    yield f"`{found.rule}`, {found.severity}, confidence {found.confidence}" + (
        f"; at {_escaped(place)}" if place else ""
    )
    yield ""
    yield f"- To win: {_escaped(diagnosis.win_text(found))}"
    for each in found.evidence:
        yield f"- {_escaped(diagnosis.definition(each))}: {_escaped(value_of(each))}"
    if found.fix:
        yield ""
        yield _escaped(found.fix.text)
        if found.fix.after:
            before = [f"- {line}" for line in found.fix.before.splitlines()]
            after = [f"+ {line}" for line in found.fix.after.splitlines()]
            yield "\n".join(["```diff", *before, *after, "```"])
    yield ""


def value_of(evidence: Evidence) -> str:
    """Return the value with its unit, for people."""
    value = evidence.value
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    if evidence.unit == "ns":
        return duration(value)
    if evidence.unit == "1":
        return f"{value:.2f}"
    if evidence.unit == "bytes/s":
        return f"{value / 1e9:,.1f} GB/s"
    if evidence.unit == "bytes":
        return _bytes(value)
    return f"{count(value)} {evidence.unit}".removesuffix(" events")


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if not 0 < value < _MEGABYTE else f"{count(round(value))} bytes"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", printable(text)).replace("\n", " ")


_WIDTH = 80  # columns, without a terminal
_LETTERS = {
    "compute": ("#", "green"), "communication": ("=", "magenta"), "copies": ("c", "cyan"),
    "input": ("i", "yellow"), "synchronization": ("s", "red"), "overhead": ("o", "bright_red"),
    "latency": ("-", "bright_yellow"), "other": (".", "dim"),
}  # fmt: skip
_NO_BREAK = "\N{NO-BREAK SPACE}"
_COLORS = {"high": "red", "medium": "yellow", "low": "cyan"}
_EVIDENCE = 4


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

    yield from map(Text, _wrapped(diagnosis.opened_text, width))
    yield from (Text(line, style="bold") for line in _wrapped(diagnosis.verdict, width))
    if diagnosis.parts:
        yield _bar(diagnosis.parts, width)
        yield from _legend(diagnosis, width)
        yield from (Text(line, style="dim") for line in _wrapped(diagnosis.coverage_text, width))
    for text in diagnosis.source_texts:
        yield from (Text(line, style="dim") for line in _wrapped(text, width))
    yield from map(Text, _wrapped(diagnosis.mfu_text, width))
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
    for text in diagnosis.rules_texts:
        yield Text(printable(text), style="red")


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
    room = max(width - 24, 30)
    title = f"Longest regions, {diagnosis.each_step}"
    gpu = diagnosis.has_gpu
    yield Text(f"{title:<{room}}{'CPU':>11}" + f"{'GPU':>11}" * gpu, style="bold")
    for name, cpu_ns, gpu_ns in diagnosis.longest_regions:
        cut = printable(name)
        cut = cut if len(cut) < room else cut[: room - 4] + "..."
        yield Text(f"{cut:<{room}}{duration(cpu_ns):>11}" + f"{duration(gpu_ns):>11}" * gpu)
    yield from map(Text, _wrapped(diagnosis.regions_note, width))
    yield Text("")


def _gaps(diagnosis: DiagnosisData, width: int) -> Iterator[Text]:
    from rich.text import Text

    shown = diagnosis.longest_gaps
    if shown:
        yield Text("Longest idle gaps: length, start in the window, and cause", style="bold")
    for text in shown:
        yield from map(Text, _wrapped(f"   {text}", width, "      "))
    if shown:
        yield Text("")


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap text, with the control characters in names made visible."""
    return textwrap.wrap(
        printable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
