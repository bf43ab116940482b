"""Text from outside, such as names of files and kernels, made fit for a terminal."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Iterable


def printable(text: str) -> str:
    r"""Return ``text`` on one line, with characters that are not shown as escapes: ``\x1b``, ``\n``, ``\u202e``.

    Those could move the cursor, change the title or colours, add lines, or show text in another order than it has.
    All that comes from outside of this library passes here before it is printed.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def shell_line(words: Iterable[str]) -> str:
    """Return a command line to be copied; words that cannot be shown are written as Bash and zsh take them."""
    return " ".join(shlex.quote(word) if word.isprintable() else _ansi_quoted(word) for word in words)


def _ansi_quoted(word: str) -> str:
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def _escaped(char: str) -> str:
    return " " if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
