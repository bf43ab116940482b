"""Finds backward passes without a region, because their forward ran before the modules had hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from .autograd import BACKWARD, engine_node_name
from .main_threads import main_thread
from .nest import NestedRanges
from .step_content import StepIndex
from .table import Array, Table
from .trace import Trace

_EVALUATION = " (eval)"
_LAST = np.iinfo(np.int64).max


class MissingBackward:
    """Detects backward regions that lack calls in the steps of a trace.

    Torch numbers autograd nodes in the order in which the forward creates them. A node outside backward regions
    with a lower number than the first forward region of a module may come from a forward before the module had
    hooks. In traces without these numbers, as of other profilers, no calls are detected as missing.
    """

    def __init__(self, trace: Trace, steps: StepIndex) -> None:
        self._words = trace.strings
        self._main = main_thread(trace)
        self._inside: dict[str, set[int]] = defaultdict(set)  # by backward region: the names of its nodes
        self._outside: dict[int, dict[int, list[int]]] = {}  # by step and name: nodes outside regions
        nodes, forward = _autograd(trace)
        within = steps.rows_at(nodes.start_ns, nodes.thread)
        outside = ~self._in_regions(nodes, trace.regions) & (within >= 0)
        # Each thread numbers its nodes on its own: nodes of other threads are not compared.
        outside &= ~np.isin(nodes.sequence, forward.sequence[forward.thread != self._main])
        columns = (column[outside].tolist() for column in (within, nodes.name, nodes.sequence))
        for step, name, number in zip(*columns, strict=True):
            self._outside.setdefault(step, {}).setdefault(name, []).append(number)
        self._first = self._first_numbers(forward.where(forward.thread == self._main), trace.regions)

    def lacks(self, region: str, calls: Mapping[int, int]) -> bool:
        """Return whether a region lacks calls in a step.

        That is so if nodes of its kind run outside regions in a step that has fewer calls than every other
        step. Kinds of nodes that run outside regions later as well come from functions, and are not missing.

        Args:
            region: the name of the region.
            calls: the number of its calls in each step.
        """
        if not region.endswith(BACKWARD):
            return False
        names, first = self._inside[region], self._first.get(region, self._first[""])
        later = {
            name for found in self._outside.values() for name, numbers in found.items() if max(numbers) >= first
        }
        lacking = [
            step
            for step, found in self._outside.items()
            if any(min(numbers) < first for name, numbers in found.items() if name in names - later)
        ]
        others = [count for step, count in calls.items() if step not in lacking]
        return bool(others) and any(calls.get(step, 0) < min(others) for step in lacking)

    def _in_regions(self, nodes: Table, regions: Table) -> Array:
        """Collect the names of the nodes in each backward region; return a mask of the nodes inside regions."""
        regions = regions.where(np.array([name.endswith(BACKWARD) for name in regions.text("name")], bool))
        nest = NestedRanges(regions.start_ns, regions.end_ns, regions.thread)
        at = nest.innermost_at(nodes.start_ns, nodes.thread)
        shown: Array = at >= 0
        rows = np.flatnonzero(shown)
        while len(rows):
            pairs = np.stack((regions.name[at[rows]], nodes.name[rows]), 1)
            for region, name in np.unique(pairs, axis=0).tolist():
                self._inside[self._words[region]].add(name)
            at[rows] = nest.parents[at[rows]]
            rows = rows[at[rows] >= 0]
        return shown

    def _first_numbers(self, forward: Table, regions: Table) -> dict[str, int]:
        """Return the lowest node number of the forwards of each backward region and, under "", of all forwards."""
        regions = regions.where(regions.thread == self._main)
        names, rows = np.unique(regions.name, return_index=True)
        ahead = np.searchsorted(forward.start_ns, regions.start_ns[rows])
        numbers = [*forward.sequence.tolist(), _LAST]
        first = {"": numbers[0]}
        for name, number in zip(names.tolist(), ahead.tolist(), strict=True):
            backward = self._words[name].removesuffix(_EVALUATION) + BACKWARD
            first[backward] = min(numbers[number], first.get(backward, _LAST))
        return first


def _autograd(trace: Trace) -> tuple[Table, Table]:
    """Return the autograd nodes that ran, and the operators of forwards that created nodes."""
    operators = trace.operators.where(trace.operators.sequence >= 0)
    engine = {word: node for word in trace.strings if (node := engine_node_name(word))}
    is_node, is_engine = (
        np.isin(operators.name, [code for code, word in enumerate(trace.strings) if word in strings])
        for strings in (set(engine.values()), engine)
    )
    return operators.where(is_node), operators.where(~is_node & ~is_engine)
