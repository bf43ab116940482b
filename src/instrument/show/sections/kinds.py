"""The kinds of sections that several pages share: figures, a table, lengths of steps as dots, and a waterfall."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ...base.printable import shown_lines
from ...base.units import count, counted


def summary_section(title: str, figures: Sequence[tuple[str, str]], notes: Iterable[str]) -> dict[str, Any]:
    """Return the section.

    Args:
        title: its title.
        figures: labels and values, as text.
        notes: sentences, which may contain names of a trace.
    """
    return {
        "id": "summary",
        "type": "overview",
        "title": title,
        "parts": [],
        "figures": list(figures),
        "notes": [shown_lines(text) for text in notes],
    }


def table_section(
    name: str, title: str, caption: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], note: str = ""
) -> dict[str, Any]:
    """Return the section.

    Args:
        name: its id.
        title: its title.
        caption: what the rows are.
        columns: the titles of the columns, and what they hold: "text", "count", "ns", "bytes", ...
        rows: a value for each column; None where there is none. Without rows, the note stands alone.
        note: what to know before reading them.
    """
    return {
        "id": name,
        "type": "table",
        "title": title,
        "note": note,
        "caption": caption,
        "columns": [{"title": head, "kind": kind} for head, kind in columns.items()],
        "rows": rows,
    }


_MAX_DOTS = 5000
Group = tuple[str, Sequence[int], int]
"""The name of a recording, the lengths of its steps in ns, and their median."""


def samples_section(title: str, groups: Sequence[Group], *, detectable: float | None = None) -> dict[str, Any]:
    """Return the section of steps on one axis.

    Args:
        title: its title.
        groups: one or two recordings.
        detectable: the smallest relative change of the first median that these steps show in 80 % of cases.
    """
    most = max(len(lengths) for _, lengths, _ in groups)
    each = -(-most // _MAX_DOTS)
    return {
        "id": "steps",
        "type": "samples",
        "title": title,
        "note": f"One in {count(each)} of the steps is shown." if each > 1 else "",
        "detectable": detectable,
        "groups": [
            {
                "name": name,
                "steps": len(lengths),
                "median_ns": median_ns,
                "every": each,
                "lengths_ns": lengths[::each],
            }
            for name, lengths, median_ns in groups
        ],
    }


_MAX_PARTS = 2000


class WaterfallWords(NamedTuple):
    """What a waterfall shows.

    Attributes:
        unit: the unit of the amounts, a kind of column in the page: "ns" or "bytes".
        counted: what the counts of a part count: "calls".
        caption: that of the table of all parts.
        columns: what distinguishes parts, the kind first, with the words for parts that have none.
        orders: in which orders the columns divide the parts, as lists of their places.
        kinds: by the name of a kind its "class", which gives the color, its "words" and its "definition".
    """

    unit: str
    counted: str
    caption: str
    columns: Mapping[str, str]
    orders: Sequence[Sequence[int]]
    kinds: Mapping[str, Mapping[str, str]]


def waterfall_section(words: WaterfallWords, parts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the section. Of more than 2,000 parts, the last ones are joined by kind.

    Args:
        words: what it shows.
        parts: for each part a name in each column, the amounts before and after, and the counts before and after;
            the largest differences first.
    """
    rest = sorted(parts[_MAX_PARTS:], key=lambda part: str(part[0]))
    names = len(words.columns)
    joined = [_joined(list(each), names) for _, each in groupby(rest, key=lambda part: part[0])]
    return {
        "id": "parts",
        "type": "waterfall",
        "title": "What changed",
        **words._asdict(),
        "columns": [{"title": title, "empty": empty} for title, empty in words.columns.items()],
        "parts": [*parts[:_MAX_PARTS], *joined],
    }


def _joined(parts: Sequence[Sequence[Any]], names: int) -> list[Any]:
    sums = map(sum, zip(*(part[names:] for part in parts), strict=True))
    return [parts[0][0], f"({counted(len(parts), 'smaller part')})", *[""] * (names - 2), *sums]
