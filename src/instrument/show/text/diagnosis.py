"""Renders a diagnosis as lines for a terminal, and as Markdown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from ...base.findings import Evidence, Finding
from ...base.printable import printable, shell_line
from ...base.units import count, counted, duration
from ...explain.diagnosis.diagnosis import Diagnosis
from ...explain.replay.step_waits import WORK
from .lines import Line, diff, line, wrapped

_MEGABYTE = 1e5  # from which sizes are given in MB
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")
_GAPS = "Longest idle gaps: length, start in the window, and cause"


def evidence_texts(diagnosis: Diagnosis) -> list[str]:
    """Return the sentences on the CPU's work, what the verdict is based on, and which file was read."""
    return [*_cpu_work(diagnosis), *[diagnosis.coverage_text] * bool(diagnosis.parts), *diagnosis.source_texts]


_WORK_SHOWN = 0.02  # of the step
_REGIONS_SHOWN = 3


def _cpu_work(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a sentence on what the CPU does on the critical path, where there is more than one thing."""
    if diagnosis.waits is None:
        return
    least_ns, regions = _WORK_SHOWN * diagnosis.step_ns, diagnosis.waits.regions
    parts = {
        name: f"{duration(ns)} while {WORK[name]}"
        for name, ns in sorted(diagnosis.waits.work.items(), key=lambda item: -item[1])
        if ns >= least_ns
    }
    within = [f"{duration(ns)} in {printable(name)}" for name, ns in regions.items() if ns >= least_ns]
    if "between_operators" in parts and within:
        parts["between_operators"] += f" ({', '.join(within[:_REGIONS_SHOWN])})"
    if len(parts) > 1 or within:
        yield f"The overhead is {', '.join(parts.values())}."


def bars(diagnosis: Diagnosis) -> Iterator[tuple[str, str, Mapping[str, int]]]:
    """Yield the name and title of each bar, and the time of its parts in ns: "waits" and "overview", if known."""
    whole = "step" if diagnosis.has_steps else "window"
    if diagnosis.waits is not None:
        yield "waits", f"What the {whole} waits for", diagnosis.waits.parts
    if diagnosis.parts:
        yield "overview", f"What the {'GPU' if diagnosis.has_gpu else 'loop'} does in the {whole}", diagnosis.parts


_PLAN = "Plan: what each change wins after those before it"


def plan_note(diagnosis: Diagnosis) -> str:
    """Return how exact the replays of a plan are."""
    error = f"{100 * (diagnosis.plan().self_error or 0):.1f} %"
    return f"The replay of the unchanged steps is {error} off. All changes together:"


def plan_command(diagnosis: Diagnosis) -> str:
    """Return the command that replays all changes of a plan together, to be copied."""
    path = f"./{diagnosis.path}" if diagnosis.path.startswith("-") else diagnosis.path
    return shell_line(["instrument", "whatif", path, *diagnosis.view, *shlex.split(diagnosis.plan().words)])


def hidden_texts(diagnosis: Diagnosis) -> list[str]:
    """Return the findings that something else hides, each with the time that it may win later."""
    return [
        f"{finding.title}: up to {duration(finding.hidden_ns or 0)} ({finding.rule})"
        for finding in diagnosis.hidden
    ]


def hidden_title(diagnosis: Diagnosis) -> str:
    """Return what hides these findings, in words."""
    return f"Hidden behind {diagnosis.bound or 'what takes longer'}, with little to win until that is fixed"


def figures(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return what the step makes of the hardware and of its memory, as sentences, which may be empty."""
    return diagnosis.mfu_text, diagnosis.counters_text, diagnosis.memory_text


def to_markdown(diagnosis: Diagnosis) -> str:
    """Return what the terminal shows, with all evidence, as Markdown."""
    rules = counted(len(diagnosis.abstained), "rule")
    small = [f"{rules} abstained for lack of evidence."] * bool(diagnosis.abstained) + diagnosis.rules_texts
    parts = [f"{paragraph}\n\n" for paragraph in _paragraphs(diagnosis) if paragraph]
    return "".join([*parts, *(f"<sub>{_escaped(text)}</sub>\n" for text in small)])


def _paragraphs(diagnosis: Diagnosis) -> Iterator[str]:
    yield _escaped(diagnosis.opened_text)
    yield f"**{_escaped(diagnosis.verdict)}**"
    for _, title, parts in bars(diagnosis):
        shares = [
            (name, duration(ns), f"{100 * ns / diagnosis.step_ns:.1f} %") for name, ns in parts.items() if ns
        ]
        yield _table([title, "time", "share"], shares)
    yield from map(_escaped, (*evidence_texts(diagnosis), *figures(diagnosis)))
    worth = diagnosis.worth()
    for number, finding in enumerate(worth, 1):
        yield from _finding_paragraphs(number, finding, diagnosis)
    if not worth:
        yield _escaped(diagnosis.nothing_found)
    if diagnosis.hidden:
        yield f"{hidden_title(diagnosis)}:"
        yield "\n".join(f"- {_escaped(text)}" for text in hidden_texts(diagnosis))
    if diagnosis.facts and diagnosis.plan().rows:
        yield f"{_PLAN}:"
        yield "\n".join(map(_escaped, diagnosis.plan().lines()))
        yield _escaped(str(diagnosis.plan().end))
        yield f"{_escaped(plan_note(diagnosis))}\n\n    {plan_command(diagnosis)}"
    if diagnosis.regions:
        columns = 2 + diagnosis.has_gpu
        regions = [
            (name, duration(cpu_ns), duration(gpu_ns)) for name, cpu_ns, gpu_ns in diagnosis.longest_regions
        ]
        heads = (f"longest regions, {diagnosis.each_step}", "CPU", "GPU")
        yield _table(heads[:columns], [row[:columns] for row in regions])
        yield _escaped(diagnosis.regions_note)
    if shown := diagnosis.longest_gaps:
        yield _GAPS
        yield "\n".join(f"- {_escaped(text)}" for text in shown)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column holds names, and the others numbers."""
    lines = [f"| {' | '.join(map(_escaped, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(columns) - 1), *lines[1:]])


def _finding_paragraphs(number: int, finding: Finding, diagnosis: Diagnosis) -> Iterator[str]:
    yield f"### {number}. {_escaped(finding.title)}"
    place = f"; at {_escaped(str(finding.where))}" if str(finding.where) else ""
    yield f"`{finding.rule}`, {finding.severity}, confidence {finding.confidence}{place}"
    facts = [("To win", diagnosis.win_text(finding))]
    facts += [(diagnosis.definition(each), value_of(each)) for each in finding.evidence]
    yield "\n".join(f"- {_escaped(about)}: {_escaped(value)}" for about, value in facts)
    if finding.fix:
        code = ["```diff", *(text for ((text, _),) in diff(finding.fix, "")), "```"]
        yield "\n".join([_escaped(finding.fix.text), *(code if finding.fix.after else ())])


def value_of(evidence: Evidence) -> str:
    """Return the value with its unit, for people."""
    value = evidence.value
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    match evidence.unit:
        case "ns":
            return duration(value)
        case "1":
            return f"{value:.2f}"
        case "bytes/s":
            return f"{value / 1e9:,.1f} GB/s"
        case "bytes" if not 0 < value < _MEGABYTE:
            return f"{value / 1e6:,.1f} MB"
        case "bytes":
            return f"{count(round(value))} bytes"
    return f"{count(value)} {evidence.unit}".removesuffix(" events")


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", printable(text)).replace("\n", " ")


_WIDTH = 80  # columns, without a terminal
_LETTERS = {
    "compute": ("#", "green"), "communication": ("=", "magenta"), "copies": ("c", "cyan"),
    "input": ("i", "yellow"), "synchronization": ("s", "red"), "overhead": ("o", "bright_red"),
    "latency": ("-", "bright_yellow"), "other": (".", "dim"),
}  # fmt: skip
_INSIDE = re.compile(r"(?<=\S) (?=\S)")  # an item of the legend
_COLORS = {"high": "red", "medium": "yellow", "low": "cyan"}
_EVIDENCE = 4


def lines(diagnosis: Diagnosis, width: int = _WIDTH) -> Iterator[Line]:
    """Yield the diagnosis, wrapped to this width."""
    yield from wrapped(diagnosis.opened_text, width)
    yield from wrapped(diagnosis.verdict, width, "bold")
    for _, title, parts in bars(diagnosis):
        yield from wrapped(f"{title}:", width, "dim")
        yield _bar(parts, width)
        yield from _legend(parts, diagnosis.step_ns, width)
    for text in evidence_texts(diagnosis):
        yield from wrapped(text, width, "dim")
    for text in figures(diagnosis):
        yield from wrapped(text, width)
    yield line()
    worth = diagnosis.worth()
    for number, finding in enumerate(worth, 1):
        yield from _finding(number, finding, diagnosis, width)
    if not worth:
        yield from (*wrapped(diagnosis.nothing_found, width), line())
    if hidden := len(diagnosis.findings) - len(worth):
        yield line(f"{counted(hidden, 'finding')} worth less than 1 %: see --json.", "dim")
    if diagnosis.hidden:
        yield line(f"{hidden_title(diagnosis)}:", "bold")
        for text in hidden_texts(diagnosis):
            yield from wrapped(f"- {text}", width, indent="   ", hanging="     ")
        yield line()
    if diagnosis.facts and diagnosis.plan().rows:
        yield line(f"{_PLAN}:", "bold")
        for text in diagnosis.plan().lines():
            yield from wrapped(text, width, indent="   ", hanging="      ")
        yield from wrapped(str(diagnosis.plan().end), width, indent="   ", hanging="   ")
        yield from wrapped(plan_note(diagnosis), width, "dim")
        yield line(f"   {plan_command(diagnosis)}")
        yield line()
    yield from _regions(diagnosis, width)
    if shown := diagnosis.longest_gaps:
        yield line(_GAPS, "bold")
        for text in shown:
            yield from wrapped(text, width, indent="   ", hanging="      ")
        yield line()
    if diagnosis.abstained:
        yield line(
            f"{counted(len(diagnosis.abstained), 'rule')} abstained for lack of evidence: see --json.", "dim"
        )
    yield from (line(text, "red") for text in diagnosis.rules_texts)


def _bar(parts: Mapping[str, int], width: int) -> Line:
    """Return a line of this width with the letters of the parts."""
    whole = max(sum(parts.values()), 1)
    ends = [round(reached * width / whole) for reached in accumulate(parts.values(), initial=0)]
    cells = (after - before for before, after in pairwise(ends))
    return tuple((_LETTERS[name][0] * each, _LETTERS[name][1]) for name, each in zip(parts, cells, strict=True))


def _legend(parts: Mapping[str, int], step_ns: float, width: int) -> Iterator[Line]:
    shown = [
        f"{_LETTERS[name][0]} {name} {duration(ns)} ({100 * ns / step_ns:.1f} %)"
        for name, ns in sorted(parts.items(), key=lambda item: -item[1])
        if ns
    ]
    return wrapped("  ".join(shown), width, kept=_INSIDE)


def _finding(number: int, finding: Finding, diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    color = _COLORS[finding.severity]
    head = wrapped(f"{number}. {finding.title}", width, hanging="   ")
    yield from (((text, color if index else f"bold {color}"),) for index, ((text, _),) in enumerate(head))
    win = diagnosis.win_text(finding)
    text = f"To win: {win}; {finding.severity}, confidence {finding.confidence}; rule {finding.rule}"
    yield from wrapped(text, width, indent="   ", hanging="   ")
    if place := str(finding.where):
        yield from wrapped(f"At: {place}", width, indent="   ", hanging="       ")
    for each in finding.evidence[:_EVIDENCE]:
        text = f"- {diagnosis.definition(each)}: {value_of(each)}"
        yield from wrapped(text, width, "dim", indent="   ", hanging="     ")
    if finding.fix:
        yield from wrapped(f"Fix: {finding.fix.text}", width, indent="   ", hanging="        ")
        yield from diff(finding.fix, "   ")
    yield line()


def _regions(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    if not diagnosis.regions:
        return
    room, gpu = max(width - 24, 30), diagnosis.has_gpu
    title = f"Longest regions, {diagnosis.each_step}"
    yield line(f"{title:<{room}}{'CPU':>11}" + f"{'GPU':>11}" * gpu, "bold")
    for name, cpu_ns, gpu_ns in diagnosis.longest_regions:
        cut = printable(name)
        cut = cut if len(cut) < room else cut[: room - 4] + "..."
        yield line(f"{cut:<{room}}{duration(cpu_ns):>11}" + f"{duration(gpu_ns):>11}" * gpu)
    yield from wrapped(diagnosis.regions_note, width)
    yield line()
