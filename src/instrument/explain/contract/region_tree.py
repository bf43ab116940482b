"""`RegionTree`: the regions of a step with their calls, as text that a test holds, and what moved in it.

    step
      forward
        layer_*  x24
      backward

A region without a number is called once. Names that differ only in numbers become one if there are more than
eight beside each other. A name that would read as something else stands in quotes, as a string of JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as File

from ...base.numbered_names import Path, joined_paths, own_names
from ...base.reasoned_lines import read_lines, write_lines
from ...base.units import count

_HEAD = "# The regions of a training step with their calls, for `instrument check --regions`."
_HEAD_OF_MODULES = (
    "# The modules of a training step without regions, with their calls, for `instrument check --regions`."
)
_LINE = re.compile(r"( *)(\S.*?)(?:  x(\d+))?\s*")
_AMBIGUOUS = re.compile(r'[#"\s].*|.*(?:\s|  x\d+)|')
_INDENT = 2


@dataclass
class RegionTree:
    """The regions of a step.

    Attributes:
        calls: the calls of each region by its path, a region after the one around it, in order of the first call.
        of_modules: whether these are modules, in place of regions.
    """

    calls: dict[Path, int] = field(default_factory=dict)
    of_modules: bool = False

    @classmethod
    def of(cls, opened: Mapping[Path, int]) -> RegionTree:
        """Return the tree of the regions that opened, given how often, in order of the first time."""
        calls: dict[Path, int] = {}
        for path in opened:
            for depth in range(1, len(path) + 1):
                calls.setdefault(path[:depth], opened.get(path[:depth], 1))  # 1: it was open before the step
        return cls({own_names(path): number for path, number in calls.items()})._joined(())

    @classmethod
    def read(cls, path: str | File) -> RegionTree:
        """Read a file.

        Raises:
            ValueError: a line is malformed; the message names it.
            OSError: the file cannot be read.
        """
        try:
            tree = cls._parse((number, line) for number, line, _, _ in read_lines(path))
            tree.of_modules = _HEAD_OF_MODULES in File(path).read_text(encoding="utf-8-sig").split("\n", 1)[0]
            return tree
        except ValueError as error:
            raise ValueError(f"cannot read {path}: {error}") from None

    @classmethod
    def from_text(cls, text: str) -> RegionTree:
        """Return the tree that ``str`` made a text of."""
        return cls._parse(enumerate(text.splitlines(), 1))

    @classmethod
    def _parse(cls, lines: Iterable[tuple[int, str]]) -> RegionTree:
        tree, around = cls(), list[str]()
        for number, line in lines:
            match = _LINE.fullmatch(line)
            depth = len(match.group(1)) // _INDENT if match else 0
            if match is None or len(match.group(1)) % _INDENT or depth > len(around):
                raise ValueError(f"line {number} is not indented as a region: {line!r}")
            name = match.group(2)
            try:
                around[depth:] = [json.loads(name) if name.startswith('"') else name]
            except ValueError:
                raise ValueError(f"line {number} has a name that is not a string of JSON: {line!r}") from None
            if tuple(around) in tree.calls:
                raise ValueError(f"line {number} has a region for the second time: {line!r}")
            tree.calls[tuple(around)] = int(match.group(3) or 1)
        return tree

    def write(self, path: str | File) -> None:
        """Write the file."""
        write_lines(path, [_HEAD_OF_MODULES if self.of_modules else _HEAD, *self._lines()])

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for path in self._in_order(()):
            calls = self.calls[path]
            yield " " * _INDENT * (len(path) - 1) + _written(path[-1]) + (f"  x{calls}" if calls != 1 else "")

    def _in_order(self, around: Path) -> Iterator[Path]:
        for path in self.inside(around):
            yield path
            yield from self._in_order(path)

    def inside(self, around: Path) -> list[Path]:
        """Return the paths of the regions directly inside a region, in order; of the outermost ones for ()."""
        return self._children().get(around, [])

    def below(self, around: Path) -> dict[Path, int]:
        """Return the calls of a region and all inside it, by the path from there."""
        return {path[len(around) :]: n for path, n in self.calls.items() if path[: len(around)] == around}

    def _children(self) -> Mapping[Path, list[Path]]:
        children: dict[Path, list[Path]] = {}
        for path in self.calls:
            children.setdefault(path[:-1], []).append(path)
        return children

    def _joined(self, rows: Iterable[Path]) -> RegionTree:
        """Return the tree with numbered names joined, also where ``rows`` have them joined."""
        joined, calls = joined_paths(self.calls, rows), Counter[Path]()
        for path, number in self.calls.items():
            calls[joined[path]] += number
        return RegionTree(dict(calls))

    def changes(self, now: RegionTree) -> list[str]:
        """Return what is different in ``now``, a sentence for each region; empty if nothing is.

        A region that appears or is gone stands for those inside it.
        """
        return list(_changes(self._joined(now.calls), now._joined(self.calls)))

    def assert_same(self, path: str | File) -> None:
        """Fail if the regions are not those in a file.

        Raises:
            AssertionError: with what moved.
            ValueError, OSError: the file cannot be read.
        """
        __tracebackhide__ = True
        changes = RegionTree.read(path).changes(self)
        if changes:
            raise AssertionError("\n".join([f"the regions of the step are not those in {path}:", *changes]))


def _changes(was: RegionTree, now: RegionTree) -> Iterator[str]:
    gone = [path for path in was.calls if path not in now.calls and (path[:-1] in now.calls or not path[:-1])]
    new = [path for path in now.calls if path not in was.calls and (path[:-1] in was.calls or not path[:-1])]
    moved = dict(_moves(gone, new, was, now))
    for path in gone:
        other = moved.get(path)
        if other is None:
            yield f"gone: {_shown(path)}{_times(was.calls[path])}{_inside(was, path)}"
        elif other[:-1] == path[:-1]:
            yield f"renamed: {_shown(path)} to {other[-1]}"
        else:
            yield f"moved: {path[-1]}, from {_around(path)} to {_around(other)}{_differ(was, now, path, other)}"
    for path in new:
        if path not in moved.values():
            yield f"new: {_shown(path)}{_times(now.calls[path])}{_inside(now, path)}"
    for path, calls in was.calls.items():
        often = now.calls.get(path, calls)
        if often != calls:
            how = "more" if often > calls else "less"
            yield f"called {how} often: {_shown(path)}, {count(calls)} to {count(often)} times"
    for around in [(), *was.calls]:
        if around in now.calls or not around:
            yield from _order(was.inside(around), now.inside(around))


def _moves(gone: list[Path], new: list[Path], was: RegionTree, now: RegionTree) -> Iterator[tuple[Path, Path]]:
    """Yield regions that are gone and appear elsewhere: with the same name, or beside it with the same inside."""
    for path in gone:
        named = [other for other in new if other[-1] == path[-1]]
        beside = [other for other in new if other[:-1] == path[:-1] and now.below(other) == was.below(path)]
        alone = sum(other[-1] == path[-1] for other in gone) == 1
        if alone and len(named) == 1:
            yield path, named[0]
        elif len(beside) == 1 and sum(other[:-1] == path[:-1] for other in gone) == 1:
            yield path, beside[0]


def _differ(was: RegionTree, now: RegionTree, before: Path, after: Path) -> str:
    """Return what else is different in a region that moved."""
    if was.calls[before] != now.calls[after]:
        return f", called {count(was.calls[before])} times before and {count(now.calls[after])} times now"
    return "" if was.below(before) == now.below(after) else ", with other regions or calls inside"


def _order(was: list[Path], now: list[Path]) -> Iterator[str]:
    """Yield the first region that comes at another place among those beside it."""
    before, after = [path for path in was if path in now], [path for path in now if path in was]
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        # Either ``new`` came forward, or ``old`` went back: whichever leaves the others in order.
        late = [path for path in before if path != old] == [path for path in after if path != old]
        path = old if late else new
        at = after.index(path) if late else index
        yield f"other order: {_shown(path)} is {f'after {after[at - 1][-1]}' if at else 'first'} now"
        return


def _written(name: str) -> str:
    return json.dumps(name) if _AMBIGUOUS.fullmatch(name) or not name.isprintable() else name


def _shown(path: Path) -> str:
    return " > ".join(path)


def _around(path: Path) -> str:
    return _shown(path[:-1]) or "the top"


def _times(calls: int) -> str:
    return f", {count(calls)} times" if calls != 1 else ""


def _inside(tree: RegionTree, path: Path) -> str:
    inside = sum(other[: len(path)] == path for other in tree.calls) - 1
    return f", with {count(inside)} inside" if inside else ""
