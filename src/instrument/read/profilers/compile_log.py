"""Reads the structured log of torch.compile (``TORCH_TRACE``): what was compiled, why, and from which lines."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import TraceError
from ...base.findings import Site
from ..kineto.text import json_object

PATTERN = "dedicated_log_torch_trace*.log"
"""The names that torch gives such logs."""

_RECORD = re.compile(r"^[A-Z]\d{4} [\d:.]+ \d+ \S+\] (\{.*\})\s*$")
_START = re.compile(rb"[A-Z]\d{4} [\d:.]+ \d+ \S+\] \{")
_FILE = re.compile(r"^\s*# File: (.+):(\d+) in (\S+), code: ")
_NODE = re.compile(r'^\s*(\w+)(?:: "[^"]*")? = ')
_NODES = re.compile(r"^\s*# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_KERNEL = re.compile(r"^\s*(\w+) = async_compile\.")
_REASONS = {"name": "recompile_reasons", "encoding": "json"}
_MAX_LINE_LENGTH = 1 << 20  # characters of a line
_MAX_BYTES = 1 << 30


def is_compile_log(head: bytes) -> bool:
    """Return whether a file that starts with these bytes is such a log."""
    return bool(_START.match(head))


Frame = tuple[str, str]


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel that Inductor generated.

    Attributes:
        name: its name, as in a trace.
        operators: the operators that it computes, such as "aten.gelu".
        sites: the lines of the program that they came from.
    """

    name: str
    operators: tuple[str, ...]
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Compilation:
    """One compilation of a function.

    Attributes:
        name: torch's number for it: the frame and the version, such as "0/1".
        site: the function.
        total_ns: how long it took.
        inductor_ns: the part of it in Inductor; None if the log does not say.
        reason: why the function was compiled again; empty the first time, or if the log does not say.
    """

    name: str
    site: Site
    total_ns: int
    inductor_ns: int | None
    reason: str


@dataclass(frozen=True)
class CompileLog:
    """What the logs say.

    Attributes:
        kernels: the generated kernels by name.
        compilations: in the order of the log.
    """

    kernels: Mapping[str, GeneratedKernel]
    compilations: tuple[Compilation, ...]


def read_compile_logs(paths: list[Path]) -> CompileLog:
    """Read the logs of the processes of one run; lines that cannot be read are skipped.

    Raises:
        TraceError: a file holds no record of such a log, or is too large.
        OSError: a file cannot be read.
    """
    kernels: dict[str, GeneratedKernel] = {}
    compilations: list[Compilation] = []
    for path in paths:
        if path.stat().st_size > _MAX_BYTES:
            raise TraceError(path, "it is larger than any log of torch.compile")
        sites: dict[Frame, dict[str, Site]] = defaultdict(dict)
        reasons: dict[Frame, str] = {}
        count = 0
        for record, payload in _records(path):
            count += 1
            frame = str(record.get("frame_id")), str(record.get("frame_compile_id"))
            if "dynamo_output_graph" in record:
                sites[frame] |= _nodes(payload)
            elif "inductor_output_code" in record:
                kernels |= {each.name: each for each in _kernels(payload, sites[frame])}
            elif isinstance(record.get("compilation_metrics"), dict):
                compilations.append(_compilation(record["compilation_metrics"], frame, reasons.get(frame, "")))
            elif record.get("artifact") == _REASONS:
                reasons[frame] = _first_text(payload)
        if not count:
            raise TraceError(path, "it is no log of torch.compile: TORCH_TRACE=FOLDER writes them")
    return CompileLog(kernels, tuple(compilations))


def _records(path: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield each record with the lines of its payload, which begin with a tab."""
    record: dict[str, Any] | None = None
    payload: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(_MAX_LINE_LENGTH):
            if line.startswith("\t"):
                payload.append(line[1:].rstrip("\n"))
            elif match := _RECORD.match(line):
                if record is not None:
                    yield record, payload
                record, payload = json_object(match[1]), []
    if record is not None:
        yield record, payload


def _first_text(payload: list[str]) -> str:
    """Return the first text of a list in JSON."""
    try:
        first = json.loads("".join(payload))[0]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""
    return first if isinstance(first, str) else ""


def _nodes(graph: list[str]) -> dict[str, Site]:
    """Return the lines of the program that the nodes of a graph come from."""
    sites, site = {}, None
    for line in graph:
        if match := _FILE.match(line):
            site = Site(match[1], int(match[2][:9]), match[3])
        elif site is not None and (match := _NODE.match(line)):
            sites[match[1]] = site
    return sites


def _kernels(code: list[str], sites: Mapping[str, Site]) -> Iterator[GeneratedKernel]:
    nodes: list[str] = []
    operators: list[str] = []
    for line in code:
        if match := _NODES.match(line):
            nodes, operators = (list(filter(None, text.split(", "))) for text in match.groups())
        elif match := _KERNEL.match(line):
            places = dict.fromkeys(sites[node] for node in nodes if node in sites)
            yield GeneratedKernel(match[1], tuple(operators), tuple(places))
            nodes, operators = [], []


def _compilation(metrics: Mapping[str, Any], frame: Frame, reason: str) -> Compilation:
    total, inductor = (metrics.get(f"{name}_cumulative_compile_time_us") for name in ("dynamo", "inductor"))
    line = metrics.get("co_firstlineno")
    function = Site(
        str(metrics.get("co_filename") or ""), line if isinstance(line, int) else 0, str(metrics.get("co_name"))
    )
    return Compilation(
        str(metrics.get("compile_id") or f"{frame[0]}/{frame[1]}"),
        function,
        round(1000 * total) if isinstance(total, (int, float)) else 0,
        round(1000 * inductor) if isinstance(inductor, (int, float)) else None,
        str(metrics.get("recompile_reason") or reason),  # torch 2.6 has it only in a record of its own
    )
