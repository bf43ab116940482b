"""Recovers the intact events of a damaged trace, and repairs others where possible."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from ..tables.trace import ReadLosses
from .event_args import TraceEvent

KEYS = rb"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|sf|cname)"
_PHASE = rb'ph"\s*:|args"\s*:\s*\{'
BEGIN = rb'\{\s*"(?:' + _PHASE + rb"|" + KEYS + rb'"\s*:[^{}]{0,999}?"(?:' + _PHASE + rb"))"
"""The beginning of an event: unlike the objects in its args, it has a phase or args."""
BETWEEN = re.compile(rb"\}(?=\s*,\s*" + BEGIN + rb")")
"""The last character of an event that is followed by another event."""
CLOSE = re.compile(rb"\](?!\s*,?\s*" + BEGIN + rb")")
"""The end of the array of events."""
_START = re.compile(BEGIN)
_LAST = re.compile(rb'\}(?=\s*\]\s*(?:,\s*"|\}\s*\Z|\Z))')  # the probable end of the last event
OTHER_TYPES = "values of another type"
"""The reason in `ReadLosses` for text instead of numbers and the like: every event is read."""
_GAP = re.compile(rb"[\s,]*")
_TRIES = 64  # possible beginnings of an event that are tried
_WINDOW = 1 << 12
_MAX_SEARCHED_BYTES = 1 << 16  # the longest event that is searched for inside damaged text
_REPAIRABLE = 1 << 18

_WORD = rb"[-+]?(?:N/A|NaN|nan|Infinity|inf|None|undefined)(?:\(ind\))?"
_BARE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(?<=[:\[,\s])' + _WORD + rb"(?=\s*[,\]}])")
_CONTROL = bytes.maketrans(bytes(range(32)), b" " * 32)
# The length of texts with quotes is limited, because the time grows quadratically.
_TEXT = re.compile(
    rb'("(?:name|cat|ph|s|bp|pid|tid)"\s*:\s*")(.{0,1999}?)("\s*(?:,\s*"' + KEYS + rb'"\s*:|\}\s*\Z))'
)
_ARG_TEXT = re.compile(rb'("[^"]{0,199}"\s*:\s*")(.{0,1999}?)("\s*(?:,\s*"[^"]{0,199}"\s*:|\}))')
_ARGS = re.compile(rb',\s*"args"\s*:.*\Z')
_ESCAPE = re.compile(rb'\\(?!["\\/bfnrtu])|\\u(?![0-9a-fA-F]{4})')
_QUOTE = re.compile(rb'(?<!\\)"')
_PAIR = re.compile(r'[\s,{}]*"((?:[^"\\]|\\.)*)"\s*:\s*')

_decode = msgspec.json.Decoder(TraceEvent).decode
_scan = json.JSONDecoder(strict=False).raw_decode
_skip = json.JSONDecoder(strict=False, parse_int=len, parse_float=len, object_pairs_hook=len).raw_decode


def recover_events(text: bytes, lost: ReadLosses, *, last: bool) -> tuple[list[bytes], bytes | None, bytes]:
    """Split text that is not valid JSON into its events.

    Args:
        text: events with commas between them; the end of the array may follow.
        lost: records what is neither intact nor can be repaired.
        last: whether the file ends here.

    Returns:
        The intact and repaired events; the text after the end of the array, or None if the array does not end; and
        the rest of the text, which may be the beginning of one more event.
    """
    events: list[bytes] = []
    place = boundary = 0
    while True:
        place = after(_GAP, text, place)
        if CLOSE.match(text, place):
            return events, text[place + 1 :], b""
        end, unfinished = _object(text, place)
        event = text[place:end]
        if _is_event(event):
            events.append(event)
            place = end
            continue
        if boundary <= place < len(text):
            end_of_event = BETWEEN.search(text, place) or (_LAST.search(text, place) if last else None)
            boundary = end_of_event.end() if end_of_event else len(text)
        if not last and (unfinished or boundary == len(text)):
            return events, None, text[place:]
        if place == len(text):
            return events, None, b""
        place = _skip_damage(text, place, end if event else boundary, events, lost)


def first_event(text: bytes, start: int = 0, end: int = sys.maxsize) -> int | None:
    """Return where the first intact event begins between two places; None if there is no such event."""
    for begin in islice(_START.finditer(text, start, end), _TRIES):
        place = begin.start()
        if _is_event(text[place : _object(text, place, place + _MAX_SEARCHED_BYTES)[0]]):
            return place
    return None


def after(pattern: re.Pattern[bytes], text: bytes, place: int) -> int:
    """Return where what matches at a place ends; the place if nothing does."""
    match = pattern.match(text, place)
    return match.end() if match else place


def value_end(text: bytes, place: int, limit: int = sys.maxsize) -> tuple[int, bool]:
    """Return where the JSON value at a place ends and, if it does not, whether more text might complete it."""
    limit, size = min(limit, len(text)), _WINDOW
    while True:
        part = text[place : min(place + size, limit)].decode("latin-1")  # a character for each byte
        try:
            end = _skip(part)[1]
            if end < len(part) or part.endswith(('"', "]", "}")):
                return place + end, False
            unfinished = True  # a number may have more digits
        except RecursionError:
            return place, False
        except json.JSONDecodeError as error:
            unfinished = error.msg.startswith("Unterminated") or error.pos > len(part) - len("-Infinity")
        if not unfinished or place + size >= limit:
            return place, unfinished
        size *= 16


def _object(text: bytes, place: int, limit: int = sys.maxsize) -> tuple[int, bool]:
    return value_end(text, place, limit) if text.startswith(b"{", place) else (place, False)


def _is_event(text: bytes, *, at_any_time: bool = False) -> bool:
    try:
        event = _decode(text)
    except (ValueError, RecursionError):
        return False
    return bool(event.ph) and (at_any_time or event.in_time())


def _skip_damage(text: bytes, place: int, end: int, events: list[bytes], lost: ReadLosses) -> int:
    """Repair the damaged text up to ``end`` if possible; return where to continue."""
    inside = first_event(text, place + 1, end)
    if inside is not None:
        end = inside
    elif (repaired := _repair(text[place:end], lost)) is not None:
        events.append(repaired)
        return end
    if not text[place:end].strip(b"\0 \t\r\n,"):
        lost.add("zero bytes", size=end - place)
    elif end == len(text):
        lost.add("the file ends in an event", events=1, size=end - place)
    else:
        untimely = _is_event(text[place:end].rstrip(b", \t\r\n"), at_any_time=True)
        wrong = "with an impossible time" if untimely else "that is not JSON"
        lost.add(f"an event {wrong}", events=1, size=end - place)
    return end


def _repair(text: bytes, lost: ReadLosses) -> bytes | None:
    if not text.startswith(b"{") or b'"ph"' not in text or len(text) > _REPAIRABLE:
        return None
    for reason, repair in _REPAIRS:
        text = repair(text)
        if _is_event(text):
            lost.repaired += 1
            lost.add(reason)
            return text
    return None


def metadata(text: bytes, lost: ReadLosses) -> dict[str, Any]:
    """Return the keys and values of a JSON object, repaired if necessary, as far as they can be read."""
    for reason, repair in [("", bytes), *_REPAIRS[: 5 if len(text) <= _REPAIRABLE else 0]]:
        text = repair(text)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if reason:
            lost.add(f"metadata: {reason}")
        return content if isinstance(content, dict) else {}
    content, place = {}, 0
    strings = text.decode("utf-8", "replace")
    while pair := _PAIR.match(strings, place):
        try:
            content[pair[1]], place = _scan(strings, pair.end())
        except (ValueError, RecursionError):
            break
    if rest := strings[place:].strip(" \t\r\n,{}\0"):
        lost.add("metadata that is not JSON", size=len(rest.encode()))
    return content


def _no_bare(text: bytes) -> bytes:
    return _BARE.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", text)


def _escaped(pattern: re.Pattern[bytes]) -> Callable[[bytes], bytes]:
    def escape(match: re.Match[bytes]) -> bytes:
        value = match[2]
        if _ESCAPE.search(value):  # as in C:\Users, where no backslash is an escape
            value = value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        return match[1] + _QUOTE.sub(rb'\\"', value) + match[3]

    return lambda text: pattern.sub(escape, text)


def _coerce_types(text: bytes) -> bytes:
    """Convert numbers in text to numbers, numbers and null to text, and names that are not valid Unicode."""
    try:
        content = json.loads(text)
        content["ts"] = float(content["ts"])
        content["dur"] = float(content.get("dur") or 0)
        for name in ("name", "cat"):
            content[name] = str(content.get(name) or "")
        for name in ("pid", "tid"):
            if not isinstance(content.get(name), (int, float)):
                content[name] = str(content.get(name) or "")
        return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return text


# Each repair works on the result of the repairs before it.
_REPAIRS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("invalid UTF-8", lambda text: text.decode("utf-8", "replace").encode()),
    ("control characters", lambda text: text.translate(_CONTROL)),
    ("bare words in place of numbers", _no_bare),
    ("quotes or backslashes that are not escaped", _escaped(_TEXT)),
    ("quotes or backslashes that are not escaped", _escaped(_ARG_TEXT)),
    (OTHER_TYPES, _coerce_types),
    ("args that cannot be read", lambda text: _ARGS.sub(b"}", text)),
]
