"""Prints lines, wrapped sentences and tables at a terminal."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...base.printable import printable

_NAME = 12
_GAP = 2
_UNKNOWN_WIDTH = 80  # of a terminal that says it has 0 columns
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|us|ms|s)(?!\w))")
_NO_BREAK = "\N{NO-BREAK SPACE}"


def new_console(**options: Any) -> Console:
    """Return a console of rich; one for a terminal that says it has 0 columns is as wide as without a terminal."""
    console = Console(**options)
    console.width = console.width or _UNKNOWN_WIDTH
    return console


def print_table(columns: list[str], rows: list[tuple[int, str, list[str]]], console: Console) -> None:
    """Print a table whose first column holds indented names, cut to the width that the numbers leave.

    Args:
        columns: The headings; an empty one aligns its column to the left.
        rows: The indentation of each name, the name, and the cells of the other columns.
        console: Where to print.
    """
    by_column = zip(columns[1:], *(cells for *_, cells in rows), strict=True)
    numbers = sum(max(map(cell_len, column)) + _GAP for column in by_column)
    room = max(console.width - numbers, _NAME)
    dots = "..." if console.options.ascii_only else "…"
    names = [" " * min(indent, room // 2) + name for indent, name, _ in rows]
    names = _cut_distinctly(list(map(printable, names)), room, dots)
    # With an explicit width, rich does not cut the numbers on a narrow terminal.
    width = max(map(cell_len, [columns[0], *names])) + numbers
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), width=width)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="right" if index and column else "left")
    for name, (_, _, cells) in zip(names, rows, strict=True):
        table.add_row(Text(name), *map(Text, cells))
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def print_line(console: Console, text: str, *, bold: bool = False, space: bool = False) -> None:
    """Print one line of text verbatim: without markup, highlighting or wrapping.

    With ``space``, an empty line comes first.
    """
    console.print("\n" * space, end="")
    console.print(Text(printable(text), style="bold" if bold else ""), soft_wrap=True)


def print_wrapped(console: Console, text: str) -> None:
    """Print text verbatim, wrapped to the width of the console, but never between a number and its unit."""
    whole = _BEFORE_UNIT.sub(_NO_BREAK, printable(text))
    for part in textwrap.wrap(whole, console.width, break_long_words=False, break_on_hyphens=False):
        console.print(Text(part.replace(_NO_BREAK, " ")), soft_wrap=True)


def _cut_distinctly(names: list[str], width: int, dots: str) -> list[str]:
    """Cut each name; names that would look the same show the place where they differ."""
    alike: dict[str, set[str]] = {}
    for name in names:
        alike.setdefault(_cut(name, width, dots), set()).add(name)
    shown = dict[str, str]()
    for cut, several in alike.items():
        for name in several:
            others = several - {name}
            same = max((_common_prefix(name, other) for other in others), default=0)
            shown[name] = _cut_at(name, same, width, dots) if others else cut
    return [shown[name] for name in names]


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _cut(name: str, width: int, dots: str) -> str:
    """Cut out the middle of a long name: its ends say more."""
    if cell_len(name) <= width:
        return name
    room = width - len(dots)
    head, tail = set_cell_size(name, room - room // 3), set_cell_size(name[::-1], room // 3)[::-1]
    return head + dots + tail


def _cut_at(name: str, place: int, width: int, dots: str) -> str:
    """Cut the name to its beginning and the part around ``place``, where it differs from others."""
    room = width - 2 * len(dots)
    head = set_cell_size(name, room // 3)
    begin = max(place + 1 - (room - room // 3) // 2, room // 3)
    end = begin + room - room // 3
    if end >= len(name):
        return head + dots + name[len(name) - (room - room // 3) :]
    return head + dots + set_cell_size(name[begin:end], room - room // 3) + dots
