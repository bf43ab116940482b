"""The flame graph: regions, modules and operators by nesting, with their CPU time and their GPU work.

`tree_of` merges rows with the same path into nodes, and joins the smallest; all sums stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...base.printable import shown_name
from ...base.trace_marks import TASKS
from ..tables.autograd import engine_node_name
from ..tables.intervals import Intervals, covered_ns
from ..tables.lanes import latest
from ..tables.nest import NestedRanges, ancestor_levels, inside_rows, outermost_rows
from ..tables.steps import main_thread, times_of_steps
from ..tables.table import Array, Table, linked
from ..tables.trace import MODULE as MODULE_NAME
from ..tables.trace import MODULE_PREFIX, Trace
from ..tables.work_classes import CLASSES, work_classes, work_names

JOINED = -1
"""The key of a node that stands for several small ones."""


class Tree(NamedTuple):
    """The nodes of a tree; a node comes after the node above it, and siblings are in order of their first row.

    The total of a node is its own value and the totals of the nodes below it.

    Attributes:
        parent: the node above, or -1.
        key: the key of the rows; `JOINED` for a node that stands for several small siblings.
        own: a row of values for each node, without those of the nodes below it.
        counts: a row of counts for each node.
        joined: how many siblings a node stands for; 0 for all but those with the key `JOINED`.
    """

    parent: Array
    key: Array
    own: Array
    counts: Array
    joined: Array


def tree_of(parents: Array, keys: Array, values: Array, counts: Array, most: int) -> Tree:
    """Return the tree of rows.

    Args:
        parents: for each row the row above it, or -1; without cycles.
        keys: what distinguishes rows below the same node, as integers from 0.
        values: a row of values for each row, as integers from 0, such as times. Nodes without any are left out.
        counts: a row of counts for each row.
        most: how many nodes are kept, those with the largest totals; below each, one node stands for all others.
    """
    nodes, parent, key = _merged(parents, keys)
    own, number = (np.zeros((len(parent), each.shape[1]), np.int64) for each in (values, counts))
    for sums, each in ((own, values), (number, counts)):
        for column in range(each.shape[1]):
            np.add.at(sums[:, column], nodes, each[:, column])
    total = own.copy()
    for level in reversed(list(_levels(parent))):
        inner = level[parent[level] >= 0]
        np.add.at(total, parent[inner], total[inner])
    return _pruned(Tree(parent, key, own, number, np.zeros(len(parent), np.int64)), total, most)


def _merged(parents: Array, keys: Array) -> tuple[Array, Array, Array]:
    """Return the node of each row, and the parent and the key of each node."""
    node_of = np.full(len(parents) + 1, -1)
    parent, key, count, base = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0, int(keys.max(initial=0)) + 1
    for rows in _levels(parents):
        paths = (node_of[parents[rows]] + 1) * base + keys[rows]
        distinct_paths, first, which = np.unique(paths, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        node_of[rows] = count + place[which.reshape(-1)]
        parent.append(distinct_paths[order] // base - 1)
        key.append(distinct_paths[order] % base)
        count += len(distinct_paths)
    return node_of[:-1], np.concatenate(parent), np.concatenate(key)


def _levels(parents: Array) -> Iterator[Array]:
    """Yield the rows of each depth, the outermost first."""
    order = np.argsort(parents, kind="stable")
    first = np.searchsorted(parents[order], np.arange(-1, len(parents) + 1))
    rows = np.array([-1])
    while len(rows):
        begin, size = first[rows + 1], first[rows + 2] - first[rows + 1]
        rows = order[np.repeat(begin - np.cumsum(size) + size, size) + np.arange(size.sum())]
        if len(rows):
            yield rows


def _pruned(tree: Tree, total: Array, most: int) -> Tree:
    """Return the tree of the largest nodes; below each of them, the others are joined into one."""
    size = total.sum(axis=1)
    largest = np.argsort(-size, kind="stable")[:most]  # a node above is never smaller, and comes first
    kept = np.zeros(len(size) + 1, bool)
    kept[largest] = size[largest] > 0
    kept[-1] = True  # what is above the outermost nodes
    left_out = np.flatnonzero(~kept[:-1] & kept[tree.parent] & (size > 0))
    below, of = np.unique(tree.parent[left_out], return_inverse=True)
    own, counts = (np.zeros((len(below), each.shape[1]), np.int64) for each in (tree.own, tree.counts))
    np.add.at(own, of.reshape(-1), total[left_out])
    np.add.at(counts, of.reshape(-1), tree.counts[left_out])
    rows = np.flatnonzero(kept[:-1])
    place = np.full(len(size) + 1, -1)
    place[rows] = np.arange(len(rows))
    return Tree(
        np.concatenate((place[tree.parent[rows]], place[below])),
        np.concatenate((tree.key[rows], np.full(len(below), JOINED))),
        np.concatenate((tree.own[rows], own)),
        np.concatenate((tree.counts[rows], counts)),
        np.concatenate((tree.joined[rows], np.bincount(of.reshape(-1), minlength=len(below)))),
    )


def packed_tree(tree: Tree, base: int, names: dict[int, int]) -> dict[str, Any]:
    """Return a tree as the script of the flame graph reads it.

    Args:
        tree: the tree. A key of it is a kind times ``base``, and a name.
        base: more than any name.
        names: the keys that the page has a text for, with their numbers; those of the tree are added.
    """
    keys = tree.key.tolist()
    return {
        "parent": tree.parent.tolist(),
        "name": [-1 if key == JOINED else names.setdefault(key, len(names)) for key in keys],
        "kind": [-1 if key == JOINED else key // base for key in keys],
        "joined": {node: count for node, count in enumerate(tree.joined.tolist()) if count},
        "values": tree.own.T.tolist(),
        "counts": tree.counts.T.tolist(),
    }


REGION, MODULE, OPERATOR = range(3)
"""The values of `Ranges.kind`."""


class Ranges(NamedTuple):
    """The ranges that run during the steps, in order of start; of those that start together, the outermost first.

    Attributes:
        kind: `REGION`, `MODULE` or `OPERATOR`.
        row: the row in `Trace.regions`, `Trace.frames` or `Trace.operators`.
        name: the number of the name in `Trace.strings`.
        thread: the number of the thread.
        start_ns: the start.
        end_ns: the end.
        nest: the nesting on each thread.
    """

    kind: Array
    row: Array
    name: Array
    thread: Array
    start_ns: Array
    end_ns: Array
    nest: NestedRanges

    def places(self, kind: int, rows: Array) -> Array:
        """Return the index of the range of each row of a table; -1 for -1, and for rows that are no range here."""
        mine = np.flatnonzero(self.kind == kind)
        index = np.full(max(int(self.row[mine].max(initial=-1)), int(rows.max(initial=-1))) + 2, -1)
        index[self.row[mine]] = mine
        return index[rows]


def ranges_of(trace: Trace, times: Intervals) -> Ranges:
    """Return the ranges that run between the first and the last of these times."""
    begin, end = (times[0][0], times[1][-1]) if len(times[0]) else (0, 0)
    tables = (trace.regions, trace.frames, trace.operators)
    rows = [np.flatnonzero((table.end_ns >= begin) & (table.start_ns < end)) for table in tables]
    rows[MODULE] = np.intersect1d(rows[MODULE], np.flatnonzero(trace.frames.matching("name", MODULE_NAME)))
    kind = np.repeat(np.arange(len(tables)), [len(each) for each in rows])
    parts = [table.where(own) for table, own in zip(tables, rows, strict=True)]
    start, end, name, thread = (
        np.concatenate([getattr(part, column) for part in parts])
        for column in ("start_ns", "end_ns", "name", "thread")
    )
    order = np.lexsort((start - end, start))
    start, end, thread = start[order], end[order], thread[order]
    ranges = Ranges(
        kind[order], np.concatenate(rows)[order], name[order], thread, start, end, NestedRanges(start, end, thread)
    )
    if TASKS in trace.metadata:  # a region is in the one around it in its task, unless in an operator or a module
        parents = ranges.nest.parents
        mine = np.flatnonzero((ranges.kind == REGION) & ((parents < 0) | (ranges.kind[parents] == REGION)))
        around = ranges.places(REGION, trace.regions.parent[ranges.row[mine]])
        parents[mine] = np.where(thread[around] == thread[mine], around, -1)
    return ranges


def own_ns(ranges: Ranges, times: Intervals, main: int) -> tuple[Array, int]:
    """Return the CPU time of each range during these times, without that of the ranges inside it.

    At each time, the time of a thread belongs to the range that started last, also where ranges overlap without
    nesting, so that the sum is exact.

    Args:
        ranges: the ranges.
        times: the times that count.
        main: the main thread, whose time outside of ranges counts as well; -1 for none.

    Returns:
        The time of each range, and the time of the main thread outside of ranges.
    """
    edges = np.concatenate((ranges.start_ns, ranges.end_ns, *times))
    thread = np.concatenate((ranges.thread, ranges.thread, np.full(2 * len(times[0]), main)))
    order = np.lexsort((edges, thread))
    edges, thread = edges[order], thread[order]
    changes = np.flatnonzero((np.diff(edges) > 0) & (np.diff(thread) == 0))
    begin, end = edges[changes], edges[changes + 1]
    owner = ranges.nest.innermost_at(begin, thread[changes])
    took = covered_ns(times, begin, end)
    own = np.zeros(len(ranges.start_ns), np.int64)
    np.add.at(own, owner[owner >= 0], took[owner >= 0])
    outside = (owner < 0) & (thread[changes] == main) & (main >= 0)
    return own, int(took[outside].sum())


_BACKWARD = re.compile(r"(?<![a-z])backward(?![a-z])", re.IGNORECASE)
_NODE = re.compile(r"(?:Backward\d*|AccumulateGrad)$")  # without the engine around it: torch before 1.9
_SEARCHED = 2048  # characters of a name


_KINDS = ("region", "module", "operator", "thread", *CLASSES)
_THREAD, _WORK = 3, 4
_MOST = 2500  # nodes of a view; with the joined ones twice as many
_VIEWS = {
    "cpu": {
        "title": "CPU time",
        "note": "The CPU time of the steps by thread: that of the main thread adds up to the steps, that of"
        " another thread is its time inside ranges.",
    },
    "gpu": {
        "title": "GPU time",
        "note": "The durations of the GPU work of the steps, below the range that launched it; work that runs at"
        " the same time counts in full. A backward pass is below the region or module of its forward pass where"
        " sequence numbers tell it.",
    },
}
"""The trees of the graph: the title of each, and what its numbers are."""


def flame_of(trace: Trace, gpu: Table, communication: Array, steps: int, each: str) -> dict[str, Any] | None:
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
    packed = {view: _VIEWS[view] | packed_tree(tree, rows.base, names) for view, tree in views.items()}
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


class _Rows:
    """The rows of the trees: a row for each thread, then the ranges, then the GPU work.

    The key of a row is its kind times ``base``, and its name. Backward passes are on autograd threads, inside
    nodes of autograd, and inside regions named "backward".
    """

    def __init__(self, trace: Trace, gpu: Table, communication: Array, ranges: Ranges) -> None:
        self._trace, self._gpu, self._communication, self._ranges = trace, gpu, communication, ranges
        self.main_thread = main_thread(trace)
        self._threads = len(trace.threads) + 1
        self.base = max(len(trace.strings), self._threads)
        self._keys = ranges.kind * self.base + ranges.name
        self._autograd = np.array([*(thread.autograd for thread in trace.threads), False])
        above = ranges.nest.parents
        engine = self._named(OPERATOR, lambda name: engine_node_name(name) is not None)
        alone = self._named(OPERATOR, lambda name: bool(_NODE.search(name[-_SEARCHED:])))
        node = engine | (alone & ~inside_rows(np.flatnonzero(engine), above))
        self._in_node = inside_rows(np.flatnonzero(node), above)
        named = self._named(REGION, lambda name: bool(_BACKWARD.search(name[:_SEARCHED])))
        self._backward = inside_rows(np.flatnonzero(named), above) | self._in_node | self._autograd[ranges.thread]
        self._parents = self._parents_of_nodes(node)

    def _named(self, kind: int, condition: Callable[[str], bool]) -> Array:
        """Return a mask of the ranges of a kind whose name meets a condition."""
        codes = np.unique(self._ranges.name)
        meets = np.array([condition(self._trace.strings[code]) for code in codes.tolist()], bool)
        mask: Array = (self._ranges.kind == kind) & np.isin(self._ranges.name, codes[meets])
        return mask

    def _parents_of_nodes(self, node: Array) -> Array:
        """Return the range above each range: the one around it on its thread.

        For a node of autograd, it is the region or module of the operator that created the node, if the sequence
        numbers of a single thread tell it. Operators that create no node have the sequence number of the next
        node, so that the last operator with the number creates it.
        """
        ranges, operators = self._ranges, np.flatnonzero(self._ranges.kind == OPERATOR)
        sequence = np.full(len(ranges.kind), -1)
        sequence[operators] = self._trace.operators.sequence[ranges.row[operators]]
        makers = np.flatnonzero((sequence >= 0) & ~self._in_node & ~self._autograd[ranges.thread])
        numbers, of = np.unique(sequence[makers], return_inverse=True)
        of = of.reshape(-1)
        lowest, highest = np.full(len(numbers), self._threads), np.full(len(numbers), -1)
        np.minimum.at(lowest, of, ranges.thread[makers])
        np.maximum.at(highest, of, ranges.thread[makers])
        # numbers are per thread
        nodes = np.flatnonzero(node & (sequence >= 0) & np.isin(sequence, numbers[lowest == highest]))
        wanted = np.searchsorted(numbers, sequence[nodes])
        made = np.append(makers, -1)[latest(of, ranges.start_ns[makers], wanted, ranges.start_ns[nodes])]
        parents: Array = ranges.nest.parents.copy()
        unknown = np.ones(len(nodes), bool)
        for which, above in ancestor_levels(made, ranges.nest.parents):
            placed = unknown[which] & (ranges.kind[above] != OPERATOR)
            parents[nodes[which[placed]]] = above[placed]
            unknown[which[placed]] = False
        return parents

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
        thread, at = linked(runtime.thread, gpu.launch), linked(runtime.start_ns, gpu.launch)
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
        top = outermost_rows(launched_in, parents)
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
