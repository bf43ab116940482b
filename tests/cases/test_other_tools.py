"""Chrome traces of tools whose events have categories of their own: CPU time by name, and GPU work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from instrument.read.jobs.read import read_trace
from instrument.read.measures.region_steps import steps_found
from instrument.read.tables.trace import Trace
from instrument.start.cli import app

Event = dict[str, Any]


def read(folder: Path, events: list[Event], *, bare: bool = True) -> Trace:
    path = folder / "trace.json"
    path.write_text(
        json.dumps(events if bare else {"traceEvents": events, "viztracer_metadata": {"version": "1.1"}})
    )
    return read_trace(path)


def call(name: str, cat: str, at: int, dur: int, **more: Any) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": at, "dur": dur, "pid": 5, "tid": 5} | more


def test_viztracer(tmp_path: Path) -> None:
    """Each function is a region in the one that called it; the rounds of the loop are steps."""
    events: list[Event] = [
        {"ph": "M", "pid": 5, "tid": 5, "name": "process_name", "args": {"name": "MainProcess"}}
    ]
    for at in range(0, 30_000, 10_000):
        events += [call("time.sleep", "FEE", at + 1, 3998), call("forward (t.py:3)", "FEE", at, 4000)]
        events += [call("backward (t.py:4)", "FEE", at + 4000, 5000)]
    trace = read(tmp_path, events, bare=False)
    assert len(trace.regions) == 9
    assert not trace.lost and not trace.unread_devices and not trace.others
    assert [trace.regions.text("name")[row] for row in trace.regions.parent if row >= 0] == [
        "forward (t.py:3)"
    ] * 3
    assert len(steps_found(trace).steps) == 3
    shown = CliRunner().invoke(app, ["summarize", str(trace.path)]).output
    assert "forward (t.py:3)" in shown and "Left out" not in shown


def test_onnx_runtime(tmp_path: Path) -> None:
    """The nodes of a session are regions; with CUDA, its kernels are GPU work."""
    gpu = {"pid": 6, "args": {"stream": "7", "block_x": 256}}
    events = [
        call("model_run", "Session", 0, 90),
        call("mm_kernel_time", "Node", 10, 40, args={"op_name": "MatMul"}),
        call("sgemm", "Kernel", 30, 20, **gpu),
    ]
    trace = read(tmp_path, events)
    assert (trace.regions.text("name"), trace.regions.parent.tolist()) == (
        ["model_run", "mm_kernel_time"],
        [-1, 0],
    )
    assert (trace.gpu.text("name"), trace.gpu.duration_ns.tolist()) == (["sgemm"], [20_000])


def test_timeline_of_ray(tmp_path: Path) -> None:
    """Each worker is a thread, and the phases of its tasks are regions."""
    where = {"pid": "192.0.2.2", "tid": "worker:b671", "args": {}, "cname": "rail_load"}
    events = [call("task:execute", "task:execute", 1_795_955_985_729_686, 10_294, **where)]
    trace = read(tmp_path, events)
    assert (trace.regions.text("name"), trace.regions.duration_ns.tolist()) == (["task:execute"], [10_294_000])
    assert [thread.thread for thread in trace.threads] == ["worker:b671"]


def test_devices_are_not_the_program(tmp_path: Path) -> None:
    """Events of a device that is not known stay left out: they are no time of the CPU."""
    name = {"ph": "M", "name": "process_name", "pid": 8, "tid": 0, "args": {"name": "XPU 0"}}
    trace = read(tmp_path, [name, call("run", "other", 0, 9), call("gemm", "other", 3, 5, pid=8)])
    assert trace.regions.text("name") == ["run"]
    assert list(trace.unread_devices) == ["XPU 0"]
