"""Sorts the events of a trace of JAX's profiler into tables: its events have no categories."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..tables.lanes import map_strings
from ..tables.table import KERNEL, MEMCPY, MEMSET, Array, Strings

HOST = "/host:CPU"
"""The process of the program in such a trace."""

_DEVICE = re.compile(r"^/device:\w+:(\d+)")
_STREAM = re.compile(r"^Stream #(\d+)")
_XLA_THREAD = re.compile(r"^tf_")
_FRAME = re.compile(r"^\$(.*):(\d+) (.*)$")  # "$train.py:12 main"
# Calls inside of JAX and XLA, which nobody named for a person.
_INTERNAL = re.compile(
    r"::|^(?:PjitFunction\(|ParseArguments|Handle input|AllocateOutput|Wait for |ThunkExecutor|end: )"
)
_RUNTIME = re.compile(r"^(?:cu|cuda|hip)[A-Z]")  # calls of CUDA and HIP, on threads of any name
_KINDS = {
    "Memcpy": MEMCPY,
    "Memset": MEMSET,
    "__amd_rocclr_copyBuffer": MEMCPY,  # the kernels by which AMD's driver copies and sets memory
    "__amd_rocclr_fillBuffer": MEMSET,
}

Columns = dict[str, dict[str, Array]]


def sort_events(
    columns: Columns, strings: Strings, threads: Sequence[tuple[Any, str]], processes: Mapping[Any, str]
) -> None:
    """Move events from the table of others to the tables that they belong to.

    Annotations of the program become regions; those with a step number become steps. XLA's operations on threads
    of the CPU become operators, those on streams of a device GPU work. Python functions become frames, and other
    calls on the program's threads calls of the runtime, as are those of CUDA and HIP on any thread.

    Args:
        columns: the columns of the tables, changed in place.
        strings: the numbers of the strings in the columns; new names are added.
        threads: the process and the name of each thread.
        processes: the name of each process.
    """
    others = columns["others"]
    texts = list(strings)
    names = [texts[code] for code in others["name"].tolist()]
    of = others["thread"].tolist()

    def rows(test: Callable[[int, str], bool]) -> Array:
        return np.array([test(thread, name) for thread, name in zip(of, names, strict=True)], bool)

    device = [_number(_DEVICE, processes.get(process, "")) for process, _ in threads]
    stream = [_number(_STREAM, name) for _, name in threads]
    host = [processes.get(process) == HOST for process, _ in threads]
    library = [bool(_XLA_THREAD.match(name)) for _, name in threads]
    distinct = dict.fromkeys(names)
    internal = {name: bool(_INTERNAL.search(name)) for name in distinct}
    launches = {name: bool(_RUNTIME.match(name)) for name in distinct}

    step = others["number"] >= 0
    frame = rows(lambda thread, name: host[thread] and name.startswith("$"))
    operator = rows(
        lambda thread, name: host[thread] and library[thread] and not (internal[name] or launches[name])
    )
    work = rows(lambda thread, _: device[thread] >= 0 and stream[thread] >= 0)
    program = rows(lambda thread, name: host[thread] and (launches[name] or not library[thread])) & ~step & ~frame
    runtime = program & rows(lambda _, name: internal[name] or launches[name])

    def move(table: str, mask: Array, **more: Array) -> None:
        if mask.any():
            columns[table] = {name: column[mask] for name, column in (others | more).items()}

    move("steps", step)
    move("frames", frame, name=map_strings(strings, others["name"], lambda name: _FRAME.sub(r"\1(\2): \3", name)))
    move("operators", operator)
    move("runtime", runtime, category=np.full(len(of), strings["xla"]))
    move("regions", program & ~runtime)
    kinds = [next((kind for word, kind in _KINDS.items() if name.startswith(word)), KERNEL) for name in names]
    places = {"device": np.array(device)[of], "stream": np.array(stream)[of]} if of else {}
    move("gpu", work, category=np.array(kinds, np.int32), **places)
    left = ~(step | frame | operator | program | work)
    columns["others"] = {name: column[left] for name, column in others.items()}


def _number(pattern: re.Pattern[str], text: str) -> int:
    """Return the number in a name, or -1."""
    found = pattern.match(text)
    return int(found[1]) if found and len(found[1]) < 10 else -1
