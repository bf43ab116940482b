"""The section that begins a page: figures, and sentences on what they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .names import shown_lines


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
