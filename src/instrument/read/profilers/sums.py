"""Reads profiles that hold sums of GPU time by name: the trees of Triton's Proton, and the layers of TensorRT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ...base.errors import TimeSum, TimeSumsError, TraceError
from ..kineto.text import read_json
from ..tables.table import natural

_MOST_NS, _MOST_MS = 1e18, 1e12


def refuse_with_sums(path: Path, text: str) -> NoReturn:
    """Raise the error for a file that has sums and no timeline.

    Args:
        path: a tree in Hatchet's format, or what ``trtexec --exportProfile`` writes.
        text: what the file is, and what to do.

    Raises:
        TimeSumsError: with the sums.
        TraceError: the file is damaged, or has none, such as a tree of cycles.
        OSError: the file cannot be opened.
    """
    nodes = read_json(path)
    calls: dict[str, int] = defaultdict(int)
    times: dict[str, int] = defaultdict(int)
    for name, count, time_ns in _sums(nodes if isinstance(nodes, list) else []):
        calls[name] += count
        times[name] += time_ns
    sums = tuple(TimeSum(name, calls[name], times[name]) for name in sorted(times, key=times.__getitem__)[::-1])
    if not sums:
        raise TraceError(path, text)
    raise TimeSumsError(path, text, sums)


def _sums(nodes: list[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield name, calls and time of each node that has a time."""
    first = nodes[0] if nodes else None
    iterations = natural(first.get("count")) if isinstance(first, dict) else -1
    while nodes:
        match node := nodes.pop():
            case {"name": str(name), "timeMs": int() | float() as time_ms} if 0 < time_ms < _MOST_MS:
                yield name, max(iterations, 1), round(time_ms * 1e6)
            case {"frame": {"name": str(name)}, "metrics": dict(metrics)}:
                said = {str(key).lower(): value for key, value in metrics.items()}  # "Time (ns)" in 2024
                match said.get("time (ns)"):
                    case int() | float() as time_ns if 0 < time_ns < _MOST_NS:
                        yield name, max(natural(said.get("count")), 1), round(time_ns)
        if isinstance(node, dict) and isinstance(node.get("children"), list):
            nodes += node["children"]
