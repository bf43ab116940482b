"""Finds the threads on which autograd runs backward passes, and the threads that wait for them.

On a GPU a backward pass runs on a thread of autograd's own, one for each device, while the thread that called
``backward()`` waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .lanes import LaneAxis
from .nest import NestedRanges
from .table import Array, Table
from .trace import Thread

BACKWARD = " (backward)"
"""What `instrument.annotate_modules` adds to the name of a module, for its backward."""

OWN_NAME = re.compile(r"\bpt_autograd_\d")
"""How torch names them."""

_ENGINE = "autograd::engine::evaluate_function"  # around each node
_IS_ENGINE = re.compile(f"^{_ENGINE}")
_IN_BACKWARD = re.compile(rf"{re.escape(BACKWARD)}$|^{_ENGINE}")
_NUMBERS = re.compile(", (?:seq|op_id) = ")  # which torch appends for NVTX
_NAMED_SO = re.compile("backward", re.IGNORECASE)
_MOST = 64  # threads of a process that train at once and are told apart
_AT_ONCE = 1 << 15  # times that are looked at together, each with so many threads


class AutogradNodes(NamedTuple):
    """The operators of autograd.

    Attributes:
        run: one row for each node that a backward pass ran, with its sequence number.
        made: one row for each operator of a forward pass that made a node; the node has the same number.
    """

    run: Table
    made: Table


def engine_node_name(name: str) -> str | None:
    """Return the name of the node that the engine's operator of this name runs; None for any other operator."""
    engine, runs, node = name.partition(": ")
    return _NUMBERS.split(node, maxsplit=1)[0] if runs and engine == _ENGINE else None


def autograd_nodes(operators: Table) -> AutogradNodes:
    """Return the nodes that ran, and the operators outside of backward passes that made some."""
    engine = operators.matching("name", _IS_ENGINE)
    run = operators.where(engine)
    made = operators.where((operators.sequence >= 0) & ~engine)
    if run:  # a node may itself make nodes: checkpointing runs the forward again
        made = made.where(
            NestedRanges(run.start_ns, run.end_ns, run.thread).innermost_at(made.start_ns, made.thread) < 0
        )
    return AutogradNodes(run, made)


def autograd_threads(threads: Sequence[Thread], regions: Table, nodes: AutogradNodes, stepping: Array) -> Array:
    """Return which threads are autograd's own, as a mask with one more element for thread -1.

    They have its name, or run nodes and make none; where the trace has no nodes, all regions on them that are in
    no other are backwards.

    Args:
        threads: of the trace.
        regions: of the trace, with their parents on the same thread.
        nodes: of the trace.
        stepping: the threads of the steps, which are never autograd's.
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
    """Tells which thread waits at a time for the backward pass that a thread of autograd runs.

    It is the one of the process that has a region open then, of those that train: the thread of the steps, and
    those that made nodes. Where several have, one of them is chosen if it alone is in a region named after the
    backward pass, or made a node with the sequence number of that which runs.

    Args:
        regions: of the trace.
        nodes: of the trace.
        autograd: which threads are autograd's, as `autograd_threads` returns it.
        main: of each process, the thread of its steps; the last is for no process.
        process_of: the process of each thread; the last is for thread -1.
    """

    def __init__(
        self, regions: Table, nodes: AutogradNodes, autograd: Array, main: Array, process_of: Array
    ) -> None:
        trains = np.zeros(len(process_of), bool)
        trains[nodes.made.thread] = trains[main] = True
        self._trains = trains & ~autograd
        self._trains[-1] = False
        self._nodes, self._process_of = nodes, process_of
        rows = regions.where(self._trains[regions.thread] & (regions.parent < 0))
        process = process_of[rows.thread]
        self._lanes = LaneAxis(int(process_of.max(initial=-1)), rows.start_ns, rows.end_ns)
        self._starts, self._ends = (
            np.sort(self._lanes.positions(process, times)) for times in (rows.start_ns, rows.end_ns)
        )
        self._nest = NestedRanges(rows.start_ns, rows.end_ns, process)
        self._outermost, self._backward = rows, regions.where(regions.matching("name", _NAMED_SO))

    def find(self, times_ns: Array, threads: Array) -> tuple[Array, Array]:
        """Return the thread that waits for each thread of autograd at each time, or -1, and where it is unclear.

        Args:
            times_ns: when.
            threads: of autograd, as many.
        """
        process = self._process_of[threads]
        places = self._lanes.positions(process, times_ns)
        opened, closed = (np.searchsorted(edges, places, "right") for edges in (self._starts, self._ends))
        found = np.full(len(times_ns), -1)
        one = np.flatnonzero(opened - closed == 1)
        found[one] = self._outermost.thread[self._nest.innermost_at(times_ns[one], process[one])]
        unclear = opened - closed > 1
        if unclear.any():
            found[unclear] = self._of_several(times_ns[unclear], threads[unclear])
        return found, unclear & (found < 0)

    def _of_several(self, times_ns: Array, threads: Array) -> Array:
        found = np.full(len(times_ns), -1)
        nests = [
            NestedRanges(each.start_ns, each.end_ns, each.thread) for each in (self._outermost, self._backward)
        ]
        for begin in range(0, len(found), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            row, candidate = self._candidates(threads[part])
            times = times_ns[part][row]
            open_, backward = (nest.innermost_at(times, candidate) >= 0 for nest in nests)
            made = self._made(times_ns[part], threads[part], row, candidate)
            for sign in (open_, backward, open_ & made):
                alone = sign & (np.bincount(row[sign], minlength=len(found))[row] == 1)
                undecided = alone & (found[part][row] < 0)
                found[part][row[undecided]] = candidate[undecided]
        return found

    def _candidates(self, threads: Array) -> tuple[Array, Array]:
        """Each row with each thread that trains in the process of its thread, unless there are too many."""
        trains = np.flatnonzero(self._trains)
        trains = trains[np.argsort(self._process_of[trains], kind="stable")]
        process = self._process_of[threads]
        first, after = (np.searchsorted(self._process_of[trains], process, side) for side in ("left", "right"))
        count = np.where(after - first <= _MOST, after - first, 0)
        row = np.repeat(np.arange(len(threads)), count)
        return row, trains[np.arange(len(row)) + np.repeat(first - (np.cumsum(count) - count), count)]

    def _made(self, times_ns: Array, threads: Array, row: Array, candidate: Array) -> Array:
        """Whether each candidate made a node with the number of that which runs."""
        run, made = self._nodes
        if not run or not made:
            return np.zeros(len(row), bool)
        node = NestedRanges(run.start_ns, run.end_ns, run.thread).innermost_at(times_ns, threads)
        numbers, place = np.unique(made.sequence, return_inverse=True)
        wanted = np.where(node >= 0, run.sequence[node], -1)[row]
        there = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        known = np.isin(candidate * len(numbers) + there, made.thread.astype(np.int64) * len(numbers) + place)
        known &= numbers[there] == wanted
        return known
