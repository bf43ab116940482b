"""Reads and summarizes damaged files, with little memory and time for each.

``python -m tests.traces.fuzzing "FORMAT" SEED`` tries one file; with a number of seconds as third argument, also
the files that follow. Several formats are separated by commas, and each has that time.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from instrument.base.errors import TraceError
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.metrics.metrics import metrics
from instrument.explain.waits.audit import audit_syncs
from instrument.explain.waits.report import render
from instrument.read.jobs.read import read_trace
from instrument.read.tables.trace import Trace
from instrument.show.terminal.trace_report import print_windows
from tests.support.memory import peak_kib

from .mutants import MAKERS

MEMORY = 3 << 30  # of address space, more than the memory used
SECONDS = 30  # for one file: SQLite is given 5 s of CPU time


def read_all(path: Path) -> str:
    """Read and summarize a file; return "read", or the reason why it cannot be read."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        assert str(path) in str(error)
        return error.reason
    assert isinstance(trace, Trace)
    numbers = metrics(trace)
    parts = ("compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")
    assert sum(numbers[part] for part in parts) == numbers["span_ns"]
    json.dumps(numbers, allow_nan=False)
    for key in numbers:
        numbers.about(key)
    console = Console(file=io.StringIO(), width=120)
    print_windows([(trace, None)], "auto", console=console)
    render(audit_syncs(trace), console=console)
    diagnosis = diagnose(trace)
    assert not diagnosis.failed, diagnosis.failed
    json.loads(diagnosis.to_json(), parse_constant=_refuse)
    console.print(diagnosis)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    odd = {char for char in shown if not char.isprintable()} - {"\n"}
    assert not odd, f"characters that reach the terminal: {odd}"
    pickle.loads(pickle.dumps(trace))
    for table in (trace.gpu, trace.regions, trace.runtime, trace.others):
        for row in range(0, len(table), max(len(table) // 2, 1)):
            with suppress(TraceError):
                trace.args(table, row)
    return "read"


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@contextmanager
def limited() -> Iterator[None]:
    """Raise MemoryError beyond `MEMORY`, and TimeoutError after `SECONDS`."""

    def time_out(*_: object) -> None:
        raise TimeoutError(f"{SECONDS} s")

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, time_out)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def fuzz(kind: str, seed: int, seconds: float) -> None:
    """Try files until the time is over; print one JSON line per failure, then one for all files."""
    count = read = 0
    slowest = 0.0, 0
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        while not count or time.monotonic() < end:
            path = MAKERS[kind](random.Random(f"{kind} {seed}"), Path(folder))
            began = time.monotonic()
            try:
                with limited():
                    read += read_all(path) == "read"
            except Exception:
                print(json.dumps({"kind": kind, "seed": seed, "error": traceback.format_exc()}), flush=True)
            slowest = max(slowest, (time.monotonic() - began, seed))
            count += 1
            seed += 1
    peak = peak_kib() // 1024
    whole = {"kind": kind, "count": count, "read": read, "slowest": slowest, "peak_mib": peak}
    print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    for kind in sys.argv[1].split(","):
        fuzz(kind, int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0)
