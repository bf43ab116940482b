"""Tables of events: numpy columns of equal length, one row per event."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_Key = TypeVar("_Key", bound=Hashable)

_Column = tuple[str, float]  # its numpy type, and the value that stands for unknown
_TEXT: _Column = ("i4", 0)
_SMALL: _Column = ("i4", -1)
_LARGE: _Column = ("i8", -1)
_REAL: _Column = ("f8", np.nan)

_TIMED: dict[str, _Column] = {"start_ns": ("i8", 0), "duration_ns": ("i8", 0), "name": _TEXT, "event": _LARGE}
_ON_CPU = _TIMED | {"thread": _SMALL}
_NESTED = _ON_CPU | {"parent": _SMALL}
_ON_GPU = _TIMED | {"category": _TEXT, "device": _SMALL, "stream": _LARGE}
_IDS = {"correlation": _LARGE, "external": _LARGE}
_KERNEL = {
    **{"bytes": _LARGE, "blocks": _LARGE, "block_threads": _SMALL, "registers": _SMALL, "shared_bytes": _LARGE},
    **{"blocks_per_sm": _REAL, "occupancy_percent": _REAL, "collective": _TEXT, "group": _TEXT},
    **{"elements_in": _LARGE, "elements_out": _LARGE, "dtype": _TEXT, "short_name": _TEXT, "family": _TEXT},
}
_LINKED = dict.fromkeys(("launch", "operator", "region", "module", "step"), _SMALL)

COLUMNS: dict[str, dict[str, _Column]] = {
    "operators": _NESTED
    | {"external": _LARGE, "sequence": _LARGE, "shapes": _TEXT, "types": _TEXT, "scalars": _TEXT}
    | {"group": _TEXT, "peer": _SMALL},
    "regions": _NESTED
    | {"external": _LARGE, "domain": _TEXT, "category": _TEXT, "color": _LARGE, "payload": _TEXT},
    "frames": _NESTED,
    "runtime": _ON_CPU | {"category": _TEXT} | _IDS,
    "gpu": _ON_GPU | _IDS | _KERNEL | _LINKED,
    "gpu_regions": _ON_GPU | {"external": _LARGE},
    "syncs": _ON_GPU | {"correlation": _LARGE},
    "memory": _ON_CPU
    | {"bytes": ("i8", 0), "address": _LARGE, "device_type": _SMALL, "device": _SMALL}
    | {"allocated_bytes": _LARGE, "reserved_bytes": _LARGE},
    "counters": _ON_CPU | {"device": _SMALL, "unit": _TEXT, "value": _REAL},
    "steps": _ON_CPU | {"number": _LARGE},
    "others": _ON_CPU | {"category": _TEXT},
}
"""The columns of each table: their numpy type, and the value that stands for unknown."""

TRANSFERS = ("c10d::send", "c10d::recv_")
"""The operators that send a tensor to one rank, and receive one from it."""

Tables = dict[str, dict[str, Array]]
"""The columns of tables, as a reader fills them."""

TEXT = frozenset(name for columns in COLUMNS.values() for name, kind in columns.items() if kind == _TEXT)
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Table, (dict(self), self.strings)

    def __getattr__(self, column: str) -> Array:
        try:
            return self[column]
        except KeyError:
            raise AttributeError(f"no column {column!r}; the columns are {', '.join(self)}") from None

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
        return [*(name for name in super().__dir__() if not name.startswith("_")), *self]

    def __repr__(self) -> str:
        return f"<{len(self):,} rows: {', '.join(self)}>"

    @property
    def end_ns(self) -> Array:
        """The ends of the events: start + duration."""
        return self.start_ns + self.duration_ns

    def where(self, rows: Array | slice) -> Table:
        """Return the rows that a mask, an array of row numbers or a slice selects."""
        if isinstance(rows, slice) or np.asarray(rows).dtype != np.int64:  # such as a mask
            rows = np.arange(len(self))[rows]
        return _Selection(self, rows)

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
        columns: dict[str, Any] = dict(self)
        for name in TEXT & columns.keys():
            used, numbers = np.unique(columns[name], return_inverse=True)
            columns[name] = pandas.Categorical.from_codes(numbers, [self.strings[code] for code in used.tolist()])
        return pandas.DataFrame(columns)

    def text(self, column: str) -> list[str]:
        """Return a text column as a list of strings."""
        return [self.strings[code] for code in self[column].tolist()]

    def matching(self, column: str, pattern: Any) -> Array:
        """Return a mask of the rows in whose string in ``column`` the compiled ``pattern`` is found.

        Each string is searched once, and only its first 2,048 characters: some patterns take quadratic time.
        """
        codes = self[column]
        hits = np.bincount(codes, minlength=1) > 0
        for code in np.flatnonzero(hits).tolist():
            hits[code] = pattern.search(self.strings[code][:_SEARCHED]) is not None
        return hits[codes]


class _Selection(Table):
    """Rows of another table: each column is selected when it is first read, as most of the many never are."""

    __slots__ = ("_rows", "_source", "_writeable")

    def __init__(self, source: Table, rows: Array, *, writeable: bool = True) -> None:
        super().__init__({}, source.strings)
        self._source, self._rows, self._writeable = source, rows, writeable

    def __getitem__(self, column: str) -> Array:
        if column not in self._columns:
            values = self._source[column][self._rows]
            values.flags.writeable = self._writeable
            self._columns[column] = values
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._rows)

    def read_only(self) -> Table:
        return _Selection(self._source, self._rows, writeable=False)


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


def linked(column: Array, rows: Array, missing: float = -1) -> Array:
    """Return the values of a column in rows that links such as ``gpu.launch`` name; ``missing`` for -1."""
    return np.append(column, missing)[rows]


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
