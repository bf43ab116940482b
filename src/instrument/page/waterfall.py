"""The section that shows the difference of two amounts as a waterfall of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ..units import counted

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
