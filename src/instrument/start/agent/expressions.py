"""Regular expressions of an agent, of which none may take so long that the server stops.

Python's matcher cannot be interrupted, and holds the lock of the interpreter.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from math import prod
from typing import Any

SEARCHED = 2048
"""The characters of a text that are searched, as in `Table.matching`."""

_MOST_WAYS = 4 * SEARCHED**2  # to match at one place: seconds, if every one is tried at every place
_QUANTIFIERS = frozenset("*+?{|")


def compiled(name: str, pattern: str | None) -> re.Pattern[str] | None:
    """Return a compiled regular expression; None without one.

    Raises:
        ValueError: it is not one, has more than 200 characters, or may take very long.
    """
    if pattern is None:
        return None
    try:
        if len(pattern) > 200:
            raise ValueError("more than 200 characters")
        made = re.compile(pattern)
        if _ways_of(pattern) > _MOST_WAYS:
            raise ValueError(
                "it may take too long: it may have two of * and +, and none of these, and no |, in a group that "
                "is repeated"
            )
        return made
    except (ValueError, re.error, RecursionError) as error:
        raise ValueError(f'"{name}" must be a regular expression of up to 200 characters: {error}') from None


def check_kernels(name: str, words: tuple[str, ...]) -> None:
    """Check the expressions in texts such as "kernel:gemm=2x".

    Raises:
        ValueError: as in `compiled`.
    """
    for word in words:
        compiled(name, word.rpartition("=")[0].removeprefix("kernel:"))


def _ways_of(pattern: str) -> int:
    """Return in how many ways, at most, an expression may match at one place of a text."""
    try:
        parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
        return _ways(parser.parse(pattern))
    except (ImportError, AttributeError):  # another Python: without its parser, only plain text
        return 1 + _MOST_WAYS * bool(_QUANTIFIERS & set(pattern))


def _ways(tree: Any) -> int:
    """Return the number of ways for a part of the expression, or a number above `_MOST_WAYS`.

    Args:
        tree: pairs of an operation and what it holds, as Python's parser of expressions returns them.
    """
    ways = 1
    for operation, held in tree:
        parts = [_ways(part) for part in _parts(held, type(tree))]
        if str(operation) == "BRANCH":
            ways *= sum(parts)
        elif str(operation).endswith("_REPEAT"):
            most = min(held[1], SEARCHED - 1)
            ways *= max(most - held[0] + 1, 1) * parts[0] ** most
        else:
            ways *= prod(parts)
        ways = min(ways, _MOST_WAYS + 1)
    return ways


def _parts(held: Any, tree: type) -> Iterator[Any]:
    """Yield the parts of the expression in what an operation holds."""
    if isinstance(held, tree):
        yield held
    elif isinstance(held, (tuple, list)):
        for each in held:
            yield from _parts(each, tree)
