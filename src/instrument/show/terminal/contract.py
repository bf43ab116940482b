"""Prints what moved in the numbers and regions of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...explain.contract.number_file import Change
from ..text.contract import HEADINGS, Checked, on_numbers, on_regions, rows
from ..text.lines import line
from .console import Block, Table

_INDENT = "  "


def check_report(checked: Checked) -> Iterator[Block]:
    """Yield the verdicts, the table of what moved, and the regions that moved."""
    yield from on_numbers(checked)
    yield from moved_table(checked.changes)
    yield from on_regions(checked)
    yield from (line(f"- {sentence}") for sentence in checked.regions)
    yield from checked.notes


def moved_table(changes: Sequence[Change]) -> Iterator[Block]:
    """Yield the table of what moved; nothing if nothing did."""
    if changes:
        yield line()
        yield Table(HEADINGS, list(rows(changes, indent=_INDENT)))
        yield line()
