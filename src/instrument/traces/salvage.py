"""Finds the whole events in the damaged text of a trace, and mends those whose text can be mended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from .events import Event
from .trace import Lost

_KEYS = rb"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|sf|cname)"
BETWEEN = re.compile(rb'\}(?=\s*,\s*\{\s*"' + _KEYS + rb'"\s*:)')
"""The last character of an event that another one follows."""
_START = re.compile(rb'\{\s*"' + _KEYS + rb'"\s*:')
# After an event: a comma and the next one, or the end of the array with the rest of the file's own keys.
_END = re.compile(rb'\}(?=\s*,\s*\{\s*"' + _KEYS + rb'"\s*:|\s*\]\s*(?:,\s*"|\}\s*\Z|\Z))')
_TRIES = 8  # ends that may lie inside an event: arrays of objects in its args
_BARE = re.compile(rb"(?<=[:\[,])(\s*)[-+]?(?:N/A|NaN|nan|Infinity|inf|None|undefined)(?:\(ind\))?(?=\s*[,\]}])")
_CONTROL = bytes.maketrans(bytes(range(32)), b" " * 32)
_TEXT = re.compile(rb'("(?:name|cat|ph|s|bp|pid|tid)"\s*:\s*")(.*?)("\s*(?:,\s*"' + _KEYS + rb'"\s*:|\}\s*\Z))')
_ARG_TEXT = re.compile(rb'("[^"]*"\s*:\s*")(.*?)("\s*(?:,\s*"[^"]*"\s*:|\}))')
_ARGS = re.compile(rb',\s*"args"\s*:.*\Z')
_ESCAPE = re.compile(rb'\\(?!["\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_QUOTE = re.compile(rb'(?<!\\)"')

_decode = msgspec.json.Decoder(Event).decode


def whole_events(text: bytes, lost: Lost, *, last: bool) -> tuple[list[bytes], bytes | None, bytes]:
    """Take the events of a text apart that is not the JSON it should be.

    Args:
        text: events with commas between them; what follows the array may follow.
        lost: gets what is neither whole nor can be mended.
        last: whether the file ends here.

    Returns:
        The events, mended; what comes after the end of the array, or None if that was not met; and the end of
        the text that may be the beginning of one more event.
    """
    events: list[bytes] = []
    place = 0
    while True:
        place = _skip(text, place)
        if text[place : place + 1] == b"]":
            return events, text[place + 1 :], b""
        ends = _ends(text, place)
        if not ends:
            break
        end, event = _event(text, place, ends, lost)
        if event is None:
            events += _inside(text[place:end], lost)
        else:
            events.append(event)
        place = end
    rest = text[place:]
    if last and rest.strip():
        event = _valid(rest.rstrip(b", \t\r\n"))
        if event is not None:
            events.append(event)
        else:
            lost.add("the file ends in an event", events=1, size=len(rest))
        rest = b""
    return events, None, rest


def _skip(text: bytes, place: int) -> int:
    while text[place : place + 1] in b" \t\r\n," and place < len(text):
        place += 1
    return place


def _ends(text: bytes, place: int) -> list[int]:
    """Where the event may end, nearest first."""
    ends = []
    for match in _END.finditer(text, place):
        ends.append(match.end())
        if len(ends) == _TRIES:
            break
    return ends


def _event(text: bytes, place: int, ends: list[int], lost: Lost) -> tuple[int, bytes | None]:
    for end in ends:
        event = _valid(text[place:end])
        if event is not None:
            return end, event
    mended = text[place : ends[0]]
    for reason, mend in _MENDS:
        mended = mend(mended)
        event = _valid(mended)
        if event is not None:
            lost.repaired += 1
            lost.add(reason)
            return ends[0], event
    return ends[0], None


def _inside(text: bytes, lost: Lost) -> list[bytes]:
    """Events that are whole within one that is not, as where two processes wrote into one file."""
    for match in _START.finditer(text, 1):
        event = _valid(text[match.start() :])
        if event is not None:
            lost.add("an event that is not whole", events=1, size=match.start())
            return [event]
    lost.add("an event that is no JSON", events=1, size=len(text))
    return []


def _valid(text: bytes) -> bytes | None:
    """The text, if it is one event."""
    try:
        event = _decode(text)
        return text if event.ph and event.in_time() else None
    except (ValueError, RecursionError):
        return None


def metadata(text: bytes, lost: Lost) -> dict[str, Any]:
    """Return the keys and values of a JSON object in braces, mended if need be."""
    for reason, mend in [("", bytes), *_MENDS[:5]]:
        text = mend(text)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if reason:
            lost.add(f"metadata: {reason}")
        return content if isinstance(content, dict) else {}
    lost.add("metadata that are no JSON", size=len(text))
    return {}


def _plain(text: bytes) -> bytes:
    return text.translate(_CONTROL)


def _utf8(text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode()


def _no_bare(text: bytes) -> bytes:
    return _BARE.sub(rb"\1null", text)


def _escaped(pattern: re.Pattern[bytes]) -> Callable[[bytes], bytes]:
    def escape(match: re.Match[bytes]) -> bytes:
        value = match[2]
        if _ESCAPE.search(value):  # as in C:\Users: none of the backslashes is meant as an escape
            value = value.replace(b"\\", b"\\\\")
        return match[1] + _QUOTE.sub(rb'\\"', value) + match[3]

    return lambda text: pattern.sub(escape, text)


def _coerced(text: bytes) -> bytes:
    """Numbers as text, and process or thread ids beyond 64 bits."""
    try:
        content = json.loads(text)
        for name in ("ts", "dur"):
            content[name] = float(content.get(name) or 0)
        for name in ("pid", "tid", "name", "cat", "ph"):
            content[name] = str(content.get(name, ""))
        return json.dumps(content).encode()
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return text


def _without_args(text: bytes) -> bytes:
    return _ARGS.sub(b"}", text)


# Each works on what those before it left.
_MENDS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("invalid UTF-8", _utf8),
    ("control characters", _plain),
    ("bare words in place of numbers", _no_bare),
    ("quotes or backslashes that are not escaped", _escaped(_TEXT)),
    ("quotes or backslashes that are not escaped", _escaped(_ARG_TEXT)),
    ("values of another type", _coerced),
    ("args that cannot be read", _without_args),
]
