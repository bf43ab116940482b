"""Rows selected from a table, and sets of integers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.tables.lanes import distinct_places, distinct_values, is_among
from instrument.read.tables.table import Array, Table

Numbers = list[int]
_NUMBERS = st.lists(st.integers(-9, 9) | st.sampled_from((-(2**63), 2**63 - 1)))


def four() -> Table:
    """Return four rows of two columns."""
    return Table({"start_ns": np.arange(4), "name": np.array([3, 1, 0, 2], np.int32)}, ["", "a", "b", "c"])


@pytest.mark.parametrize(
    "rows",
    [np.array([True, False, True, True]), np.array([3, 0, 0]), np.array([-1], np.int32), slice(1, 3), slice(None)],
)
def test_where(rows: Array | slice) -> None:
    """Each column has the rows that numpy selects, also in a selection from a selection."""
    table = four()
    chosen = table.where(rows)
    expected = {name: column[rows].tolist() for name, column in table.items()}
    assert {name: column.tolist() for name, column in chosen.items()} == expected
    assert len(chosen) == len(expected["name"])
    assert chosen.text("name") == [table.strings[code] for code in expected["name"]]
    assert chosen.where(np.array([0])).name.tolist() == expected["name"][:1]


def test_selected_rows_are_a_copy() -> None:
    """A write to selected rows does not reach the table; rows that are read only refuse it, also once copied."""
    table = four()
    chosen = table.where(np.array([0, 1]))
    chosen.name[:] = 0
    assert (chosen.name.tolist(), table.name.tolist()) == ([0, 0], [3, 1, 0, 2])
    with pytest.raises(ValueError, match="read-only"):
        table.where(np.array([0])).read_only().name[:] = 0
    assert pickle.loads(pickle.dumps(chosen)).name.tolist() == [0, 0]


def test_wrong_rows() -> None:
    """A mask of another length and a column that does not exist are errors."""
    with pytest.raises(IndexError):
        four().where(np.array([True]))
    with pytest.raises(AttributeError, match="no column 'nam'; the columns are start_ns, name"):
        _ = four().where(np.array([0])).nam


@given(_NUMBERS, _NUMBERS)
def test_sets(one: Numbers, other: Numbers) -> None:
    """Distinct values are in ascending order; membership is that of sets."""
    values, others = np.array(one, np.int64), np.array(other, np.int64)
    assert distinct_values(values).tolist() == sorted(set(one))
    assert is_among(values, others).tolist() == [value in set(other) for value in one]


@given(values=_NUMBERS | st.lists(st.integers(2**63 - 9, 2**63 - 1)), kind=st.sampled_from(("i4", "i8")))
def test_distinct_places(values: Numbers, kind: str) -> None:
    """They are those of `numpy.unique`, for integers close together and for others."""
    column = np.array(values, np.int64).astype(kind)
    expected, places = np.unique(column, return_inverse=True)
    found = distinct_places(column)
    assert (found[0].tolist(), found[1].tolist()) == (expected.tolist(), places.tolist())
