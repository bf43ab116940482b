"""Prints sentences, lines and tables at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ...base.printable import printable
from ...base.units import counted
from ..text.lines import BEFORE_UNIT, Line, as_rich, line, wrapped

_NAME = 12
_GAP = 2
_UNKNOWN_WIDTH = 80  # of a terminal that says it has 0 columns


@dataclass(frozen=True)
class Table:
    """A table whose first column holds names, cut to the width that the numbers leave.

    Attributes:
        columns: the headings; an empty one aligns its column to the left.
        rows: the name and the cells of the other columns.
        indents: the indentation of each name; by default none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    indents: Sequence[int] = ()


Block = str | Line | Table
"""A sentence, which is wrapped; a line, which is never broken; or a table."""


def new_console(**options: Any) -> Console:
    """Return a console of rich; one for a terminal that says it has 0 columns is as wide as without a terminal."""
    console = Console(**options)
    console.width = console.width or _UNKNOWN_WIDTH
    return console


def show(console: Console, blocks: Iterable[Block]) -> None:
    """Print the blocks; sentences are never broken between a number and its unit."""
    for block in blocks:
        if isinstance(block, Table):
            _print_table(block, console)
        else:
            lines = wrapped(block, console.width, kept=BEFORE_UNIT) if isinstance(block, str) else [block]
            for text in as_rich(lines):
                console.print(text, soft_wrap=True)


def heading(text: str) -> tuple[Line, Line]:
    """Return an empty line, and the title of what follows."""
    return line(), line(text, "bold")


def more(hidden: int, what: str, rest: str = "") -> Iterator[Block]:
    """Yield how many rows are not shown; nothing if all are."""
    if hidden > 0:
        yield line(f"... and {counted(hidden, what)}{rest}")


def print_line(console: Console, text: str, *, bold: bool = False, space: bool = False) -> None:
    """Print one line of text verbatim: without markup, highlighting or wrapping.

    With ``space``, an empty line comes first.
    """
    show(console, [*[line()] * space, line(text, "bold" if bold else "")])


def print_wrapped(console: Console, text: str) -> None:
    """Print text verbatim, wrapped to the width of the console."""
    show(console, [text])


def _print_table(table: Table, console: Console) -> None:
    by_column = zip(table.columns[1:], *(cells for _, *cells in table.rows), strict=True)
    numbers = sum(max(map(cell_len, column)) + _GAP for column in by_column)
    room = max(console.width - numbers, _NAME)
    dots = "..." if console.options.ascii_only else "…"
    indents = table.indents or [0] * len(table.rows)
    names = [
        printable(" " * min(indent, room // 2) + name)
        for indent, (name, *_) in zip(indents, table.rows, strict=True)
    ]
    names = _cut_distinctly(names, room, dots)
    # With an explicit width, rich does not cut the numbers on a narrow terminal.
    width = max(map(cell_len, [table.columns[0], *names])) + numbers
    grid = RichTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), width=width
    )
    for index, column in enumerate(table.columns):
        grid.add_column(column, no_wrap=True, justify="right" if index and column else "left")
    for name, (_, *cells) in zip(names, table.rows, strict=True):
        grid.add_row(*map(Text, (name, *cells)))
    console.print(grid, crop=False, no_wrap=True, overflow="ignore")


def _cut_distinctly(names: list[str], width: int, dots: str) -> list[str]:
    """Cut each name; names that would look the same show the place where they differ."""
    alike: dict[str, set[str]] = {}
    for name in names:
        alike.setdefault(_cut(name, width, dots), set()).add(name)
    shown = dict[str, str]()
    for cut, several in alike.items():
        for name in several:
            same = [_common_prefix(name, other) for other in several - {name}]
            shown[name] = _cut_at(name, max(same), width, dots) if same else cut
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
