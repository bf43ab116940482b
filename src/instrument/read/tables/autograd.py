"""Autograd in a trace: its nodes and threads, who waits for a backward pass, and passes without a region.

On a GPU, a backward pass runs on an autograd thread, one per device, while the thread that called ``backward()``
waits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...base.numbered_names import BACKWARD
from .lanes import LaneAxis, is_among, pairs
from .nest import NestedRanges
from .steps import StepIndex, main_thread
from .table import Array, Table
from .trace import Thread, Trace

OWN_NAME = re.compile(r"\bpt_autograd_\d")
"""The names that torch gives autograd threads."""

_ENGINE = "autograd::engine::evaluate_function"  # the operator around each node
_IS_ENGINE = re.compile(f"^{_ENGINE}")
_IN_BACKWARD = re.compile(rf"{re.escape(BACKWARD)}$")
_NAMED_BACKWARD = re.compile("backward", re.IGNORECASE)
_MAX_THREADS = 64  # training threads of a process
_CHUNK_ROWS = 1 << 15  # times that are processed at once


class AutogradNodes(NamedTuple):
    """The autograd nodes of a trace.

    Attributes:
        run: the nodes that backward passes ran, one row each, with their sequence numbers.
        made: the operators of forward passes that created a node, with the sequence number of the node.
    """

    run: Table
    made: Table


def engine_node_name(name: str) -> str | None:
    """Return the node that an operator of the autograd engine runs, by its name; None for other operators."""
    engine, runs, node = name.partition(": ")
    return node if runs and engine == _ENGINE else None


def autograd_nodes(operators: Table) -> AutogradNodes:
    """Return the nodes that ran, and the operators outside backward passes that created nodes."""
    engine = operators.matching("name", _IS_ENGINE)
    run = operators.where(engine)
    made = operators.where((operators.sequence >= 0) & ~engine)
    if run:  # a node may create nodes: checkpointing runs the forward again
        made = made.where(
            NestedRanges(run.start_ns, run.end_ns, run.thread).innermost_at(made.start_ns, made.thread) < 0
        )
    return AutogradNodes(run, made)


def autograd_threads(threads: Sequence[Thread], regions: Table, nodes: AutogradNodes, stepping: Array) -> Array:
    """Return a mask of the autograd threads, with one more element for thread -1.

    An autograd thread has torch's name for it, or runs nodes and creates none; in a trace without nodes, all its
    outermost regions are backward passes.

    Args:
        threads: the threads of the trace.
        regions: the regions of the trace, with parents on the same thread.
        nodes: the nodes of the trace.
        stepping: the threads of the steps, which are never autograd threads.
    """
    named = np.array([*(bool(OWN_NAME.search(thread.name)) for thread in threads), False])
    runs, makes, odd, backward = (np.zeros(len(named), bool) for _ in range(4))
    runs[nodes.run.thread[nodes.run.sequence >= 0]] = True
    makes[nodes.made.thread] = True
    outermost = regions.parent < 0
    in_backward = regions.matching("name", _IN_BACKWARD)
    backward[regions.thread[outermost & in_backward]] = True
    odd[regions.thread[outermost & ~in_backward]] = True
    autograd: Array = named | (runs & ~makes) | (backward & ~odd & ~makes)
    autograd[stepping] = autograd[-1] = False
    return autograd


class BackwardCallers:
    """Finds the thread that waits for the backward pass on an autograd thread.

    Candidates are the training threads of the process: the thread of the steps, and threads that created nodes.
    The caller is the candidate that has a region open at the time. If several have, it is the only one in a region
    named after the backward pass, or the only one that created a node with the sequence number of the running
    node.

    Args:
        regions: the regions of the trace.
        nodes: the nodes of the trace.
        autograd: a mask of the autograd threads, from `autograd_threads`.
        main: the thread of the steps of each process; the last element is for no process.
        process_of: the process of each thread; the last element is for thread -1.
    """

    def __init__(
        self, regions: Table, nodes: AutogradNodes, autograd: Array, main: Array, process_of: Array
    ) -> None:
        trains = np.zeros(len(process_of), bool)
        trains[nodes.made.thread] = trains[main] = True
        self._is_training_thread = trains & ~autograd
        self._is_training_thread[-1] = False
        self._nodes, self._process_of = nodes, process_of
        rows = regions.where(self._is_training_thread[regions.thread] & (regions.parent < 0))
        process = process_of[rows.thread]
        self._lanes = LaneAxis(int(process_of.max(initial=-1)), rows.start_ns, rows.end_ns)
        self._starts, self._ends = (
            np.sort(self._lanes.positions(process, times)) for times in (rows.start_ns, rows.end_ns)
        )
        self._nest = NestedRanges(rows.start_ns, rows.end_ns, process)
        self._outermost, self._backward = rows, regions.where(regions.matching("name", _NAMED_BACKWARD))

    def find(self, times_ns: Array, threads: Array) -> tuple[Array, Array]:
        """Return the thread that waits for each autograd thread at each time or -1, and a mask of unclear cases.

        Args:
            times_ns: the times.
            threads: the autograd threads, one per time.
        """
        process = self._process_of[threads]
        places = self._lanes.positions(process, times_ns)
        opened, closed = (np.searchsorted(edges, places, "right") for edges in (self._starts, self._ends))
        caller = np.full(len(times_ns), -1)
        one = np.flatnonzero(opened - closed == 1)
        caller[one] = self._outermost.thread[self._nest.innermost_at(times_ns[one], process[one])]
        unclear = opened - closed > 1
        if unclear.any():
            caller[unclear] = self._choose(times_ns[unclear], threads[unclear])
        return caller, unclear & (caller < 0)

    def _choose(self, times_ns: Array, threads: Array) -> Array:
        caller = np.full(len(times_ns), -1)
        nests = [
            NestedRanges(each.start_ns, each.end_ns, each.thread) for each in (self._outermost, self._backward)
        ]
        for begin in range(0, len(caller), _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            row, candidate = self._candidates(threads[part])
            times = times_ns[part][row]
            open_, backward = (nest.innermost_at(times, candidate) >= 0 for nest in nests)
            made = self._created_node(times_ns[part], threads[part], row, candidate)
            for sign in (open_, backward, open_ & made):
                alone = sign & (np.bincount(row[sign], minlength=len(caller))[row] == 1)
                undecided = alone & (caller[part][row] < 0)
                caller[part][row[undecided]] = candidate[undecided]
        return caller

    def _candidates(self, threads: Array) -> tuple[Array, Array]:
        """Return pairs of each row and each training thread of its process, unless there are too many."""
        trains = np.flatnonzero(self._is_training_thread)
        trains = trains[np.argsort(self._process_of[trains], kind="stable")]
        process = self._process_of[threads]
        first, after = (np.searchsorted(self._process_of[trains], process, side) for side in ("left", "right"))
        row, place = pairs(first, np.where(after - first <= _MAX_THREADS, after, first))
        return row, trains[place]

    def _created_node(self, times_ns: Array, threads: Array, row: Array, candidate: Array) -> Array:
        """Return whether each candidate created a node with the sequence number of the running node."""
        run, made = self._nodes
        if not run or not made:
            return np.zeros(len(row), bool)
        node = NestedRanges(run.start_ns, run.end_ns, run.thread).innermost_at(times_ns, threads)
        numbers, place = np.unique(made.sequence, return_inverse=True)
        wanted = np.where(node >= 0, run.sequence[node], -1)[row]
        nearest = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        created = np.isin(candidate * len(numbers) + nearest, made.thread.astype(np.int64) * len(numbers) + place)
        created &= numbers[nearest] == wanted
        return created


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
        outside &= ~is_among(nodes.sequence, forward.sequence[forward.thread != self._main])
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
            name for nodes in self._outside.values() for name, numbers in nodes.items() if max(numbers) >= first
        }
        lacking = [
            step
            for step, nodes in self._outside.items()
            if any(min(numbers) < first for name, numbers in nodes.items() if name in names - later)
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
