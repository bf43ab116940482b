"""Work is said to be missing where it is missing, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instrument.explain.diagnosis.diagnose import Diagnosis, diagnose
from instrument.read.jobs.read import read_trace
from instrument.read.measures.launches import launches_of, lost_at_head

Event = dict[str, Any]


def call(name: str, at: float, correlation: int, thread: int = 10, took: float = 5, **more: Any) -> Event:
    """Return a call of the runtime; times in us."""
    args = {"correlation": correlation}
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 10, "tid": thread, "ts": at, "dur": took}
    return event | {"args": args} | more


def kernel(at: float, correlation: int) -> Event:
    args = {"correlation": correlation, "device": 0, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": "add_one", "pid": 0, "tid": 7, "ts": at, "dur": 8, "args": args}


def diagnosis(folder: Path, *events: Event) -> Diagnosis:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return diagnose(path)


def rules(found: Diagnosis) -> set[str | None]:
    return {each.rule for each in found.findings}


LAUNCHED = [
    event for n in (1, 2, 3) for event in (call("cudaLaunchKernel", 100 + 20 * n, n), kernel(110 + 20 * n, n))
]
REPLAYED = [call("cudaGraphLaunch", 320, 6, took=10), kernel(335, 6), kernel(344, 6)]


@pytest.mark.parametrize("thread", [10, 11])
def test_launches_in_a_capture(tmp_path: Path, thread: int) -> None:
    """A capture runs nothing: what its process launches meanwhile, on any thread, is not lost."""
    captured = [
        call("cudaStreamBeginCapture", 200, 900, took=3),
        call("cudaLaunchKernel", 210, 4, thread),
        call("cuLaunchKernel", 230, 5, thread),
        call("cudaStreamEndCapture", 260, 901, took=3),
    ]
    found = diagnosis(tmp_path, *LAUNCHED, *captured, *REPLAYED)
    assert found.bound == "overhead"
    assert "lost-kernels" not in rules(found)
    trace = read_trace(tmp_path / "trace.json")
    assert len(launches_of(trace).rows) == 4
    assert lost_at_head(trace) == 0


def test_a_capture_that_began_before_the_recording(tmp_path: Path) -> None:
    """The end alone shows that what came before it was captured."""
    captured = [call("cudaLaunchKernel", 20, 4), call("hipStreamEndCapture", 60, 901, took=3)]
    found = diagnosis(tmp_path, *captured, *LAUNCHED, *REPLAYED)
    assert "lost-kernels" not in rules(found)


def test_a_launch_after_a_capture_is_lost(tmp_path: Path) -> None:
    """Beside a capture, a launch without its kernel is lost, and the lost kernels at the head are counted."""
    captured = [call("cudaStreamBeginCapture", 20, 900, took=3), call("cudaStreamEndCapture", 30, 901, took=3)]
    lost = [call("cudaLaunchKernel", 40, 4), call("cudaLaunchKernel", 300, 5)]
    found = diagnosis(tmp_path, *captured, *lost, *LAUNCHED, *REPLAYED)
    assert found.coverage == "the kernels of 2 of 6 launches are not in the trace"
    assert "lost-kernels" in rules(found)
    assert lost_at_head(read_trace(tmp_path / "trace.json")) == 1


def test_a_call_of_the_driver_in_a_launch(tmp_path: Path) -> None:
    """A launch of the runtime that calls the driver is one launch, whichever of the two has the kernel's id."""
    calls = [call("cudaLaunchKernel", 100, 50, took=9), call("cuLaunchKernelEx", 102, 51), kernel(120, 51)]
    diagnosis(tmp_path, *calls, *REPLAYED)
    launches = launches_of(read_trace(tmp_path / "trace.json"))
    assert (len(launches.rows), launches.missing.any()) == (2, False)


@pytest.mark.parametrize(
    ("launch", "copy", "said"),
    [
        ("cudaLaunchKernel", "cudaMemcpyAsync", "CUPTI recorded nothing"),
        ("cuLaunchKernelEx", "cuMemcpyDtoHAsync_v2", "CUPTI recorded nothing"),
        ("hipModuleLaunchCooperativeKernel", "hipMemcpyWithStream", "ROCm's tracer recorded nothing"),
        ("urEnqueueKernelLaunch", "urEnqueueUSMMemcpy", "Intel's tracer recorded nothing"),
    ],
)
def test_launches_and_not_one_kernel(tmp_path: Path, launch: str, copy: str, said: str) -> None:
    """Launches without any GPU work are a finding, with its causes."""
    launched = [call(launch, 20 * n, n) for n in range(12)] + [call(copy, 300 + 20 * n, 50 + n) for n in range(4)]
    found = diagnosis(tmp_path, *launched)
    (nothing,) = found.findings
    assert nothing.rule == "no-gpu-work"
    assert nothing.title == "The trace has 16 calls that launched work, and no GPU work"
    assert [each.value for each in nothing.evidence] == [12, 4]
    assert nothing.fix is not None
    assert nothing.fix.text.startswith(said)


def test_the_span_of_the_profiler(tmp_path: Path) -> None:
    """Kineto's own span is no work of an unknown device; that nothing else was recorded is said."""
    span = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
    calls = [call("cudaGetDeviceCount", 100, 1), call("cudaDeviceSynchronize", 9000, 2)]
    found = diagnosis(tmp_path, *calls, span | {"ts": 0, "dur": 5245229.5})
    assert found.verdict.startswith("The trace has neither operators nor GPU work, only 2 calls of the runtime: ")
    assert read_trace(tmp_path / "trace.json").unread_devices == {}
