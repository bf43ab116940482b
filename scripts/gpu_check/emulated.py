"""Stand-in for a GPU in a rehearsal, so errors in the checks themselves show on any machine."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DELAY_US = 3.0  # from a launch to its kernel


class Event:
    """`torch.cuda.Event` with the CPU's clock."""

    def __init__(self, **_: bool) -> None:
        self._s = 0.0

    def record(self) -> None:
        """Record the current time."""
        self._s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the time until ``end`` in ms."""
        return (end._s - self._s) * 1e3


class Cuda:
    """The functions of `torch.cuda` that the checks use."""

    Event = Event

    def synchronize(self) -> None:
        """Do nothing."""

    def is_initialized(self) -> bool:
        """Return False."""
        return False

    def mem_get_info(self) -> tuple[int, int]:
        """Return the free and total bytes of a GPU without memory."""
        return 0, 0


cuda = Cuda()


def add_kernels(path: Path) -> Path:
    """Write a copy of the trace with a launch and a kernel in each innermost operator; return its path."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    trace["deviceProperties"] = [{"id": 0, "name": "a rehearsal", "numSms": 1, "totalGlobalMem": 1}]
    free_us, correlation = 0.0, 1 << 30
    for operator in sorted(_innermost(events), key=lambda event: float(event["ts"])):
        correlation += 1
        begin = float(operator["ts"])
        launch = {"ph": "X", "pid": operator["pid"], "tid": operator["tid"], "ts": begin, "dur": 0.1}
        args = {"correlation": correlation, "External id": operator["args"].get("External id", 0)}
        events.append(launch | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": args})
        start = max(free_us, begin + _DELAY_US)
        free_us = start + float(operator["dur"])
        work = {"ph": "X", "pid": 0, "tid": 7, "ts": start, "dur": operator["dur"]}
        of_kernel = {"device": 0, "stream": 7, "context": 1, **args}
        events.append(work | {"cat": "kernel", "name": f"kernel of {operator['name']}", "args": of_kernel})
    target = path.with_name("with_kernels.json")
    target.write_text(json.dumps(trace))
    return target


def _innermost(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the operators that contain no other."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    operators.sort(key=lambda event: (event["tid"], float(event["ts"]), -float(event["dur"])))
    for operator, following in itertools.zip_longest(operators, operators[1:]):
        end = float(operator["ts"]) + float(operator["dur"])
        if following is None or following["tid"] != operator["tid"] or float(following["ts"]) >= end:
            yield operator
