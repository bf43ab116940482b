"""Escapes text from outside, such as names of files and kernels, for a terminal and for a page."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Iterable


def printable(text: str) -> str:
    r"""Return ``text`` on one line, with unprintable characters as escapes: ``\x1b``, ``\n``, ``\u202e``.

    Unescaped, they could move the cursor, change the title or colors, add lines, or reorder the text. All text
    from outside this library is escaped here before it is printed.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def shell_line(words: Iterable[str]) -> str:
    """Return a command line that can be copied; unprintable words are quoted in the syntax of Bash and zsh."""
    return " ".join(shlex.quote(word) if word.isprintable() else _ansi_quoted(word) for word in words)


def _ansi_quoted(word: str) -> str:
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def _escape(char: str) -> str:
    return " " if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()


_MAX_CHARACTERS = 300
_MAX_OF_LINES = 4000


def shown_name(name: str) -> str:
    """Return a name with control and bidirectional characters visible, cut to 300 characters."""
    shown = printable(name[: _MAX_CHARACTERS + 1])
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[: _MAX_CHARACTERS - 3]}..."


def shown_lines(text: str) -> str:
    """Return text of several lines with its other control characters visible, cut to 4,000 characters."""
    return "\n".join(map(printable, text[:_MAX_OF_LINES].splitlines()))
