"""The scripts and the style of a page keep the rules that its safety and its readers rest on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import instrument.show.page

_PAGE = Path(instrument.show.page.__file__).parent
SCRIPTS = sorted((_PAGE / "scripts").glob("*.js"))
TEXTS = [*SCRIPTS, _PAGE / "style.css", _PAGE / "template.html"]
PARSED = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\(|new Function"
"""What would parse text as HTML or as a script."""


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_lines_are_short(path: Path) -> None:
    """A line has at most 115 characters."""
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > 115] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_no_text(path: Path) -> None:
    """No script parses text as HTML or code, and none declares with ``var``."""
    assert re.findall(rf"{PARSED}|^\s*var ", path.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_names_are_unique() -> None:
    """The scripts share one scope, in which each name is declared once."""
    declared = r"^(?:async )?(?:function|const|let|class) (\w+|\[[^\]]*\])"
    names = Counter(
        name
        for path in SCRIPTS
        for found in re.findall(declared, path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(r"\w+", found)
    )
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_scripts_are_small() -> None:
    """All scripts together have less than 150 KB."""
    assert sum(path.stat().st_size for path in SCRIPTS) < 150_000
