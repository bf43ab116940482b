"""`trace_counts`: counts the events and kernels of a trace in its text, which is faster than reading it."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = 1 << 20  # bytes
_EVENT = re.compile(rb'"ph":\s*"X"')
_KERNEL = re.compile(rb'"cat":\s*"kernel"')
_LAUNCH = re.compile(rb'"name":\s*"(?:cuda|cu|hip)[A-Za-z]*LaunchKernel\w*"')


def trace_counts(raw: Path) -> dict[str, int]:
    """Return the counts of a trace of torch.profiler for the manifest.

    ``bytes`` is its size, ``events`` the number of events that have a duration, ``kernels_recorded`` the number
    of kernels, and ``kernels_launched`` the number of calls that launch one kernel each.

    Raises:
        OSError: the trace cannot be read.
    """
    size = events = kernels = launches = 0
    rest = b""
    with raw.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            # Kineto ends a line after the fields that are searched for.
            lines, _, rest = (rest + block).rpartition(b"\n")
            events += len(_EVENT.findall(lines))
            kernels += len(_KERNEL.findall(lines))
            if b"LaunchKernel" in lines:
                launches += len(_LAUNCH.findall(lines))
    return {"bytes": size, "events": events, "kernels_launched": launches, "kernels_recorded": kernels}


def launches_graphs(raw: Path) -> bool:
    """Return whether a trace has a launch of a CUDA graph, whose kernels `trace_counts` does not expect."""
    with raw.open("rb") as file:
        return any(b"GraphLaunch" in line for line in file)
