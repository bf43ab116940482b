"""Decodes the slices of a timeline from the data of a page."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shown(NamedTuple):
    """A slice that the last level shows one by one."""

    group: str
    lane: str
    depth: int
    name: str
    kind: str
    start_ns: int
    length_ns: int
    about: dict[str, str]


def slices(section: dict[str, Any]) -> list[Shown]:
    """Decode the single slices of all levels as the page does."""
    rows = [
        (group["title"], title, depth)
        for group in section["groups"]
        for title, count in group["lanes"]
        for depth in range(count)
    ]
    found, texts = [], section["texts"]
    for columns in (level["single"] for level in section["levels"]):
        at = 0
        for place, count in zip(rows, columns["rows"], strict=True):
            time = 0
            for index in range(at, at + count):
                start, length = time + columns["gap"][index], columns["length"][index]
                time = start + length
                name, kind = divmod(columns["name"][index], len(section["classes"]))
                row = columns["about"][index]
                about = {key: texts[column[row]] for key, column in section["launches"].items() if column[row]}
                found.append(Shown(*place, texts[name], section["classes"][kind], start, length, about))
            at += count
    return sorted(found, key=lambda each: (each.start_ns, -each.length_ns))
