"""Helpers that turn the regions of a trace into text, so a test can show the expected tree."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from tests.conftest import annotations
from tests.support.ranges import Range, outline


def traces(folder: Path) -> list[Path]:
    """Return the traces of all windows in `folder`, in order."""
    return sorted(folder.glob("window-*/*.pt.trace.json.gz"))


def recorded(folder: Path) -> list[Range]:
    """Return the regions in the traces of all windows in `folder`."""
    return [
        Range(
            name=event["name"],
            start=round(event["ts"] * 1000),
            end=round((event["ts"] + event["dur"]) * 1000),
            kind="push_pop",
            thread=event["tid"],
            process=event["pid"],
        )
        for path in traces(folder)
        for event in annotations(path)
    ]


def tree(ranges: Iterable[Range], names: Collection[str]) -> str:
    """Return the outline of those `ranges` whose names, up to a "#", are in `names`."""
    return outline(r for r in ranges if r.name in names or str(r.name).split("#")[0] in names)


def counts(ranges: Iterable[Range], names: Collection[str]) -> dict[str, int]:
    """Return the number of `ranges` with each of `names`."""
    found = [r.name for r in ranges]
    return {name: found.count(name) for name in names}
