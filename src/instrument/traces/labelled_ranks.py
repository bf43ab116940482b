"""Tells the ranks in one file apart: programs that merge traces write the rank into each process id or name.

Without such labels, several processes with steps of their own are several ranks, unless there is work of GPUs,
which does not say whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..trace_marks import STEP_PREFIX
from .merge_note import about_ranks
from .table import Array
from .trace_files import natural_key

_BRACKETS = re.compile(r"^\[([^\]]{1,60})\]")  # "[TP00-DP01] 4000", as SGLang writes
_RANK = re.compile(r"(?<![a-z])(?:rank|worker|[tpdec]p)[-_ =:]?\d{1,6}(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,6}")
_OF_PROGRAMS = ("operators", "regions", "runtime", "gpu")


def ranks_in(
    columns: Mapping[str, Mapping[str, Array]],
    threads: Sequence[Any],
    processes: Mapping[Any, str],
    metadata: Mapping[str, Any],
    strings: Iterable[str],
) -> dict[int, Array]:
    """Return the threads of each rank; empty if the file holds one process, or does not say.

    Args:
        columns: the columns of each table.
        threads: the process of each thread.
        processes: the name of each process.
        metadata: the metadata of the file. Traces of `merge_traces` have a note, and are one trace.
        strings: the texts that the codes of names stand for.
    """
    if about_ranks(metadata):
        return {}
    stepping = _processes_with_steps(columns, threads, strings)
    if len(stepping) > 1:
        ranks = {process: rank for rank, process in enumerate(stepping)}
    else:
        ranks = _labelled_processes(columns, threads, processes)
    of = np.array([ranks.get(process, -1) for process in threads])
    return {rank: np.flatnonzero(of == rank) for rank in sorted(set(ranks.values()))}


def _labelled_processes(
    columns: Mapping[str, Mapping[str, Array]], threads: Sequence[Any], processes: Mapping[Any, str]
) -> dict[Any, int]:
    """Return the rank of each process that has the label of one; empty unless all that run have one."""
    labels = {process: _label(process) or _label(processes.get(process)) for process in dict.fromkeys(threads)}
    used = {threads[row] for name in _OF_PROGRAMS if name in columns for row in np.unique(columns[name]["thread"])}
    found = sorted({labels[process] for process in used}, key=natural_key)
    if len(found) < 2 or not all(found):
        return {}
    numbers = _numbers(found)
    return {process: numbers[label] for process, label in labels.items() if label in numbers}


def _processes_with_steps(
    columns: Mapping[str, Mapping[str, Array]], threads: Sequence[Any], strings: Iterable[str]
) -> list[int]:
    """Return the processes without a label that marked steps, in ascending order; none beside work of a GPU."""
    if "regions" not in columns or "gpu" in columns:
        return []
    steps = [code for code, text in enumerate(strings) if text.startswith(STEP_PREFIX)]
    rows = np.isin(columns["regions"]["name"], steps)
    found = {threads[thread] for thread in np.unique(columns["regions"]["thread"][rows]).tolist()}
    return sorted(found) if all(isinstance(process, int) for process in found) else []


def part_of(columns: Mapping[str, Mapping[str, Array]], own: Array, threads: int) -> dict[str, dict[str, Array]]:
    """Return the rows of some threads, which are renumbered in their order."""
    numbers = np.full(threads, -1)
    numbers[own] = np.arange(len(own))
    return {
        table: {name: (numbers[part["thread"]] if name == "thread" else part[name])[rows] for name in part}
        for table, part in columns.items()
        for rows in [numbers[part["thread"]] >= 0]
    }


def _label(name: object) -> str:
    """Return what a process id or a name says of the rank; "" for nothing."""
    if not isinstance(name, str):
        return ""
    found = _BRACKETS.match(name)
    return found[1] if found else " ".join(_RANK.findall(name[:200]))


def _numbers(labels: Iterable[str]) -> dict[str, int]:
    """Return the ranks: the one number in each label, or their places if a label has several."""
    found = {label: _NUMBER.findall(label) for label in labels}
    if all(len(numbers) == 1 for numbers in found.values()):
        ranks = {label: int(numbers[0]) for label, numbers in found.items()}
        if len(set(ranks.values())) == len(ranks):
            return dict(sorted(ranks.items(), key=lambda item: item[1]))
    return {label: place for place, label in enumerate(found)}
