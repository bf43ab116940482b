"""Finds the ranges of backward passes, and the region or module of the forward pass that each node belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .autograd import engine_node_name
from .lanes import latest
from .nest import ancestor_levels, inside_rows
from .ranges import OPERATOR, REGION, Ranges
from .table import Array
from .trace_data import TraceData

_BACKWARD = re.compile(r"(?<![a-z])backward(?![a-z])", re.IGNORECASE)
_NODE = re.compile(r"(?:Backward\d*|AccumulateGrad)$")  # without the engine around it: torch before 1.9
_SEARCHED = 2048  # characters of a name


class BackwardRanges:
    """The backward passes among ranges.

    Args:
        trace: the trace.
        ranges: its ranges.

    Attributes:
        autograd: a mask of the autograd threads; the last element is for thread -1.
        in_node: a mask of the nodes that autograd runs, and of the ranges inside them.
    """

    def __init__(self, trace: TraceData, ranges: Ranges) -> None:
        self._trace, self._ranges, self._above = trace, ranges, ranges.nest.parents
        self.autograd = np.array([*(thread.autograd for thread in trace.threads), False])
        operators = ranges.kind == OPERATOR
        engine = operators & self._named(lambda name: engine_node_name(name) is not None)
        alone = operators & self._named(lambda name: bool(_NODE.search(name[-_SEARCHED:])))
        alone &= ~inside_rows(np.flatnonzero(engine), self._above)
        self._node = engine | alone
        self.in_node = inside_rows(np.flatnonzero(self._node), self._above)

    @property
    def mask(self) -> Array:
        """The ranges on autograd threads, inside nodes of autograd, and inside regions named "backward"."""
        regions = self._ranges.kind == REGION
        named = regions & self._named(lambda name: bool(_BACKWARD.search(name[:_SEARCHED])))
        inside = inside_rows(np.flatnonzero(named), self._above)
        mask: Array = inside | self.in_node | self.autograd[self._ranges.thread]
        return mask

    @property
    def parents(self) -> Array:
        """The range above each range: the one around it on its thread.

        For a node of autograd, it is the region or module of the operator that created the node, if the sequence
        numbers of a single thread tell it.
        """
        nodes, made = self._nodes()
        parents: Array = self._above.copy()
        unknown = np.ones(len(nodes), bool)
        for which, above in ancestor_levels(made, self._above):
            found = unknown[which] & (self._ranges.kind[above] != OPERATOR)
            parents[nodes[which[found]]] = above[found]
            unknown[which[found]] = False
        return parents

    def _nodes(self) -> tuple[Array, Array]:
        """Return the nodes that ran, and the operator that created each, or -1.

        Operators that create no node have the sequence number of the next node, so that the last operator with
        the number creates it.
        """
        ranges, operators = self._ranges, np.flatnonzero(self._ranges.kind == OPERATOR)
        sequence = np.full(len(ranges.kind), -1)
        sequence[operators] = self._trace.operators.sequence[ranges.row[operators]]
        nodes = np.flatnonzero(self._node & (sequence >= 0))
        makers = np.flatnonzero((sequence >= 0) & ~self.in_node & ~self.autograd[ranges.thread])
        numbers, of = np.unique(sequence[makers], return_inverse=True)
        of = of.reshape(-1)
        lowest, highest = np.full(len(numbers), len(self.autograd)), np.full(len(numbers), -1)
        np.minimum.at(lowest, of, ranges.thread[makers])
        np.maximum.at(highest, of, ranges.thread[makers])
        one = np.flatnonzero(np.isin(sequence[nodes], numbers[lowest == highest]))  # numbers are per thread
        wanted = np.searchsorted(numbers, sequence[nodes[one]])
        last = latest(of, ranges.start_ns[makers], wanted, ranges.start_ns[nodes[one]])
        made = np.full(len(nodes), -1)
        made[one] = np.append(makers, -1)[last]
        return nodes, made

    def _named(self, condition: Callable[[str], bool]) -> Array:
        """Return a mask of the ranges whose name meets a condition."""
        strings = self._trace.strings
        codes = np.unique(self._ranges.name)
        meets = np.array([condition(strings[code]) for code in codes.tolist()], bool)
        mask: Array = np.isin(self._ranges.name, codes[meets])
        return mask
