"""Shortens names of regions: layers that differ in a number become one row, modules have their own part only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

MAX_SEPARATE = 8  # regions beside each other that keep their names
_NUMBER = re.compile(r"\d+")

BACKWARD = " (backward)"
"""The suffix of the regions of backward passes, as `instrument.annotate_modules` names them."""

Path = tuple[str, ...]


def pattern_of(name: str) -> str:
    """Return a name with its numbers replaced: ``layer_*``."""
    return _NUMBER.sub("*", name)


def own_names(path: Path) -> Path:
    """Return a path in which the name of a module is the part of it that the one around it lacks."""
    around = ("", *(name.removesuffix(BACKWARD) for name in path))
    return tuple(name.removeprefix(f"{outer}.") for outer, name in zip(around, path, strict=False))


def joined_paths(paths: Iterable[Path], joined_before: Iterable[Path] = ()) -> dict[Path, Path]:
    """Return the path of the row for each path, where more than eight names beside each other become one.

    Args:
        paths: the paths of regions, with all those around them.
        joined_before: rows of earlier regions: names beside each other also become one where these have one.
    """
    levels: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        levels[len(path)].append(path)
    known = {path for path in joined_before if "*" in path[-1]}
    joined: dict[Path, Path] = {(): ()}
    for depth in sorted(levels):
        names: dict[tuple[Path, str], set[str]] = defaultdict(set)
        for path in levels[depth]:
            names[joined[path[:-1]], pattern_of(path[-1])].add(path[-1])
        for path in levels[depth]:
            around, pattern = joined[path[:-1]], pattern_of(path[-1])
            many = len(names[around, pattern]) > MAX_SEPARATE or (*around, pattern) in known
            joined[path] = (*around, pattern if many else path[-1])
    return joined
