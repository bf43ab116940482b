"""Lines of text in parts with styles of rich, which is not imported: a program may have a module of that name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...base.findings import Fix
from ...base.printable import printable

if TYPE_CHECKING:
    from rich.text import Text

Line = tuple[tuple[str, str], ...]
"""The parts of a line: texts, each with its style."""

_NO_BREAK = "\N{NO-BREAK SPACE}"
BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|us|ms|s)(?!\w))")


def line(text: str = "", style: str = "") -> Line:
    """Return a line of one style, with the control characters in names made visible."""
    return ((printable(text), style),)


def wrapped(
    text: str,
    width: int,
    style: str = "",
    *,
    indent: str = "",
    hanging: str = "",
    kept: re.Pattern[str] | None = None,
) -> Iterator[Line]:
    """Yield the text in lines, broken between words only; nothing for an empty text.

    Args:
        text: the text.
        width: the most columns of a line without a longer word.
        style: the style of all lines.
        indent: what the first line begins with.
        hanging: what the other lines begin with.
        kept: the spaces at which no line is broken.
    """
    whole = kept.sub(_NO_BREAK, printable(text)) if kept else printable(text)
    for part in textwrap.wrap(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield ((part.replace(_NO_BREAK, " "), style),)


def diff(fix: Fix, indent: str) -> Iterator[Line]:
    """Yield the code of a fix before and after, as in a diff."""
    for sign, code, style in (("-", fix.before, "red"), ("+", fix.after, "green")):
        yield from (line(f"{indent}{sign} {each}", style) for each in code.splitlines())


def as_text(lines: Iterable[Line]) -> str:
    """Return the lines as plain text."""
    return "\n".join("".join(text for text, _ in parts) for parts in lines)


def as_rich(lines: Iterable[Line], **options: Any) -> Iterator[Text]:
    """Yield each line as a text of rich, made with these options."""
    from rich.text import Text

    return (Text.assemble(*parts, **options) for parts in lines)
