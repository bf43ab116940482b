"""What the doctor found, as a page for a person and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ... import __version__
from ...printable import printable
from ...report.console import print_line
from .check import Status
from .examine import Examined

_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red", "absent": "dim"}
_SIGNS: dict[Status, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM", "absent": "-"}
_STATUS = max(map(len, _SIGNS.values())) + 2
_NAME = 17
_LEAST = 20  # columns of text, however narrow the terminal


def render(found: Iterable[Examined], *, console: Console) -> list[Examined]:
    """Print each as it comes, then what it comes to; return them all."""
    shown: list[Examined] = []
    for item in found:
        if not shown or shown[-1].section != item.section:
            print_line(console, item.section, bold=True, space=bool(shown))
        _print(item, console)
        shown.append(item)
    print_line(console, _conclusion(shown), bold=True, space=True)
    return shown


def _print(item: Examined, console: Console) -> None:
    status = item.check.status
    column = _STATUS + _NAME
    text = textwrap.wrap(
        printable(" ".join(item.check.sentence.split())),
        max(console.width - column, _LEAST),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
    first = Text.assemble((_SIGNS[status].ljust(_STATUS), _STYLES[status]), item.name.ljust(_NAME), text[0])
    console.print(first, soft_wrap=True)
    for rest in text[1:]:
        print_line(console, " " * column + rest)
    if item.check.cure:  # in one piece, to be copied
        print_line(console, f"{' ' * _STATUS}cure: {item.check.cure}")


def _conclusion(shown: Sequence[Examined]) -> str:
    problems, notes = (sum(item.check.status == status for item in shown) for status in ("problem", "note"))
    noted = f", {notes} note{'s' * (notes != 1)}" if notes else ""
    if problems:
        return f"{problems} problem{'s' * (problems != 1)}{noted}."
    return f"No problem{noted}: what is installed records here."


def numbers(found: Sequence[Examined]) -> dict[str, Any]:
    """Return the same for a machine."""
    return {
        "instrument": __version__,
        "problems": failed(found),
        "checks": [
            {
                "section": section,
                "name": name,
                "status": check.status,
                "sentence": check.sentence,
                "cure": check.cure,
                "facts": dict(check.facts),
            }
            for section, name, check in found
        ],
    }


def failed(found: Sequence[Examined]) -> int:
    """Return how many problems there are."""
    return sum(item.check.status == "problem" for item in found)
