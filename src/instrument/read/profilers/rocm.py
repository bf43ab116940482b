"""Converts rocprofv3's records, of its JSON or its database, to the columns of a trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import numpy as np

from ..tables.lanes import map_strings, map_unique, map_unique_pairs
from ..tables.table import COLUMNS, KERNEL, MEMCPY, Array, Strings, Tables, join_parts
from ..tables.trace import Thread

PROCESS_BIT = 48
"""The bit of an id at which the number of its process begins, so that ids of two processes differ."""

_MEMCPY = re.compile(r"(HOST|DEVICE|PEER)_TO_(HOST|DEVICE|PEER)")
_MARK = "roctxMarkA"
_HIP = "hip"
_EXTRA = {"ancestor": ("i8", -1), "queue": ("i8", -1)}


class RocmColumns:
    """The columns of a trace, collected in parts.

    Args:
        text_limit: the number of characters that all strings may have together.

    Attributes:
        strings: the numbers of the strings that the columns hold.
    """

    def __init__(self, text_limit: int) -> None:
        self.strings = Strings(text_limit)
        self._threads: dict[tuple[int | str, int], int] = {}
        self._parts: dict[str, list[dict[str, Array]]] = {}

    def thread(self, process: int | str, ids: Array) -> Array:
        """Return the numbers of threads of one process."""
        return map_unique(ids, partial(self._thread, process))

    def threads_of(self, processes: Array, ids: Array) -> Array:
        """Return the numbers of threads of several processes."""
        return map_unique_pairs(processes, ids, self._thread)

    def _thread(self, process: int | str, thread: int) -> int:
        return self._threads.setdefault((process, thread), len(self._threads)) if thread >= 0 else -1

    def threads(self, names: Mapping[tuple[int | str, int], str]) -> list[Thread]:
        """Return the threads in the order of their numbers."""
        return [Thread(*key, names.get(key, "")) for key in self._threads]

    def add(self, kind: str, part: dict[str, Array]) -> None:
        """Add rows to a table; columns that the table lacks are ignored."""
        if len(part["start_ns"]):
            self._parts.setdefault(kind, []).append(part)

    def add_kernels(self, part: dict[str, Array]) -> None:
        """Add kernels; the grid is in columns ``x`` to ``z``, the workgroup in ``X`` to ``Z``, in work items."""
        grid, workgroup = (np.stack([part[axis] for axis in axes]) for axes in ("xyz", "XYZ"))
        workgroup = np.maximum(workgroup, 1)
        blocks = np.prod(-(-grid // workgroup), axis=0)
        per_sm = blocks / np.maximum(part["sms"], 1)
        sized = blocks > 0
        more = {
            "category": np.full(len(blocks), KERNEL),
            "blocks": np.where(sized, blocks, -1),
            "block_threads": np.prod(workgroup, axis=0),
            "blocks_per_sm": np.where(sized & (part["sms"] > 0), per_sm, np.nan),
        }
        self.add("gpu", part | more)

    def add_memcpys(self, part: dict[str, Array]) -> None:
        """Add memcpys; ``operation`` is a string such as ``MEMORY_MEMCPY_HOST_TO_DEVICE``."""
        name = map_strings(self.strings, part["operation"], _memcpy_name)
        self.add("gpu", part | {"name": name, "category": np.full(len(name), MEMCPY)})

    def add_calls(self, part: dict[str, Array]) -> None:
        """Add calls of an API; ``kind`` is a string such as ``HIP_RUNTIME_API``."""
        api = map_strings(self.strings, part["kind"], lambda kind: kind.partition("_")[0].lower())
        self.add("runtime", part | {"category": api})

    def add_markers(self, part: dict[str, Array]) -> None:
        """Add calls of rocTX: ``name`` is the function, ``text`` its argument."""
        name, text = part["name"], part["text"]
        named = (text != 0) & (text != name)
        mark = named & ((name == self.strings[_MARK]) | (part["duration_ns"] == 0))
        category = np.where(mark, self.strings["mark"], self.strings["roctx"])
        part = part | {"name": np.where(named, text, name), "category": category}
        region = named & ~mark
        self.add("others", {column: values[~region] for column, values in part.items()})
        del part["category"]
        self.add("regions", {column: values[region] for column, values in part.items()})

    def tables(self) -> Tables:
        """Return the columns of each table."""
        tables = {kind: join_parts(COLUMNS[kind] | _EXTRA, parts) for kind, parts in self._parts.items()}
        gpu, calls = tables.get("gpu"), tables.get("runtime")
        if gpu and not np.any(gpu["stream"] & ((1 << PROCESS_BIT) - 1)):  # HIP streams were not recorded
            gpu["stream"] = gpu["queue"]
        if gpu and calls:
            hip = calls["category"] == self.strings[_HIP]
            gpu["correlation"] = _hip_calls(gpu["correlation"], calls["correlation"], calls["ancestor"], hip)
        return tables


def process_unique_ids(ids: Array, process: int | Array, lowest: int = 0) -> Array:
    """Return ids that are unique among all processes in the file; -1 for ids that are out of range."""
    return np.where((ids >= lowest) & (ids < 1 << PROCESS_BIT), ids + (process << PROCESS_BIT), -1)


def _hip_calls(wanted: Array, ids: Array, ancestors: Array, hip: Array) -> Array:
    """Replace HSA calls by the HIP calls that made them; other calls stay."""
    order = np.argsort(ids, kind="stable")
    ids, ancestors, hip = ids[order], ancestors[order], hip[order]
    result: Array = wanted.copy()
    at, rows = wanted, np.arange(len(wanted))
    for _ in range(8):  # deeper than calls are nested; stops at cycles of damaged ids
        places = np.minimum(np.searchsorted(ids, at), len(ids) - 1)
        there = (ids[places] == at) & (at >= 0)
        places, rows = places[there], rows[there]
        result[rows[hip[places]]] = ids[places[hip[places]]]
        at, rows = ancestors[places[~hip[places]]], rows[~hip[places]]
    return result


def _memcpy_name(operation: str) -> str:
    """Return the name that Kineto gives the memcpy on AMD GPUs."""
    if not (ends := _MEMCPY.search(operation)):
        return operation
    source, target = ends[1].title(), ends[2].title()
    return f"Memcpy {source[0]}to{target[0]} ({source} -> {target})"
