"""The flame graph: regions, modules and operators by nesting, with their CPU time and their GPU work."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..page.names import shown_name
from ..page.tree import Tree, packed_tree, tree_of
from .backward_ranges import BackwardRanges
from .main_threads import main_thread
from .nest import ancestor_levels
from .ranges import MODULE, OPERATOR, REGION, Ranges, own_ns, ranges_of, times_of_steps
from .table import Array, Table
from .trace_data import MODULE_PREFIX, TraceData
from .work_classes import CLASSES, work_classes, work_names

_KINDS = ("region", "module", "operator", "thread", *CLASSES)
_THREAD, _WORK = 3, 4
_MOST = 2500  # nodes of a view; with the joined ones twice as many
_VIEWS = {
    "cpu": (
        "CPU time",
        "The CPU time of the steps by thread: that of the main thread adds up to the steps, that of another thread"
        " is its time inside ranges.",
    ),
    "gpu": (
        "GPU time",
        "The durations of the GPU work of the steps, below the range that launched it; work that runs at the same"
        " time counts in full. A backward pass is below the region or module of its forward pass where sequence"
        " numbers tell it.",
    ),
}
"""The trees of the graph: the title of each, and what its numbers are."""


def flame_of(trace: TraceData, gpu: Table, communication: Array, steps: int, each: str) -> dict[str, Any] | None:
    """Return the section of a page: the graphs by CPU time and by GPU time; None for a trace without ranges.

    Values are sums over the steps: for each node a time and a number of calls outside backward passes, and inside.

    Args:
        trace: the trace.
        gpu: the GPU work of the steps: rows of ``trace.gpu``.
        communication: a mask of the rows of ``gpu`` that communicate.
        steps: the number of steps, by which the page divides.
        each: what the page says of the quotients: "per step".
    """
    times = times_of_steps(trace)
    ranges = ranges_of(trace, times)
    if not len(ranges.kind):
        return None
    rows = _Rows(trace, gpu, communication, ranges)
    views = {"cpu": rows.cpu_tree(*own_ns(ranges, times, rows.main_thread))}
    if gpu:
        views["gpu"] = rows.gpu_tree()
    names: dict[int, int] = {}
    packed = {view: _about(view) | packed_tree(tree, rows.base, names) for view, tree in views.items()}
    return {
        "id": "flame",
        "type": "flame",
        "title": "Flame graph",
        "unit": "ns",
        "steps": steps,
        "each": each,
        "words": {
            "views": "Time",
            "parts": "Pass",
            "value": "Time",
            "own": "Self time",
            "second": "In backward passes",
            "count": "Calls",
        },
        "parts": [["all", "Both passes"], ["forward", "Forward and other"], ["backward", "Backward"]],
        "kinds": _KINDS,
        "names": [rows.text(key) for key in names],
        "about": {},
        "views": packed,
    }


def _about(view: str) -> dict[str, str]:
    title, note = _VIEWS[view]
    return {"title": title, "note": note}


class _Rows:
    """The rows of the trees: a row for each thread, then the ranges, then the GPU work.

    The key of a row is its kind times ``base``, and its name.
    """

    def __init__(self, trace: TraceData, gpu: Table, communication: Array, ranges: Ranges) -> None:
        self._trace, self._gpu, self._communication, self._ranges = trace, gpu, communication, ranges
        self.main_thread = main_thread(trace)
        backward = BackwardRanges(trace, ranges)
        self._parents, self._backward = backward.parents, backward.mask
        self._autograd, self._in_node = backward.autograd, backward.in_node
        self._threads = len(trace.threads) + 1
        self.base = max(len(trace.strings), self._threads)
        self._keys = ranges.kind * self.base + ranges.name

    def cpu_tree(self, own: Array, outside_ns: int) -> Tree:
        """Return the tree of the CPU time; the roots are threads, the main thread first."""
        thread, main = self._ranges.thread, self.main_thread
        order = np.argsort(np.arange(self._threads) != main % self._threads, kind="stable")
        root = np.argsort(order)
        outside = np.zeros(self._threads, np.int64)
        outside[0] = outside_ns
        # A node whose operator ran on another thread stays below the range around it: time is by thread.
        same = np.append(thread, -1)[self._parents] == thread
        parents = np.where(same, self._parents, self._ranges.nest.parents)
        parents = np.where(parents >= 0, parents + self._threads, root[thread])
        times, calls = np.concatenate((outside, own)), np.concatenate((outside * 0, own * 0 + 1))
        in_backward = np.concatenate((outside != outside, self._backward))
        return tree_of(
            np.concatenate((np.full(self._threads, -1), parents)),
            np.concatenate((_THREAD * self.base + order, self._keys)),
            _by_pass(times, in_backward),
            _by_pass(calls, in_backward),
            _MOST,
        )

    def gpu_tree(self) -> Tree:
        """Return the tree of the durations of GPU work, which is its leaves; the only root is the GPU work."""
        gpu, count = self._gpu, len(self._ranges.kind)
        above, in_backward = self._launched_in()
        kind, name = _WORK + work_classes(gpu, self._communication), work_names(gpu)
        parents = np.concatenate((self._gpu_parents(above), above)) + 1
        mask = np.concatenate((self._backward, in_backward))
        return tree_of(
            np.concatenate(([-1], parents)),
            np.concatenate(([_THREAD * self.base + self._threads], self._keys, kind * self.base + name)),
            _by_pass(np.concatenate((np.zeros(count + 1, np.int64), gpu.duration_ns)), np.append(False, mask)),
            _by_pass(np.append(0, np.ones(count + len(gpu), np.int64)), np.append(False, mask)),
            _MOST,
        )

    def _launched_in(self) -> tuple[Array, Array]:
        """Return the range that launched each GPU work, or -1, and whether that was in a backward pass."""
        gpu, runtime, ranges = self._gpu, self._trace.runtime, self._ranges
        thread, at = (np.append(column, -1)[gpu.launch] for column in (runtime.thread, runtime.start_ns))
        above = np.where(gpu.launch >= 0, ranges.nest.innermost_at(at, thread), -1)
        for kind, rows in ((OPERATOR, gpu.operator), (MODULE, gpu.module), (REGION, gpu.region)):
            above = np.where(above >= 0, above, ranges.places(kind, rows))
        in_backward: Array = np.append(self._backward, False)[above] | self._autograd[thread]
        return above, in_backward

    def _gpu_parents(self, launched_in: Array) -> Array:
        """Return the range above each range; of the outermost ones of other threads, the region of their work."""
        ranges, regions = self._ranges, self._trace.regions
        parents: Array = self._parents.copy()
        outer = np.flatnonzero((parents < 0) & (ranges.kind == REGION))
        parents[outer] = ranges.places(REGION, regions.parent[ranges.row[outer]])
        region = ranges.places(REGION, self._gpu.region)
        linked = np.flatnonzero((launched_in >= 0) & (region >= 0))
        launched_in, region = launched_in[linked], region[linked]
        top = launched_in.copy()
        for which, above in ancestor_levels(launched_in, parents):
            top[which] = above
        # Only from the thread of the launch to another, and never into a node, which may be below this range.
        other = (ranges.thread[top] == ranges.thread[launched_in]) & (ranges.thread[top] != ranges.thread[region])
        other &= ~self._autograd[ranges.thread[region]] & ~self._in_node[region]
        parents[top[other]] = region[other]
        return parents

    def text(self, key: int) -> str:
        """Return the name of the nodes with a key."""
        kind, code = divmod(key, self.base)
        trace = self._trace
        if kind == _THREAD:
            return self._thread_name(code) if code < self._threads else "GPU work"
        return shown_name(trace.strings[code].removeprefix(MODULE_PREFIX if kind == MODULE else ""))

    def _thread_name(self, number: int) -> str:
        if number == self._threads - 1:
            return "unknown thread"
        thread = self._trace.threads[number]
        if number == self.main_thread:
            return "main thread"
        name = thread.name or f"thread {thread.thread}"
        return shown_name(f"autograd: {name}" if thread.autograd else name)


def _by_pass(values: Array, backward: Array) -> Array:
    """Return two columns: the values outside backward passes, and those inside."""
    return np.stack((np.where(backward, 0, values), np.where(backward, values, 0)), axis=1)
