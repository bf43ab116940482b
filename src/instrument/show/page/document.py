"""Builds a page as one HTML file, which holds its style, its scripts and its compressed data and requests nothing.

A page is a title, a lead paragraph that shows without scripts, and sections. Each section is a dict with ``id``,
``type`` (which script draws it), ``title`` and the data that this script reads. Texts in it are data: the scripts
write them as text nodes, and the content security policy allows no script and no style but those of the page.

The sections that several pages share are built here: figures, a table, lengths of steps as dots, and a waterfall.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...base.printable import shown_lines
from ...base.units import count, counted

_HERE = Path(__file__).parent
_FIRST, _LAST = ("dom", "state", "table"), "main"
"""Scripts share one scope: the first define what the others use, and the last starts the page."""

Section = Mapping[str, Any]


def document(
    title: str, lead: str, sections: Iterable[Section | None], *, serve: Mapping[str, str | int] | None = None
) -> str:
    """Return the text of a page.

    Args:
        title: the title of the page, such as the name of a file.
        lead: the first paragraph.
        sections: what the page shows, in order; None for what it does not have.
        serve: what the scripts need of the server that serves the page; without it, the page may request nothing.
    """
    from jinja2 import Environment

    script, style = _script(), _style()
    data = {
        "title": title,
        "sections": [section for section in sections if section is not None],
        "serve": dict(serve or {}),
    }
    packed = gzip.compress(msgspec.json.encode(data), compresslevel=6, mtime=0)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data: blob:",
        "connect-src": "'self'" if serve else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    template = Environment(autoescape=True).from_string((_HERE / "template.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        lead=lead,
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        script=script,
        style=style,
        data=base64.b64encode(packed).decode(),
    )


@cache
def _script() -> str:
    files = {file.stem: file for file in sorted((_HERE / "scripts").glob("*.js"))}
    others = [name for name in files if name not in (*_FIRST, _LAST)]
    return "\n".join(files[name].read_text(encoding="utf-8") for name in (*_FIRST, *others, _LAST))


@cache
def _style() -> str:
    return (_HERE / "style.css").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
        "bars": [],
        "figures": list(figures),
        "notes": [shown_lines(text) for text in notes],
    }


def table_section(
    name: str, title: str, caption: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], note: str = "",
    *, shows_empty: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the section; None without rows.

    Args:
        name: its id.
        title: its title.
        caption: what the rows are.
        columns: the titles of the columns, and what they hold: "text", "count", "ns", "bytes", ...
        rows: a value for each column; None where there is none.
        note: what to know before reading them.
        shows_empty: whether the page shows it without rows, too; the note then stands alone.
    """
    if not rows and not shows_empty:
        return None
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
                "name": name, "steps": len(lengths), "median_ns": median, "every": each,
                "lengths_ns": lengths[::each],
            }
            for name, lengths, median in groups
        ],
    }  # fmt: skip


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
