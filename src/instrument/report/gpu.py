"""Prints how the GPU spent its time, and on which kernels."""

from __future__ import annotations

import re

from rich.console import Console

from ..diagnosis.metrics import Metrics
from ..traces.trace import Trace
from ..units import count, duration, percent
from .plain import line, print_table

_GRAPH = re.compile(r"^CUDA graph \d+$")
_KERNELS = 10
_PARTS = (
    ("compute_ns", "compute"),
    ("exposed_comm_ns", "exposed communication"),
    ("exposed_memcpy_ns", "exposed copies"),
    ("idle_ns", "idle"),
)


def graph_launches(trace: Trace) -> int:
    """Return how many launches of CUDA graphs nsys traced as a whole, without the kernels in them."""
    if trace.format != "nsight systems":
        return 0
    return int(trace.kernels.matching("name", _GRAPH).sum())


def render_graphs(launches: int, *, console: Console) -> None:
    """Print how to have the kernels recorded of graphs that were traced as a whole; nothing without any."""
    if launches:
        line(console, "")
        line(console, f"Launches of CUDA graphs, traced as a whole: {count(launches)}. For the kernels in them:")
        line(console, "  instrument run --profiler nsys --option=--cuda-graph-trace=node ...")


def render_gpu(numbers: Metrics, *, console: Console) -> None:
    """Print the parts of the time from the first start to the last end of GPU work, and the longest kernels.

    Nothing, for a trace without any.
    """
    if not numbers["gpu_events"]:
        return
    whole = numbers["span_ns"]
    parts = ", ".join(f"{word} {percent(numbers[name], whole)} %" for name, word in _PARTS)
    line(console, "")
    line(console, f"GPU, {duration(whole)} from first start to last end: {parts}")
    kernels = numbers["kernel_table"]
    rows = [
        (0, kernel["name"], [count(kernel["count"]), duration(kernel["sum_ns"]), f"{100 * kernel['share']:.1f}"])
        for kernel in kernels[:_KERNELS]
        if kernel["share"] is not None
    ]
    if rows:
        print_table(["kernel", "calls", "GPU", "% kernels"], rows, console)
    if len(kernels) > _KERNELS:
        line(console, f"... and {len(kernels) - _KERNELS} more kernels")
