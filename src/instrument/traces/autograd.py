"""Finds the threads on which autograd runs backward passes, and the threads that wait for them.

On a GPU a backward pass runs on a thread of autograd's own, one for each device, while the thread that called
``backward()`` waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .lanes import Lanes, by_lane
from .nest import Nest
from .table import Array, Table
from .trace import Thread

BACKWARD = " (backward)"
"""What `instrument.annotate_modules` adds to the name of a module, for its backward."""

_NAME = re.compile(r"\bpt_autograd_\d")
_ENGINE = re.compile(r"^autograd::engine::evaluate_function")  # around each node
_IN_BACKWARD = re.compile(rf"{re.escape(BACKWARD)}$|^autograd::engine::evaluate_function")
_NAMED_SO = re.compile("backward", re.IGNORECASE)
_MOST = 64  # threads of a process that train at once and are told apart


class Nodes(NamedTuple):
    """The operators of autograd.

    Attributes:
        run: one row for each node that a backward pass ran, with its sequence number.
        made: one row for each operator of a forward pass that made a node; the node has the same number.
    """

    run: Table
    made: Table


def autograd_nodes(operators: Table) -> Nodes:
    """Return the nodes that ran, and the operators outside of backward passes that made some."""
    engine = operators.matching("name", _ENGINE)
    run = operators.where(engine)
    made = operators.where((operators.sequence >= 0) & ~engine)
    if run:  # a node may itself make nodes: checkpointing runs the forward again
        made = made.where(Nest(run.start_ns, run.end_ns, run.thread).at(made.start_ns, made.thread) < 0)
    return Nodes(run, made)


def autograd_threads(threads: Sequence[Thread], regions: Table, nodes: Nodes, stepping: Array) -> Array:
    """Return which threads are autograd's own, as a mask with one more element for thread -1.

    They have its name, or run nodes and make none; where the trace has no nodes, all regions on them that are in
    no other are backwards.

    Args:
        threads: of the trace.
        regions: of the trace, with their parents on the same thread.
        nodes: of the trace.
        stepping: the threads of the steps, which are never autograd's.
    """
    named = np.array([*(bool(_NAME.search(thread.name)) for thread in threads), False])
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


class Callers:
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

    def __init__(self, regions: Table, nodes: Nodes, autograd: Array, main: Array, process_of: Array) -> None:
        trains = np.zeros(len(process_of), bool)
        trains[nodes.made.thread] = trains[main] = True
        self._trains = trains & ~autograd
        self._trains[-1] = False
        self._regions, self._nodes, self._process_of = regions, nodes, process_of
        self._backward = regions.where(regions.matching("name", _NAMED_SO))
        rows = regions.where(self._trains[regions.thread] & (regions.parent < 0))
        process = process_of[rows.thread]
        self._lanes = Lanes(int(process_of.max(initial=-1)), rows.start_ns, rows.end_ns)
        self._starts, self._ends = (
            np.sort(self._lanes.places(process, times)) for times in (rows.start_ns, rows.end_ns)
        )
        self._outermost = Nest(rows.start_ns, rows.end_ns, process)
        self._thread = rows.thread

    def of(self, times_ns: Array, threads: Array) -> tuple[Array, Array]:
        """Return the thread that waits for each thread of autograd at each time, or -1, and where it is unclear.

        Args:
            times_ns: when.
            threads: of autograd, as many.
        """
        process = self._process_of[threads]
        places = self._lanes.places(process, times_ns)
        opened, closed = (np.searchsorted(edges, places, "right") for edges in (self._starts, self._ends))
        found = np.full(len(times_ns), -1)
        one = np.flatnonzero(opened - closed == 1)
        found[one] = self._thread[self._outermost.at(times_ns[one], process[one])]
        unclear = opened - closed > 1
        several = np.flatnonzero(unclear)
        found[several] = self._of_several(times_ns[several], threads[several])
        return found, unclear & (found < 0)

    def _of_several(self, times_ns: Array, threads: Array) -> Array:
        found = np.full(len(times_ns), -1)
        for process, rows in by_lane(self._process_of[threads]):
            candidates = np.flatnonzero(self._trains & (self._process_of == process))
            if len(candidates) > _MOST:
                continue
            times = times_ns[rows]
            open_, backward = (self._open(ranges, times, candidates) for ranges in (self._regions, self._backward))
            for signs in (open_, backward, open_ & self._made(times, threads[rows], candidates)):
                clear = (found[rows] < 0) & (signs.sum(axis=0) == 1)
                found[rows[clear]] = candidates[signs[:, clear].argmax(axis=0)]
        return found

    def _open(self, ranges: Table, times_ns: Array, candidates: Array) -> Array:
        """For each candidate a row that says at which times it has one of the ranges open."""
        nest = Nest(ranges.start_ns, ranges.end_ns, ranges.thread)
        return np.stack([nest.at(times_ns, np.full(len(times_ns), thread)) >= 0 for thread in candidates])

    def _made(self, times_ns: Array, threads: Array, candidates: Array) -> Array:
        """For each candidate a row that says where it made a node with the number of the one that runs."""
        run, made = self._nodes
        row = Nest(run.start_ns, run.end_ns, run.thread).at(times_ns, threads)
        number = np.where(row >= 0, run.sequence[row] if len(run) else -1, -1)
        return np.stack([np.isin(number, made.sequence[made.thread == thread]) for thread in candidates])
