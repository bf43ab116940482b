"""`Numbers`: what a training step does, as integers by name, each with the places that it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...base.findings import Site
from ...base.numbered_names import own_names
from ...base.source_paths import portable
from ...base.units import count, size
from ...read.tables.kernel_families import FAMILIES

TOLERANCE = 0.05
"""The share by which a number that is not deterministic may differ."""
WITHOUT_KERNEL = ("memcpy", "memset")
KERNELS = tuple(family for family in FAMILIES if family not in WITHOUT_KERNEL)
"""The families of kernels."""

_MAX_PLACES = 5  # in a message
_MAX_CODE = 60  # characters of a line of code in a file
_MEGABYTE = 10**6


@dataclass(frozen=True)
class ReadSite(Site):
    """A line of code as it was in another run.

    Attributes:
        text: the line.
    """

    text: str = ""

    @property
    def code(self) -> str:
        """The line without its indentation."""
        return self.text


def _as_dict(site: Site) -> dict[str, Any]:
    return {"file": site.file, "line": site.line, "function": site.function, "text": site.code}


class Spot(NamedTuple):
    """A place in a program.

    Attributes:
        region: the names of the regions, outermost first.
        site: the line; None if it is not known.
    """

    region: tuple[str, ...]
    site: Site | None

    @property
    def text(self) -> str:
        """The place as files have it: it stays the same if lines are added above."""
        parts = self._regions()
        if self.site is not None:
            code = self.site.code if len(self.site.code) <= _MAX_CODE else f"{self.site.code[: _MAX_CODE - 3]}..."
            place = f"{portable(self.site.file)} in {self.site.function}"
            parts.append(f"{place}: {code}".removesuffix(": "))
        return " ".join(", ".join(parts).split())

    def __str__(self) -> str:
        """The place as messages have it, with the number of the line."""
        parts = self._regions()
        parts += [f"{self.site}: {self.site.code}".removesuffix(": ")] if self.site is not None else []
        return ", ".join(parts) or "no place known"

    def _regions(self) -> list[str]:
        return [" > ".join(own_names(self.region))] if self.region else []


@dataclass(frozen=True)
class Number:
    """One number.

    Attributes:
        value: the number for a step.
        places: the parts of it, by place; they need not add up to it.
        exact: whether it is the same in every run and on every machine.
    """

    value: int
    places: Mapping[Spot, int] = field(default_factory=dict)
    exact: bool = True

    def by_text(self) -> dict[str, int]:
        """Return the parts by place as files have it; empty if they do not add up to the number."""
        parts: Counter[str] = Counter()
        for spot, value in self.places.items():
            parts[spot.text] += value
        return {text: value for text, value in parts.items() if value} if parts.total() == self.value else {}


class Numbers(Mapping[str, int]):
    """The numbers of a step, by dotted name: ``numbers["kernels.gemm"]``.

    Args:
        numbers: each number by name.
        known: further names, such as those of families of kernels, whose numbers are 0.
    """

    def __init__(self, numbers: Mapping[str, Number], known: Iterable[str] = ()) -> None:
        self.numbers = dict(sorted(numbers.items()))
        self._known = frozenset(known)

    def __getitem__(self, name: str) -> int:
        return self.number(name).value

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"<{', '.join(f'{name}={value}' for name, value in self.items() if '.' not in name)}>"

    def number(self, name: str) -> Number:
        """Return a number with its places.

        Raises:
            KeyError: the name is unknown.
        """
        if name not in self.numbers and name in self._known:
            return Number(0)
        return self.numbers[name]

    @property
    def names(self) -> list[str]:
        """All names, also of numbers that are 0 and not listed."""
        return sorted({*self.numbers, *self._known})

    @property
    def parts(self) -> list[str]:
        """The names of numbers that are no sums of others, such as "kernels.gemm", in order."""
        sums = {name[:at] for name in self.numbers for at in range(len(name)) if name[at] == "."}
        return [name for name in self.numbers if name not in sums]

    def over(self, limits: Mapping[str, int | float]) -> str | None:
        """Return which limits are exceeded, by how much and where most; None if none is.

        Args:
            limits: the greatest accepted numbers, by name; ``peak_mb=80`` stands for ``peak_bytes=80_000_000``.

        Raises:
            ValueError: a name is unknown.
        """
        sentences = []
        for name, limit in limits.items():
            found = name_of(name, self.names)
            now, most = self[found], limit * _MEGABYTE if found != name and name.endswith("_mb") else limit
            if now > most:
                sentences.append(f"{found} is {amount(found, now)}; allowed: {amount(found, most)}")
                sentences += self._largest(found)
        return "\n".join(sentences) or None

    def assert_max(self, **limits: int | float) -> None:
        """Fail if a number is greater than its limit, as in ``assert_max(syncs=0, peak_mb=80)``.

        Names with dots are passed as ``**{"kernels.gemm": 12}``.

        Raises:
            AssertionError: with the number, the limit, and the largest places.
            ValueError, TypeError: a name or a limit is not accepted.
        """
        __tracebackhide__ = True
        check_limits(limits)
        reason = self.over(limits)
        if reason is not None:
            raise AssertionError(reason)

    def _largest(self, name: str) -> Iterator[str]:
        places = sorted(self.number(name).places.items(), key=lambda item: (-item[1], item[0].text))
        for spot, value in places[:_MAX_PLACES]:
            yield f"    {amount(name, value)} at {spot}"
        if len(places) > _MAX_PLACES:
            yield f"    {amount(name, sum(value for _, value in places[_MAX_PLACES:]))} elsewhere"

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON values: for each name ``value``, ``exact``, and ``places``, a list."""
        return {
            name: {
                "value": number.value,
                "exact": number.exact,
                "places": [
                    {"region": spot.region, "site": spot.site and _as_dict(spot.site), "value": value}
                    for spot, value in number.places.items()
                ],
            }
            for name, number in self.numbers.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Numbers:
        """Return the numbers that `to_dict` made a dict of."""
        return cls({
            name: Number(
                each["value"],
                {
                    Spot(tuple(at["region"]), at["site"] and ReadSite(**at["site"])): at["value"]
                    for at in each["places"]
                },
                each["exact"],
            )
            for name, each in values.items()
        })  # fmt: skip


def name_of(name: str, names: Iterable[str]) -> str:
    """Return the number that ``name`` stands for: itself, or ``peak_bytes`` for ``peak_mb``.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    names = list(names)
    in_bytes = f"{name.removesuffix('_mb')}_bytes"
    for one in (name, *[in_bytes] * name.endswith("_mb")):
        if one in names:
            return one
    raise ValueError(f"unknown number {name!r}; known numbers: {', '.join(names)}")


def check_limits(limits: Mapping[str, Any]) -> None:
    """Check the values of limits.

    Raises:
        TypeError, ValueError: a limit is not a number >= 0.
    """
    for name, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise TypeError(f'"{name}" must be a number: {limit!r}')
        if not limit >= 0:
            raise ValueError(f'"{name}" must be >= 0: {limit!r}')


def amount(name: str, value: float) -> str:
    """Return a number of this name for people: ``1,200``, or ``1.20 MB (1,200,000 bytes)``."""
    exact = f"{value:,.0f}"
    return f"{size(value)} ({exact} bytes)" if "bytes" in name and abs(value) >= 1000 else count(value)
