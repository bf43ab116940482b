"""The registry of kinds: the documentation lists it, and every kind says what to do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from instrument.read.jobs.kinds import OTHERS, READ, kind_of

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


@pytest.mark.parametrize(
    "head",
    [
        b"-" * 9 + b"  " + b"-" * 9 + b"\n" * 65_000,
        b"-" * 9 + b"  " + b"-" * 65_000,
        b'{"version": 1, "path": "' + b" " * 65_000,
    ],
)
def test_no_content_takes_long_to_recognize(head: bytes) -> None:
    """The kind of a file is found in time that does not grow with the square of a run of its bytes."""
    begin = time.process_time()
    kind_of(Path("a.txt"), head)
    assert time.process_time() - begin < 0.5


def test_a_diagnosis_of_several_lines() -> None:
    """A diagnosis is one in whatever way its JSON is laid out."""
    for gap in (" ", "\n  "):
        text = f'{{{gap}"version": 1,{gap}"path": "t.json",{gap}"verdict": "x"}}'
        assert kind_of(Path("d.json"), text.encode()).name == "a diagnosis"
