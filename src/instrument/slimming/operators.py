"""Chooses the args of operators that stay: shapes of operators with known work, and numbers that link events."""

from __future__ import annotations

import re

import numpy as np

from ..diagnosis.convolution import BACKWARD
from ..diagnosis.matmul import innermost_matmuls
from ..diagnosis.roofline import counted_calls
from ..traces.autograd import autograd_nodes, engine_node_name
from ..traces.main_threads import main_thread
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .parts import Part, part

EXTERNAL = ("External id", "external id")
"""The args that name the operator of GPU work; traces of 2021 have the second."""

_ANYWHERE = re.compile(f"softmax|^{BACKWARD}$")
_SHAPES = ("Input Dims", "Input type")


def kept_operators(trace: Trace, named: Array) -> Part:
    """Return the operators: all stay, as each counts in the table of operators.

    Args:
        trace: the trace.
        named: the external ids of the GPU work that no call of the runtime links to an operator.
    """
    operators = trace.operators
    shapes = _with_shapes(trace)
    args = (
        (EXTERNAL, np.isin(operators.external, named)),
        (_SHAPES, shapes),
        (("Concrete Inputs",), shapes & (operators.scalars > 0)),
        (("Sequence number",), _with_sequence(trace)),
    )
    return part(operators, np.ones(len(operators), bool), args)


def _with_shapes(trace: Trace) -> Array:
    """Return a mask of the operators whose shapes some number depends on.

    Matmuls and the convolutions and softmaxes of attention count wherever they are, others where they launch GPU
    work and no operator inside them counts.
    """
    operators = trace.operators
    found = operators.matching("name", _ANYWHERE)
    found[innermost_matmuls(operators)] = found[counted_calls(trace)] = True
    has = (operators.shapes > 0) | (operators.types > 0)
    found &= has
    if not found.any():  # one shows that shapes were recorded
        found[np.flatnonzero(has)[:1]] = True
    return found


def _with_sequence(trace: Trace) -> Array:
    """Return a mask of the operators whose sequence numbers tell which threads run backward passes, and for whom.

    One number of each kind shows what a thread does; where several threads may wait for a pass, all count.
    """
    operators = trace.operators
    numbered = operators.sequence >= 0
    made = np.unique(autograd_nodes(operators).made.thread)
    if len(np.union1d(made, [main_thread(trace)])) > 2 and trace.regions:
        return numbered
    found = np.zeros(len(operators), bool)
    for rows in _kinds(operators, np.flatnonzero(numbered)):
        found[rows[:1]] = True
    return found


def _kinds(operators: Table, rows: Array) -> list[Array]:
    """Return the rows by thread, and by whether they run or create nodes."""
    made = np.isin(operators.event[rows], autograd_nodes(operators).made.event)
    runs = np.array([engine_node_name(word) is not None for word in operators.strings])[operators.name[rows]]
    key = operators.thread[rows].astype(np.int64) * 4 + made * 2 + runs
    order = np.argsort(key, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1)
