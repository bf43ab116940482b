"""`NumberFile`: the numbers of a step in a text file that a project holds, with reasons, places, and what moved.

    kernels.gemm 12  the wider MLP
        4  # step > forward, model.py in Mlp.forward: return self.down(x)
        8  # step > forward, model.py in Mlp.forward: x = self.up(x)
    syncs 1  the loss is logged  # train.py in main: print(loss.item())

The total of a number is the sum of its places, so that changes of several branches add up when they are merged.
The places explain a difference; only totals are compared, as code may move.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...base.reasoned_lines import read_lines, with_place, write_lines
from .numbers import TOLERANCE, Number, Numbers, Spot

_HEAD = (
    "# What a training step does, for `instrument check --baseline`. Of each number: name, value, reason # place",
    "# Indented are the places of a number, which is their sum. ~ is before numbers that may differ by 5 %.",
    "# --update writes what is found now, and keeps the reasons.",
)
_LINE = re.compile(r"([A-Za-z_][\w.:-]*)\s+(~?)(\d+)(?:\s+(.*))?")
_PLACE = re.compile(r"\s+(\d+)(?:\s+(.*))?")
_ALIKE, _MAX_PAIRS = 0.6, 2_500  # of two texts, from 0 to 1; texts to compare
_CONFLICT = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")


@dataclass
class HeldNumber:
    """A number in a file.

    Attributes:
        value: the number.
        exact: whether it must be the same.
        reason: why it is what it is; may be empty.
        places: the parts of it by place; empty if the file has none.
        reasons: the reasons of places that have one.
    """

    value: int
    exact: bool = True
    reason: str = ""
    places: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A place of a number that moved.

    Attributes:
        where: the place, as the file has it.
        spot: the place in the program as it is now; None if it is gone.
        was: its part before.
        now: its part now.
    """

    where: str
    spot: Spot | None
    was: int
    now: int

    def __str__(self) -> str:
        return str(self.spot) if self.spot else self.where or "no place known"


@dataclass(frozen=True)
class Change:
    """A number that moved.

    Attributes:
        name: its name.
        was: the number before.
        now: the number now.
        reason: the reason in the file; may be empty.
        parts: the places that moved, those with the greatest differences first. Empty if no places are known.
    """

    name: str
    was: int
    now: int
    reason: str
    parts: tuple[Part, ...]

    @property
    def better(self) -> bool:
        """Whether it is less now."""
        return self.now < self.was


@dataclass
class NumberFile:
    """The numbers of one file, by name."""

    held: dict[str, HeldNumber] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, *, conflicts: bool = False) -> NumberFile:
        """Read a file.

        Args:
            path: the file.
            conflicts: take the lines of both sides where a merge left a conflict, for their reasons.

        Raises:
            ValueError: a line is malformed; the message names it.
            OSError: the file cannot be read.
        """
        file, last = cls(), HeldNumber(0)
        for number, line, content, where in read_lines(path):
            if line.startswith(_CONFLICT):
                if conflicts:
                    continue
                raise ValueError(f"cannot read {path}, line {number}: a conflict of a merge; --update solves it")
            match = (_PLACE if line[0].isspace() and file.held else _LINE).fullmatch(content)
            if match is None:
                raise ValueError(f"cannot read {path}, line {number}: no name, number and reason: {line!r}")
            if match.re is _PLACE:
                last.places[where] = last.places.get(where, 0) + int(match.group(1))
                if match.group(2):
                    last.reasons[where] = match.group(2)
                continue
            name, about, value, reason = match.groups()
            if name in file.held and not conflicts:
                raise ValueError(f"cannot read {path}, line {number}: {name} is listed twice")
            last = file.held.setdefault(name, HeldNumber(int(value), not about))
            last.reason = reason or last.reason
            if where:
                last.places[where] = int(value)
        for held in file.held.values():
            held.value = sum(held.places.values()) if held.places else held.value
        return file

    @classmethod
    def of(cls, numbers: Numbers, before: NumberFile | None = None) -> NumberFile:
        """Return the file of ``numbers``, with the reasons in ``before``.

        A number that ``before`` has without places keeps that form. Sums of others are left out, unless ``before``
        has them instead of their parts.
        """
        before = before or cls()
        sums = {name for name, held in before.held.items() if held.value and name in numbers} - {*numbers.parts}
        names = [name for name in numbers.parts if not any(name.startswith(f"{above}.") for above in sums)]
        file = cls()
        for name in sorted({*names, *sums}):
            number, old = numbers.number(name), before.held.get(name)
            if old and not number.exact and abs(number.value - old.value) <= _tolerated(number, old):
                file.held[name] = old  # it would change with each update
                continue
            places = number.by_text() if old is None or old.places or not old.value else {}
            reason = old.reason if old else ""
            file.held[name] = HeldNumber(number.value, number.exact, reason, places, _moved_reasons(old, places))
        return file

    def write(self, path: str | Path) -> None:
        """Write the file, by name and place."""
        write_lines(path, [*_HEAD, *self._lines()])

    def _lines(self) -> Iterator[str]:
        for name, held in sorted(self.held.items()):
            number = f"{name} {'' if held.exact else '~'}{held.value}"
            reason = held.reason
            where = ""
            if len(held.places) == 1:
                (where,) = held.places
                reason = reason or held.reasons.get(where, "")
            yield with_place(f"{number}  {reason}", where)
            for place, value in sorted(held.places.items() if len(held.places) > 1 else ()):
                yield with_place(f"    {value}  {held.reasons.get(place, '')}", place)

    def changes(self, numbers: Numbers) -> list[Change]:
        """Return what moved, by name: the numbers in the file, and those beside them that the file lacks.

        A number that is missing in the file was 0, if the file has another one of its group, such as
        "kernels.gemm" for "kernels.sort". Other numbers are not compared.

        Raises:
            ValueError: the file has a number that there is not.
        """
        groups = {_group(name) for name in self.held}
        for name in self.held:
            if name not in numbers.names and _group(name) not in map(_group, numbers):
                raise ValueError(f"unknown number {name}; known numbers: {', '.join(numbers.names)}")
        beside = [
            name
            for name in numbers.parts
            if _group(name) in groups and not any(f"{name}.".startswith(f"{one}.") for one in self.held)
        ]
        changes = (_change(name, self.held.get(name), numbers) for name in sorted({*self.held, *beside}))
        return [change for change in changes if change is not None]

    def missing(self, numbers: Numbers) -> list[str]:
        """Return the groups of numbers that the file has nothing about, in order."""
        return sorted({*map(_group, numbers)} - {*map(_group, self.held)})


def compare(before: Numbers, after: Numbers) -> list[Change]:
    """Return what moved between two runs."""
    return NumberFile.of(before).changes(after)


def _group(name: str) -> str:
    return name.partition(".")[0]


def _change(name: str, held: HeldNumber | None, numbers: Numbers) -> Change | None:
    old = held or HeldNumber(0)
    number = numbers.number(name) if name in numbers.names else Number(0)
    if abs(number.value - old.value) <= _tolerated(number, old):
        return None
    was, now = old.places, number.by_text()
    parts: list[Part] = []
    if (was or not old.value) and (now or not number.value):  # else the places of one side are not known
        parts = list(_parts(was, now, {spot.text: spot for spot in number.places}))
    return Change(name, old.value, number.value, old.reason, tuple(parts))


def _parts(was: Mapping[str, int], now: Mapping[str, int], spots: Mapping[str, Spot]) -> list[Part]:
    """Return the places that moved; a place that is gone and one that is new are one if they are alike."""
    before = {where: where for where in now if where in was}
    gone, new = [where for where in was if where not in now], [where for where in now if where not in was]
    before |= {pair[1]: pair[0] for pair in _alike(gone, new)}
    parts = [Part(where, spots[where], was.get(before.get(where, ""), 0), value) for where, value in now.items()]
    parts += [Part(where, None, was[where], 0) for where in gone if where not in before.values()]
    moved = [part for part in parts if part.was != part.now]
    return sorted(moved, key=lambda part: (-abs(part.now - part.was), part.where))


def _alike(gone: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of places whose code is alike, the most similar ones first."""
    if len(gone) * len(new) > _MAX_PAIRS:
        return
    matcher = difflib.SequenceMatcher(autojunk=False)
    scores = []
    for one in new:
        function, _, code = one.partition(": ")
        matcher.set_seq2(code)  # what is computed for it is kept
        for other in gone:
            matcher.set_seq1(other.partition(": ")[2])
            scores.append((matcher.ratio(), other.partition(": ")[0] == function, other, one))
    left, free = {*gone}, {*new}
    for score, _, other, one in sorted(scores, reverse=True):
        if score >= _ALIKE and other in left and one in free:
            left.remove(other)
            free.remove(one)
            yield other, one


def _tolerated(number: Number, old: HeldNumber) -> float:
    return 0 if number.exact else TOLERANCE * max(old.value, number.value)


def _moved_reasons(old: HeldNumber | None, places: Mapping[str, int]) -> dict[str, str]:
    """Return the reasons of places; the reason of a place that is gone passes to the new place most like it."""
    if old is None:
        return {}
    fresh, gone = [where for where in places if where not in old.places], [*old.reasons.keys() - places.keys()]
    now = {where: where for where in places} | dict(_alike(sorted(gone), fresh))
    return {now[where]: reason for where, reason in old.reasons.items() if where in now}
