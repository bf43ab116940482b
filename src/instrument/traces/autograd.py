"""Finds the threads on which autograd runs backward passes, and the threads that wait for these passes.

On a GPU, a backward pass runs on an autograd thread, one per device, while the thread that called ``backward()``
waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .lanes import LaneAxis
from .nest import NestedRanges
from .table import Array, Table
from .trace_data import Thread

BACKWARD = " (backward)"
"""The suffix of the regions of backward passes, as `instrument.annotate_modules` names them."""

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
    found: Array = named | (runs & ~makes) | (backward & ~odd & ~makes)
    found[stepping] = found[-1] = False
    return found


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
        found = np.full(len(times_ns), -1)
        one = np.flatnonzero(opened - closed == 1)
        found[one] = self._outermost.thread[self._nest.innermost_at(times_ns[one], process[one])]
        unclear = opened - closed > 1
        if unclear.any():
            found[unclear] = self._choose(times_ns[unclear], threads[unclear])
        return found, unclear & (found < 0)

    def _choose(self, times_ns: Array, threads: Array) -> Array:
        found = np.full(len(times_ns), -1)
        nests = [
            NestedRanges(each.start_ns, each.end_ns, each.thread) for each in (self._outermost, self._backward)
        ]
        for begin in range(0, len(found), _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            row, candidate = self._candidates(threads[part])
            times = times_ns[part][row]
            open_, backward = (nest.innermost_at(times, candidate) >= 0 for nest in nests)
            made = self._created_node(times_ns[part], threads[part], row, candidate)
            for sign in (open_, backward, open_ & made):
                alone = sign & (np.bincount(row[sign], minlength=len(found))[row] == 1)
                undecided = alone & (found[part][row] < 0)
                found[part][row[undecided]] = candidate[undecided]
        return found

    def _candidates(self, threads: Array) -> tuple[Array, Array]:
        """Return pairs of each row and each training thread of its process, unless there are too many."""
        trains = np.flatnonzero(self._is_training_thread)
        trains = trains[np.argsort(self._process_of[trains], kind="stable")]
        process = self._process_of[threads]
        first, after = (np.searchsorted(self._process_of[trains], process, side) for side in ("left", "right"))
        count = np.where(after - first <= _MAX_THREADS, after - first, 0)
        row = np.repeat(np.arange(len(threads)), count)
        return row, trains[np.arange(len(row)) + np.repeat(first - (np.cumsum(count) - count), count)]

    def _created_node(self, times_ns: Array, threads: Array, row: Array, candidate: Array) -> Array:
        """Return whether each candidate created a node with the sequence number of the running node."""
        run, made = self._nodes
        if not run or not made:
            return np.zeros(len(row), bool)
        node = NestedRanges(run.start_ns, run.end_ns, run.thread).innermost_at(times_ns, threads)
        numbers, place = np.unique(made.sequence, return_inverse=True)
        wanted = np.where(node >= 0, run.sequence[node], -1)[row]
        found = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        known = np.isin(candidate * len(numbers) + found, made.thread.astype(np.int64) * len(numbers) + place)
        known &= numbers[found] == wanted
        return known
