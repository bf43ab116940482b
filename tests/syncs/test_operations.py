"""The table of operations has a row for each operation that a detector reports, and no others."""

from __future__ import annotations

import builtins
import pickle
from collections import Counter
from typing import Any

import numpy
import pytest
import torch

from instrument.explain.waits import operations
from instrument.explain.waits.operations import KERNELS, OPERATIONS, operation, public_name
from instrument.syncs import calls, monitor
from instrument.syncs.dryrun import rules

PUBLIC = (
    torch, torch.Tensor, torch.cuda, torch.linalg, torch.nn.functional, torch.nn.utils, torch.distributed,
    torch.nested, builtins, numpy, pickle,
)  # fmt: skip
# Operators that the dry run reports as another operation or as the calling function
INNER = {"ones", "max", "_unsafe_index", "_unsafe_index_put", "_foreach_copy_"}


def test_names_are_unique() -> None:
    """Each name, spelling and operator belongs to one row."""
    names = Counter(name for row in OPERATIONS for name in (row.name, *row.spellings))
    assert [] == [name for name, rows in names.items() if rows > 1]
    for column in ("operators", "kernels"):
        names = Counter(name for row in OPERATIONS for name in getattr(row, column))
        assert [] == [name for name, rows in names.items() if rows > 1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_have_rows(kernel: str) -> None:
    """The name under which a dry run or a trace reports a kernel leads to the row that lists it."""
    for name in (operations.name_of_operator(kernel), public_name(kernel)):
        row = operation(name)
        assert row is not None, name
        assert kernel in row.kernels


def test_checked_operators_have_rows() -> None:
    """Operators that the dry run checks have a row, except those that only other operators call."""
    assert INNER == {name for name in rules.CHECKS if operation(operations.name_of_operator(name)) is None}
    assert not set(KERNELS) & set(rules.CHECKS)
    assert rules.KERNELS is KERNELS


def test_wrapped_calls_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that live detection wraps, except torch's internal ones, has a row."""
    monkeypatch.setattr(monitor, "Patch", lambda owner, name, make: name)
    no_recorder: Any = None  # the patches are only named here
    named = {name for name in map(str, monitor.patches(no_recorder)) if not name.startswith("_")}
    assert {"synchronize", "empty_cache", "to", "cuda", "cpu", "copy_"} <= named
    assert [] == [name for name in named if operation(name) is None]


def test_instructions_have_rows() -> None:
    """Instructions that read one tensor's value have a row; the others are operators."""
    reported = {op for _, op in calls.INSTRUCTIONS}
    assert {"delitem", "iter", "neg", "invert"} == {op for op in reported if operation(op) is None}


def test_columns() -> None:
    """Each row has a cause and a fix; a trace shows values as `item` and copies as `to`."""
    for row in OPERATIONS:
        assert row.traced_as in ("", "item", "to"), row
        assert row.cause, row
        assert row.fix.text, row


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_rows_are_reachable(row: operations.Operation) -> None:
    """Each row belongs to a public function or method, an instruction, an operator or a kernel."""
    assert operation(row.name) is row
    public = any(hasattr(owner, name) for owner in PUBLIC for name in (row.name, f"__{row.name}__"))
    done = row.name in {op for _, op in calls.INSTRUCTIONS} | set(calls.OPERATORS.values())
    assert public or done or row.typical or row.operators or row.kernels or row.name in ("free", "pickle"), row
    for name in row.spellings:
        assert operation(name) is row
    for name in row.operators:
        assert operations.name_of_operator(name) == row.name
