"""Finds backward passes that have no region, since their forward ran before the modules had hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from .autograd import BACKWARD, engine_node_name
from .links import main_thread
from .nest import NestedRanges
from .step_content import StepIndex
from .table import Array, Table
from .trace import Trace

_EVALUATION = " (eval)"
_LAST = np.iinfo(np.int64).max


class MissingBackward:
    """Says which backward regions lack calls in the steps of a trace.

    Torch numbers autograd nodes as the forward makes them. A node in no backward region, with a lower number than
    the first forward region of a module has, may be of a forward of that module before it had hooks. Traces
    without these numbers, as of other profilers than torch's, show no node as missing.
    """

    def __init__(self, trace: Trace, steps: StepIndex) -> None:
        self._words = trace.strings
        self._main = main_thread(trace)
        self._inside: dict[str, set[int]] = defaultdict(set)  # by backward region: the names of nodes in it
        self._outside: dict[int, dict[int, list[int]]] = {}  # by step and name: the numbers of nodes in no region
        nodes, forward = _autograd(trace)
        within = steps.rows_at(nodes.start_ns, nodes.thread)
        outside = ~self._in_regions(nodes, trace.regions) & (within >= 0)
        # Threads number their nodes apart: one that another thread made is not compared.
        outside &= ~np.isin(nodes.sequence, forward.sequence[forward.thread != self._main])
        columns = (column[outside].tolist() for column in (within, nodes.name, nodes.sequence))
        for step, name, number in zip(*columns, strict=True):
            self._outside.setdefault(step, {}).setdefault(name, []).append(number)
        self._first = self._first_numbers(forward.where(forward.thread == self._main), trace.regions)

    def lacks(self, region: str, calls: Mapping[int, int]) -> bool:
        """Tell whether ``region`` lacks calls in a step, of which ``calls`` has the number in each.

        It does where nodes of its kind are missing in a step that has fewer of its calls than any other step
        which has some. A kind that runs in no region later on, too, is not missing: functions have none.
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
        """Note the names of nodes in each backward region, and return a mask of the nodes that are in one."""
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
        """The lowest number of a node in the forwards of each backward region; under "", that of any forward."""
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
    """Return the autograd nodes that ran, and the operators of forwards that made nodes."""
    operators = trace.operators.where(trace.operators.sequence >= 0)
    engine = {word: node for word in trace.strings if (node := engine_node_name(word))}
    is_node, is_engine = (
        np.isin(operators.name, [code for code, word in enumerate(trace.strings) if word in strings])
        for strings in (set(engine.values()), engine)
    )
    return operators.where(is_node), operators.where(~is_node & ~is_engine)
