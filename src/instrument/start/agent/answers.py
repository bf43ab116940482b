"""Makes an answer fit for an agent: plain JSON, names that stay data, definitions, and a limit of tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...base.printable import printable

MOST_TOKENS = 4_000
"""The tokens of an answer, unless more are asked for."""

_BYTES_PER_TOKEN = 3  # of JSON with numbers and paths, for the tokenizers of today; English has 4
_LONGEST = 600  # characters of a text
_MARKUP = re.compile(r"<|`|\]\(")
_DIGITS = 6


def estimated_tokens(value: Any) -> int:
    """Return about how many tokens a model reads for JSON data."""
    return math.ceil(len(text_of(value).encode()) / _BYTES_PER_TOKEN)


def text_of(value: Any) -> str:
    """Return compact JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def shown(text: str) -> str:
    r"""Return text from outside as data: on one line, without markup, and not too long.

    Control characters, and the characters that begin a tag, code or a link in Markdown, become escapes such as
    ``\x3c``, which regular expressions understand: a shown name can be searched as it is.
    """
    escaped = _MARKUP.sub(lambda found: "".join(f"\\x{ord(char):02x}" for char in found[0]), printable(text))
    return escaped if len(escaped) <= _LONGEST else f"{escaped[: _LONGEST - 3]}..."


def quoted(text: str, names: Iterable[str]) -> str:
    """Return a sentence of this library with quotes around the names in it, which come from files."""
    longest_first = sorted({name for name in names if len(name) > 2}, key=len, reverse=True)
    if not longest_first:
        return text
    pattern = "|".join(map(re.escape, longest_first))
    return re.sub(rf"(?<!['\"\w])(?:{pattern})(?!['\"\w])", lambda found: json.dumps(found[0]), text)


def plain(value: Any) -> Any:
    """Return JSON data with texts as `shown`, and fractions of six digits; integers are exact.

    In the rows of lists, what is empty or unknown is left out.
    """
    if isinstance(value, Mapping):
        return {shown(str(key)): plain(each) for key, each in value.items()}
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Sequence):
        return [_row(each) for each in value]
    if isinstance(value, (bool, int)) or value is None:
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    return _number(value) if isinstance(value, float) else shown(str(value))


def _row(value: Any) -> Any:
    made = plain(value)
    if not isinstance(made, dict):
        return made
    made = {key: _row(each) if isinstance(each, dict) else each for key, each in made.items()}
    return {key: each for key, each in made.items() if each not in (None, "", [], {})}


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == round(value) or abs(value) >= 10**_DIGITS:
        return round(value)
    return float(f"{value:.{_DIGITS}g}")


def fitted(answer: Mapping[str, Any], definitions: Mapping[str, str], most: int) -> dict[str, Any]:
    """Return an answer with the definitions of its numbers and, if it is too long, with fewer rows.

    The longest list loses half of its rows, and then the one that is longest then: lists have what matters first.
    ``left_out`` says how many rows are missing.

    Args:
        answer: as `plain` returns it, with its ``data``.
        definitions: what the numbers are, by their path in ``data``, such as "findings.win_ns".
        most: the number of tokens.
    """
    fit = dict(json.loads(text_of(answer)))
    lists = dict(_lists("", fit["data"]))
    all_rows, left = {name: list(rows) for name, rows in lists.items()}, dict[str, str]()
    everything = 0
    while True:
        present = set(_numbers("", fit["data"]))
        fit["definitions"] = {name: text for name, text in definitions.items() if name in present}
        fit["left_out"] = [f"{name}: {text}" for name, text in left.items()]
        if left:
            all_of_it = f"All of it takes about {everything:,} tokens: max_tokens={everything + 200}."
            fit["left_out"].append(all_of_it)
        tokens = estimated_tokens(fit)
        everything = everything or tokens
        if tokens <= most:
            return fit
        longest = max(
            (name for name in lists if lists[name]), key=lambda name: len(text_of(lists[name])), default=None
        )
        if longest is None:
            return _shortest(fit, everything)
        rows = lists[longest]
        del rows[len(rows) // 2 :]
        left[longest] = f"{len(rows)} of {len(all_rows[longest]):,} rows are here"


def _shortest(fit: dict[str, Any], everything: int) -> dict[str, Any]:
    """Return an answer of its sentence alone: not even its numbers without rows fit."""
    said = f"All but the summary. All of it takes about {everything:,} tokens: max_tokens={everything + 200}."
    return {"summary": fit["summary"], **{name: {} for name in fit.keys() - {"summary"}}, "left_out": [said]}


def _lists(name: str, value: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists of rows in ``value``, of dictionaries or of values, and not those within rows."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _lists(f"{name}.{key}" if name else key, each)
    elif isinstance(value, list) and value:
        yield name, value


def _numbers(name: str, value: Any) -> Iterator[str]:
    """Yield the paths of all values, those in rows without a number for the row."""
    yield name
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(f"{name}.{key}" if name else key, each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(name, each)
