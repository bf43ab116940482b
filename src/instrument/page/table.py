"""The section that shows a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
