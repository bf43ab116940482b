"""What changed from one peak to another, as a waterfall on a page."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..page.names import shown_name
from ..page.waterfall import WaterfallWords, waterfall_section
from .breakdown import Breakdown
from .categories import CATEGORIES, category_words, page_class
from .comparison import OLDER_MEMORY, comparable

_WORDS = WaterfallWords(
    "bytes",
    "blocks",
    "The parts of the two peaks; the differences add up",
    {"Category": "", "Region": "outside regions", "Line": ""},
    [[0, 1, 2], [1, 0, 2], [2, 0, 1]],
    {
        name: {
            "class": page_class(name),
            "words": category_words(name),
            "definition": f"{text[:1].upper()}{text[1:]}.",
        }
        for name, text in CATEGORIES.items()
    }
    | {
        OLDER_MEMORY: {
            "class": page_class("other"),
            "words": category_words(OLDER_MEMORY),
            "definition": "Older than the history; only its size suggests what it is for.",
        }
    },
)


def change_section(before: Breakdown, after: Breakdown) -> dict[str, Any] | None:
    """Return the parts by category, region, and line or evidence, which add up to the difference.

    None if nothing was in use at either peak.
    """
    sums = defaultdict[tuple[str, str, str], list[int]](lambda: [0, 0, 0, 0])
    for side, uses in enumerate(comparable(before, after)):
        for use in uses:
            each = sums[use.category, shown_name(use.region), shown_name(use.source)]
            each[side] += use.bytes
            each[2 + side] += use.blocks
    parts = sorted(sums.items(), key=lambda part: (-abs(part[1][1] - part[1][0]), part[0]))
    return waterfall_section(_WORDS, [[*names, *amounts] for names, amounts in parts]) if parts else None
