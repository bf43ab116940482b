"""Says what moved in the numbers and regions of a step: in sentences, as rows of a table, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...base.printable import printable
from ...base.units import count, counted, signed_size, size
from ...explain.contract.number_file import Change, Part

_MAX_PARTS = 8  # of a number
BETTER = "better: record it with --update"
HEADINGS = ("number", "was", "now", "difference")


@dataclass
class Checked:
    """The outcome of a check.

    Attributes:
        numbers_file: the file of numbers; None if there is none.
        changes: the numbers that moved.
        regions_file: the file of regions; None if there is none.
        regions: sentences on regions that moved.
        notes: further sentences.
        folder: the folder that the files are relative to.
        failure: why nothing could be compared; empty if something could.
    """

    numbers_file: Path | None = None
    changes: list[Change] = field(default_factory=list)
    regions_file: Path | None = None
    regions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=Path)
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything is as in the files."""
        return not (self.changes or self.regions or self.failure)


def on_numbers(checked: Checked) -> Iterator[str]:
    """Yield sentences on the numbers: how many moved, and which way."""
    if checked.failure or checked.numbers_file is None:
        return
    better = sum(change.better for change in checked.changes)
    worse = len(checked.changes) - better
    if not checked.changes:
        yield f"The numbers are those in {checked.numbers_file}."
    if worse:
        yield f"{counted(worse, 'number is', 'numbers are')} greater than in {checked.numbers_file}."
    if better:
        yield f"{counted(better, 'number is', 'numbers are')} less than in {checked.numbers_file} ({BETTER})."


def on_regions(checked: Checked) -> Iterator[str]:
    """Yield a sentence on the regions."""
    if checked.failure or checked.regions_file is None:
        return
    yield f"The regions are {'not those' if checked.regions else 'those'} in {checked.regions_file}."


def rows(changes: Sequence[Change], of_change: str = "", indent: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield the cells of each number that moved, and below it of its places.

    Args:
        changes: what moved.
        of_change: is put around the name of a number, as ``**``.
        indent: is put before a place.
    """
    for change in changes:
        name = f"{of_change}{change.name}{of_change}"
        yield (name, *amounts(change.name, change))
        for part in change.parts[:_MAX_PARTS]:
            yield (f"{indent}{part}", *amounts(change.name, part))
        rest = change.parts[_MAX_PARTS:]
        if rest:
            whole = Part("", None, sum(part.was for part in rest), sum(part.now for part in rest))
            yield (f"{indent}{counted(len(rest), 'other place')}", *amounts(change.name, whole))
        if not change.parts:
            yield (f"{indent}(the file does not say where)", "", "", "")


def amounts(name: str, moved: Change | Part) -> tuple[str, str, str]:
    """Return what a number of this name, or a place of it, was and is, and the difference."""
    was, now = moved.was, moved.now
    if "bytes" in name:
        return size(was), size(now), signed_size(now - was)
    return count(was), count(now), f"{now - was:+,}"


def to_markdown(checked: Checked) -> str:
    """Return Markdown for a pull request: a table of what moved, and the regions."""
    parts = [_escaped(sentence) for sentence in (checked.failure, *on_numbers(checked)) if sentence]
    if checked.changes:
        table = [HEADINGS, ("---", "---:", "---:", "---:"), *_markdown_rows(checked.changes)]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    parts += map(_escaped, on_regions(checked))
    for sentences in filter(None, (checked.regions, checked.notes)):
        parts.append("\n".join(f"- {_escaped(sentence)}" for sentence in sentences))
    return "\n\n".join(parts) + "\n"


def _markdown_rows(changes: Sequence[Change]) -> Iterator[tuple[str, ...]]:
    for name, *values in rows(changes, "**", "&emsp;"):
        indent = "&emsp;" * name.startswith("&emsp;")
        text = name.removeprefix("&emsp;")
        yield (indent + _escaped(text) if indent else text, *values)


def _escaped(text: str) -> str:
    """Return text without a meaning in Markdown, also inside a table."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", printable(text))
