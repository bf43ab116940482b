"""What every recorder of annotations reports, in one form, so that one test can check them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Range:
    """One named stretch of time; `start` and `end` are nanoseconds of the recorder's own clock."""

    name: str | None
    start: int
    end: int
    kind: Literal["push_pop", "start_end", "mark"]
    thread: int
    process: int
    domain: str | None = None
    color: int | None = None  # ARGB
    category: str | int | None = None  # its name, or the number where it has none
    payload: int | float | str | None = None
    end_thread: int | None = None  # where a start_end range ended
    depth: int = 0
    parent: str | None = None


@dataclass
class Node:
    """A range and the ranges inside it."""

    range: Range
    children: list[Node] = field(default_factory=list)


def tree(ranges: Iterable[Range]) -> list[Node]:
    """Nest the ranges of each thread and domain by time: a parent wholly contains its child."""
    roots: list[Node] = []
    open_nodes: dict[tuple[int, int, str | None], list[Node]] = {}
    for current in sorted(ranges, key=lambda r: (r.start, -r.end)):
        place = (current.process, current.thread, current.domain)
        around = [node for node in open_nodes.get(place, []) if node.range.end > current.start]
        node = Node(current)
        parent = next((other for other in reversed(around) if other.range.end >= current.end), None)
        (parent.children if parent else roots).append(node)
        open_nodes[place] = [*around, node]
    return roots


def outline(ranges: Iterable[Range]) -> str:
    """The tree as text, one name a line, indented by two spaces a level."""
    lines: list[str] = []

    def write(nodes: list[Node], level: int) -> None:
        for node in nodes:
            lines.append("  " * level + str(node.range.name))
            write(node.children, level + 1)

    write(tree(ranges), 0)
    return "\n".join(lines)
