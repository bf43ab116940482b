"""The peak on a page: what was in use by region, module and line, or by category, as an icicle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...base.printable import shown_name
from ...read.charts.flame import Tree, packed_tree, tree_of
from ...read.memory.breakdown import Breakdown, Place, Use
from ...read.memory.categories import CATEGORIES, EVIDENCE, category_words, page_class
from ...read.tables.table import Array

_KINDS = ("peak", "region", "module", "line", "inferred", "unknown", *map(page_class, CATEGORIES))
_MOST = 2500  # nodes of a view; with the joined ones twice as many
_NOTE = (
    "A module is the line that calls it. Where no line is known, the use is inferred, and the node names the "
    "evidence."
)


class _Node(NamedTuple):
    """What distinguishes a node from others below the same one.

    Attributes:
        kind: one of `_KINDS`.
        name: its name.
        about: what the page says of it.
    """

    kind: str
    name: str
    about: str


_PEAK = _Node("peak", "in use at the peak", "")


def peak_section(found: Breakdown, side: str = "") -> dict[str, Any] | None:
    """Return the section; None if nothing was in use.

    Args:
        found: what was in use.
        side: which of two snapshots it is of, such as "before".
    """
    if not found.uses:
        return None
    paths = {
        "category": [(_PEAK, _category(use), *_around(use), _source(use)) for use in found.uses],
        "region": [(_PEAK, *_around(use), _source(use), _category(use)) for use in found.uses],
    }
    nodes = list(dict.fromkeys(chain.from_iterable(paths["category"])))
    numbers = {node: number for number, node in enumerate(nodes)}
    names: dict[int, int] = {}
    views = {
        key: {"title": f"By {key}", "note": _NOTE}
        | packed_tree(_tree(found.uses, paths[key], numbers), len(nodes), names)
        for key in paths
    }
    shown = [nodes[key % len(nodes)] for key in names]
    return {
        "id": f"peak-{side}" if side else "peak",
        "type": "flame",
        "title": f"The peak {side}" if side else "The peak",
        "unit": "bytes",
        "steps": 1,
        "each": "at the peak",
        "words": {
            "views": "Order",
            "parts": "Evidence",
            "value": "Memory",
            "second": "Without a line",
            "count": "Blocks",
        },
        "parts": [["all", "All"], ["known", "With a line"], ["other", "Without a line"]],
        "kinds": _KINDS,
        "names": [node.name for node in shown],
        "about": {number: node.about for number, node in enumerate(shown) if node.about},
        "views": views,
    }


def _around(use: Use) -> Iterator[_Node]:
    """Yield the region and the modules around the allocation, the outermost first."""
    if use.region:
        yield _Node("region", shown_name(use.region), "")
    for place in use.modules:
        yield _at("module", place)


def _source(use: Use) -> _Node:
    if use.place is not None:
        return _at("line", use.place)
    if use.inferred:
        return _Node("inferred", use.source, f"Evidence: {EVIDENCE[use.evidence]}.")
    return _Node("unknown", use.source, "Neither a line nor other evidence is known.")


def _at(kind: str, place: Place) -> _Node:
    line = str(place).rpartition("/")[2]  # boxes are narrow
    return _Node(kind, shown_name(f"{line} {place.function}"), shown_name(f"{place.file}:{place.line}"))


def _category(use: Use) -> _Node:
    text = CATEGORIES[use.category]
    return _Node(page_class(use.category), category_words(use.category), f"{text[:1].upper()}{text[1:]}.")


def _tree(uses: Sequence[Use], paths: Sequence[Sequence[_Node]], numbers: Mapping[_Node, int]) -> Tree:
    """Return the tree of the uses, each below the nodes of its path: bytes and blocks, with and without a line."""
    depth = np.array([len(path) for path in paths])
    last = np.cumsum(depth) - 1
    keys = np.array([_KINDS.index(node.kind) * len(numbers) + numbers[node] for path in paths for node in path])
    parents = np.arange(len(keys)) - 1
    parents[last - depth + 1] = -1
    known = np.array([use.place is not None for use in uses])
    sizes, blocks = np.array([(use.bytes, use.blocks) for use in uses]).T
    values = np.zeros((len(keys), 2), np.int64)
    values[last] = _by_line(sizes, known)
    return tree_of(parents, keys, values, _by_line(blocks, known).repeat(depth, axis=0), _MOST)


def _by_line(values: Array, known: Array) -> Array:
    """Return two columns: the values with a line, and those without."""
    return np.stack((np.where(known, values, 0), np.where(known, 0, values)), axis=1)
