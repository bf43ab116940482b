"""Tables of events: numpy columns of equal length, one row per event."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_Key = TypeVar("_Key", bound=Hashable)

_TIMED: dict[str, tuple[str, float]] = {
    "start_ns": ("i8", 0),
    "duration_ns": ("i8", 0),
    "name": ("i4", 0),
    "event": ("i8", -1),
}
_ON_CPU = _TIMED | {"thread": ("i4", -1)}
_NESTED = _ON_CPU | {"parent": ("i4", -1)}
_ON_GPU = _TIMED | {"category": ("i4", 0), "device": ("i4", -1), "stream": ("i8", -1)}
_LINKED = {
    "launch": ("i4", -1),
    "operator": ("i4", -1),
    "region": ("i4", -1),
    "module": ("i4", -1),
    "step": ("i4", -1),
}
_KERNEL = {
    "bytes": ("i8", -1),
    "blocks": ("i8", -1),
    "block_threads": ("i4", -1),
    "registers": ("i4", -1),
    "shared_bytes": ("i8", -1),
    "blocks_per_sm": ("f8", np.nan),
    "occupancy_percent": ("f8", np.nan),
    "collective": ("i4", 0),
    "group": ("i4", 0),
    "elements_in": ("i8", -1),
    "elements_out": ("i8", -1),
    "dtype": ("i4", 0),
    "short_name": ("i4", 0),
    "family": ("i4", 0),
}

COLUMNS: dict[str, dict[str, tuple[str, float]]] = {
    "operators": _NESTED
    | {"external": ("i8", -1), "sequence": ("i8", -1), "shapes": ("i4", 0), "types": ("i4", 0)}
    | {"scalars": ("i4", 0)},
    "regions": _NESTED
    | {"external": ("i8", -1), "domain": ("i4", 0), "category": ("i4", 0)}
    | {"color": ("i8", -1), "payload": ("i4", 0)},
    "frames": _NESTED,
    "runtime": _ON_CPU | {"category": ("i4", 0), "correlation": ("i8", -1), "external": ("i8", -1)},
    "gpu": _ON_GPU | {"correlation": ("i8", -1), "external": ("i8", -1)} | _KERNEL | _LINKED,
    "gpu_regions": _ON_GPU | {"external": ("i8", -1)},
    "syncs": _ON_GPU | {"correlation": ("i8", -1)},
    "memory": _ON_CPU
    | {
        "bytes": ("i8", 0),
        "address": ("i8", -1),
        "device_type": ("i4", -1),
        "device": ("i4", -1),
        "allocated_bytes": ("i8", -1),
        "reserved_bytes": ("i8", -1),
    },
    "counters": _ON_CPU | {"value": ("f8", np.nan)},
    "steps": _ON_CPU | {"number": ("i8", -1)},
    "others": _ON_CPU | {"category": ("i4", 0)},
}
"""The columns of each table: their numpy type, and the value that stands for unknown."""

TEXT = frozenset(
    {
        "name",
        "category",
        "domain",
        "payload",
        "shapes",
        "types",
        "scalars",
        "collective",
        "group",
        "dtype",
        "short_name",
        "family",
    }
)
"""Columns that hold numbers of strings; 0 is the empty string."""


KERNEL, MEMCPY, MEMSET = 1, 2, 3
"""The values of the column ``category`` of GPU work; in every trace, the strings with these numbers."""


PIP = "pip install 'torch-instrument[traces]'"
"""What installs pandas and pyarrow."""
_SEARCHED = 2048  # characters of a string


class Interner(dict[_Key, int]):
    """Assigns each key a number at its first lookup."""

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self)
        return number


class TooLargeError(Exception):
    """A file holds more than can be kept; the message says what."""


class Strings(Interner[str]):
    """Assigns each string a number.

    Args:
        most: the number of characters that all strings may have together.

    Raises:
        TooLargeError: at the lookup of a string that exceeds this number.
    """

    def __init__(self, most: int = 1 << 40) -> None:
        super().__init__({"": 0, "kernel": KERNEL, "memcpy": MEMCPY, "memset": MEMSET})
        self._characters_left = most

    def __missing__(self, word: str) -> int:
        self._characters_left -= len(word)
        if self._characters_left < 0:
            raise TooLargeError("its strings are larger than in any trace")
        number = self[word] = len(self)
        return number


class Table(Mapping[str, Array]):
    """Events of one kind as numpy columns: ``table.start_ns`` or ``table["start_ns"]``.

    Args:
        columns: the columns by name, all of one length.
        strings: the strings that the numbers in the columns of `TEXT` stand for.
    """

    __slots__ = ("_columns", "strings")

    def __init__(self, columns: Mapping[str, Array], strings: list[str]) -> None:
        self._columns = dict(columns)
        self.strings = strings

    def __getattr__(self, column: str) -> Array:
        if column == "_columns":  # while it is unpickled
            raise AttributeError(column)
        try:
            return self._columns[column]
        except KeyError:
            raise AttributeError(f"no column {column!r}; the columns are {', '.join(self._columns)}") from None

    def __getitem__(self, column: str) -> Array:
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self._columns.values()), ()))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __dir__(self) -> list[str]:
        return [*(name for name in super().__dir__() if not name.startswith("_")), *self._columns]

    def __repr__(self) -> str:
        return f"<{len(self):,} rows: {', '.join(self._columns)}>"

    @property
    def end_ns(self) -> Array:
        """The ends of the events: start + duration."""
        return self.start_ns + self.duration_ns

    def where(self, rows: Array | slice) -> Table:
        """Return the rows that a mask, an array of row numbers or a slice selects."""
        return Table({name: column[rows] for name, column in self._columns.items()}, self.strings)

    def read_only(self) -> Table:
        """Return the same rows with columns that cannot be written."""
        columns = {name: column.view() for name, column in self._columns.items()}
        for column in columns.values():
            column.flags.writeable = False
        return Table(columns, self.strings)

    def to_pandas(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``, with text as categories.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"data frames need pandas: {PIP}") from error
        columns: dict[str, Any] = dict(self._columns)
        for name in TEXT & columns.keys():
            used, numbers = np.unique(columns[name], return_inverse=True)
            columns[name] = pandas.Categorical.from_codes(numbers, [self.strings[code] for code in used.tolist()])
        return pandas.DataFrame(columns)

    def text(self, column: str) -> list[str]:
        """Return a text column as a list of strings."""
        return [self.strings[code] for code in self._columns[column].tolist()]

    def matching(self, column: str, pattern: Any) -> Array:
        """Return a mask of the rows in whose string in ``column`` the compiled ``pattern`` is found.

        Each string is searched once, and only its first 2,048 characters: some patterns take quadratic time.
        """
        codes = self._columns[column]
        hits = np.bincount(codes, minlength=1) > 0
        for code in np.flatnonzero(hits).tolist():
            hits[code] = pattern.search(self.strings[code][:_SEARCHED]) is not None
        return hits[codes]


def table(kind: str, columns: Mapping[str, Array], strings: list[str]) -> Table:
    """Return a table of this kind; missing columns are filled with the value for unknown."""
    count = len(next(iter(columns.values())))
    complete = {}
    for name, (dtype, missing) in COLUMNS[kind].items():
        if name in columns:
            complete[name] = _fit_to_dtype(columns[name], dtype, missing)
        else:
            complete[name] = np.full(count, missing, dtype)
    return Table(complete, strings)


def join_parts(columns: Mapping[str, tuple[str, float]], parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Concatenate the rows of several parts; the columns that one of them lacks are unknown in its rows."""
    return {
        name: np.concatenate([part.get(name, np.full(len(part["start_ns"]), missing, dtype)) for part in parts])
        for name, (dtype, missing) in columns.items()
        if any(name in part for part in parts)
    }


def natural(value: object) -> int:
    """Return a natural number of 63 bits that may be text; -1 for anything else."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63 else -1


def _fit_to_dtype(column: Array, dtype: str, missing: float) -> Array:
    """Convert the column to this type; integers beyond its range become unknown."""
    if column.dtype == np.int64 and dtype == "i4":
        limit = np.iinfo(np.int32).max
        column = np.where((-limit <= column) & (column <= limit), column, missing)
    return np.ascontiguousarray(column, dtype)
