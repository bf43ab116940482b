"""Regular expressions of an agent, of which none may take so long that the server stops.

Python's matcher cannot be interrupted, and holds the lock of the interpreter.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import takewhile
from math import prod
from typing import Any

SEARCHED = 2048
"""The characters of a text that are searched, as in `Table.matching`."""

_MOST_WORK = 6_000_000_000  # characters looked at: a second, as a text has only so much of each part
_SLOW = 8  # times as long takes what is neither a letter nor repeated
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
        if _work_of(pattern) > _MOST_WORK:
            raise ValueError(
                "it may take too long: it may have two of * and +, with words before and between them, and "
                "none of these, and no |, in a group that is repeated"
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


def _work_of(pattern: str) -> int:
    """Return how many characters, at most, are looked at to search a text, or a number above `_MOST_WORK`."""
    try:
        parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
        tree = parser.parse(pattern)
    except (ImportError, AttributeError):  # another Python: without its parser, only plain text
        return _MOST_WORK * bool(_QUANTIFIERS & set(pattern)) + 1
    items = list(tree)
    while items and str(items[-1][0]).endswith("_REPEAT") and not items[-1][1][0]:
        items.pop()  # it always matches: nothing before it is tried again
    starts = 1 if items and str(items[0][1]).startswith("AT_BEGINNING") else SEARCHED // _period(items, 0)
    return starts * _work(items, type(tree))[0]


def _work(items: Sequence[Any], tree: type) -> tuple[int, int]:
    """Return the work for a part of the expression at one place, and in how many ways it may match there.

    Args:
        items: pairs of an operation and what it holds, as Python's parser of expressions returns them.
        tree: the type of parts.
    """
    work, ways = 0, 1
    for place, (operation, held) in enumerate(items):
        name = str(operation)
        parts = [_work(part, tree) for part in _parts(held, tree)]
        own, own_ways = sum(part[0] for part in parts), prod(part[1] for part in parts)
        if name == "BRANCH":
            firsts = {_text(part)[:1] for part in _parts(held, tree)} - {""}
            own_ways = (max if len(firsts) == len(parts) else sum)(part[1] for part in parts)
        elif name.endswith("_REPEAT"):
            most = min(held[1], SEARCHED - 1)
            inner = min(own_ways**most, _MOST_WORK)
            own = most * inner * (1 if own == _SLOW else own)
            own_ways = inner * max(most - held[0] + 1, 1)
            if inner == 1:
                own_ways = max(own_ways // _period(items, place + 1), 1)
        elif name.startswith("GROUPREF"):
            own += SEARCHED
        elif name != "LITERAL":
            own += _SLOW
        work = min(work + ways * max(own, 1), _MOST_WORK + 1)
        ways = min(ways * own_ways, _MOST_WORK + 1)
    return work, ways


def _text(items: Iterable[Any]) -> str:
    """Return the plain text with which a part begins, in lower case."""
    return "".join(chr(held) for _, held in takewhile(lambda item: str(item[0]) == "LITERAL", items)).lower()


def _period(items: Sequence[Any], place: int) -> int:
    """Return how far apart, at least, two places are at which the plain text at this place of a part is found."""
    text = _text(items[place:])
    return next((size for size in range(1, len(text)) if text.startswith(text[size:])), max(len(text), 1))


def _parts(held: Any, tree: type) -> Iterator[Any]:
    """Yield the parts of the expression in what an operation holds."""
    if isinstance(held, tree):
        yield held
    elif isinstance(held, (tuple, list)):
        for each in held:
            yield from _parts(each, tree)
