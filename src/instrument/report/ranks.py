"""Prints the ranks of a job side by side."""

from __future__ import annotations

from rich.console import Console

from ..diagnosis.metrics import Metrics, metrics
from ..traces.ranks import TraceSet
from .plain import duration, line, percent, print_table

_NUMBERS = ("compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")


def render_ranks(traces: TraceSet, *, console: Console) -> None:
    """Print which ranks there are, and how each spent the time of its GPU; then what is missing.

    The four shares add up to the time from the first start to the last end of work on the GPU.
    """
    line(console, f"{len(traces)} of {traces.world_size} ranks", bold=True)
    columns = ["rank", "GPU time", "compute %", "exposed comm %", "exposed copies %", "idle %", "clock"]
    rows = [(0, str(rank), _cells(metrics(trace), traces.offsets_ns[rank])) for rank, trace in traces.items()]
    print_table(columns, rows, console)
    if traces.missing:
        line(console, f"Missing: rank {', '.join(map(str, traces.missing))}")
    for path, reason in traces.failed.items():
        line(console, f"Cannot read {path}: {reason}")
    for path, held in traces.left_out.items():
        line(console, f"Left out, another window: {path} ({held})")


def _cells(numbers: Metrics, offset_ns: int) -> list[str]:
    whole = numbers["span_ns"]
    return [duration(whole), *(percent(numbers[name], whole) for name in _NUMBERS), _signed(offset_ns)]


def _signed(ns: int) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"
