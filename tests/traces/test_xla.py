"""Traces of JAX's profiler, whose events have no categories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.read.jobs.read import read_trace
from instrument.read.tables.table import KERNEL, MEMCPY, MEMSET
from instrument.read.tables.trace import Trace
from instrument.start.cli import app
from tests.support.programs import program, python, run

# Four steps of jax 0.10.2 on the CPU: StepTraceAnnotation("train", step_num=...) around TraceAnnotation("forward")
# around a jitted tanh(a @ a).sum().
RECORDED = Path(__file__).parent.parent / "data" / "jax_cpu.trace.json"
PROGRAM = """
    import sys, jax, jax.numpy as jnp
    step = jax.jit(lambda a: jnp.tanh(a @ a).sum())
    data = jnp.ones((300, 300))
    step(data).block_until_ready()
    with jax.profiler.trace(sys.argv[1]):
        for number in range(4):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                with jax.profiler.TraceAnnotation("forward"):
                    step(data).block_until_ready()
"""
Event = dict[str, Any]


def check(trace: Trace, format: str = "jax") -> None:
    """The trace has the four steps with one region each, and XLA's operations as operators."""
    assert (trace.format, bool(trace.lost), trace.unread_devices) == (format, False, {})
    assert (trace.steps.number.tolist(), {*trace.steps.text("name")}) == ([0, 1, 2, 3], {"train"})
    assert trace.regions.text("name") == ["forward"] * 4
    starts, ends = trace.steps.start_ns, trace.steps.end_ns
    assert ((starts <= trace.regions.start_ns) & (trace.regions.end_ns <= ends)).all()
    assert len(trace.operators) >= 4
    assert not any("::" in name for name in trace.operators.text("name") + trace.regions.text("name"))
    assert "PjitFunction(<lambda>)" in trace.runtime.text("name")
    assert any(name.startswith("profiler.py(") for name in trace.frames.text("name"))


def test_recorded_trace() -> None:
    """Annotations are regions and steps; calls of JAX, operations of XLA and Python functions are told apart."""
    trace = read_trace(RECORDED)
    check(trace)
    assert trace.operators.text("name") == ["ynn_fusion"] * 4
    assert trace.steps.duration_ns.tolist() == [1_066_602, 5_153_758, 944_412, 829_070]
    assert trace.args(trace.steps, 2) == {"step_num": "2"}


def test_summary() -> None:
    """The summary of such a trace has its steps, regions and operators; nothing is damaged or left out."""
    shown = CliRunner().invoke(app, ["summarize", str(RECORDED)]).output
    assert "mean of steps 0-3" in shown
    assert "forward" in shown and "ynn_fusion" in shown
    assert "damaged" not in shown and "Left out" not in shown


@pytest.mark.process
def test_installed_version(tmp_path: Path) -> None:
    """The installed jax writes what is read."""
    pytest.importorskip("jax")
    run(python(program(PROGRAM, tmp_path), [str(tmp_path / "out")]), dict(os.environ))
    (path,) = (tmp_path / "out").rglob("*.trace.json.gz")
    check(read_trace(path))
    pytest.importorskip("google.protobuf")
    (path,) = (tmp_path / "out").rglob("*.xplane.pb")
    check(read_trace(path), "xplane")


def named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def call(name: str, pid: int, tid: int, start: int, end: int, **args: Any) -> Event:
    """Return an event; times in us."""
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def test_work_of_a_gpu(tmp_path: Path) -> None:
    """What ran on the streams of a device is GPU work; the lanes that a viewer derives from it are not."""
    events = [
        named("process", 1, 0, "/host:CPU"), named("process", 2, 0, "/device:GPU:3"),
        named("thread", 1, 5, "python"), named("thread", 2, 7, "Stream #14(Compute)"),
        named("thread", 2, 8, "XLA Ops"),
        call("train", 1, 5, 0, 90, step_num=7), call("mine", 1, 5, 10, 80),
        call("odd", 1, 5, 91, 92, step_num="x"),
        call("loop_fusion_2", 2, 7, 20, 40), call("MemcpyH2D", 2, 7, 41, 45), call("Memset", 2, 7, 46, 47),
        call("loop_fusion_2", 2, 8, 20, 40),
    ]  # fmt: skip
    path = tmp_path / "vm.trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, {}]}))
    trace = read_trace(path)
    assert trace.gpu.text("name") == ["loop_fusion_2", "MemcpyH2D", "Memset"]
    assert trace.gpu.category.tolist() == [KERNEL, MEMCPY, MEMSET]
    assert (trace.gpu.device.tolist(), trace.gpu.stream.tolist()) == ([3] * 3, [14] * 3)
    assert (trace.steps.number.tolist(), trace.regions.text("name")) == ([7], ["mine", "odd"])
    assert (len(trace.others), bool(trace.lost), trace.unread_devices) == (1, False, {})


@pytest.mark.parametrize("thread", ["Host Threads/9", "python", "tf_XLATfrtGpuClient/1"])
def test_launches_of_a_gpu(tmp_path: Path, thread: str) -> None:
    """Calls of CUDA and HIP are linked to their work, and the driver's own kernels are memcpys and memsets."""
    work = ["fusion.1.kd", "__amd_rocclr_copyBuffer.kd", "__amd_rocclr_fillBufferAligned.kd"]
    launches = ["hipModuleLaunchKernel", "hipMemcpyHtoDAsync", "hipMemsetAsync"]
    events = [
        named("process", 1, 0, "/host:CPU"), named("process", 2, 0, "/device:GPU:0"),
        named("thread", 1, 5, "python"), named("thread", 1, 9, thread),
        named("thread", 2, 7, "Stream #16(Kernel)"), call("work", 1, 5, 0, 90),
    ]  # fmt: skip
    for at, (name, launch) in enumerate(zip(work, launches, strict=True)):
        number = str(at + 1)
        events.append(call(launch, 1, 9, 10 + 20 * at, 14 + 20 * at, correlation_id=number))
        events.append(call(name, 2, 7, 25 + 20 * at, 35 + 20 * at, correlation_id=number, hlo_module="jit_f"))
    path = tmp_path / "vm.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    assert [trace.runtime.text("name")[row] for row in trace.gpu.launch] == launches
    assert trace.gpu.category.tolist() == [KERNEL, MEMCPY, MEMSET]
    assert trace.regions.text("name") == ["work"]
    assert (trace.gpu.region == 0).all()


def test_no_events(tmp_path: Path) -> None:
    """A trace of JAX without events is empty."""
    path = tmp_path / "vm.trace.json"
    path.write_text(json.dumps({"traceEvents": [named("process", 1, 0, "/host:CPU"), {}]}))
    assert len(read_trace(path).regions) == 0
