"""The registry of kinds: the documentation lists it, and every kind says what to do."""

from __future__ import annotations

from pathlib import Path

from instrument.read.jobs.kinds import OTHERS, READ

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def rows() -> list[str]:
    """Return the rows of the table of what is read."""
    cells = [(kind.name, ", ".join(f"`{suffix}`" for suffix in kind.suffixes), kind.holds) for kind in READ]
    return [f"| {' | '.join(row)} |" for row in cells]


def test_the_page_lists_what_is_read() -> None:
    """The page has a row for each kind that is read, in this order, and no other."""
    table = PAGE.read_text().partition("|---|---|---|\n")[2].partition("\n\n")[0]
    assert table == "\n".join(rows()), "\n".join(rows())


def test_every_other_kind_is_named() -> None:
    """A kind that is not read has a name of its own, and is recognized by its content or its name."""
    assert len({kind.name for kind in OTHERS}) == len(OTHERS)
    assert all(kind.fits or kind.suffixes for kind in OTHERS)
    assert all(len(kind.text) < 160 for kind in OTHERS)
