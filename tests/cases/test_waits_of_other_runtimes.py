"""Traces of GPUs beside NVIDIA's and AMD's: which calls wait, and when that is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import instrument
from instrument.start.cli import app

STEPS = 4


def event(category: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    where = (
        {"ph": "X", "pid": 0, "tid": 0}
        if category in ("kernel", "gpu_memcpy")
        else {"ph": "X", "pid": 1, "tid": 1}
    )
    return where | {"cat": category, "name": name, "ts": start, "dur": length, "args": args}


def write(path: Path, runtime: str, launch: str, *waits: tuple[str, str]) -> Path:
    """Write a trace whose steps launch a kernel, and read a value back through ``waits``, one inside another."""
    events = []
    for step in range(STEPS):
        at = 1000.0 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step}", at, 990),
            event("cpu_op", "aten::mm", at + 20, 15),
            event(runtime, launch, at + 23, 8, correlation=2 * step + 1),
            event("kernel", "gemm", at + 50, 300, device=0, stream=1, correlation=2 * step + 1),
            event("cpu_op", "aten::_local_scalar_dense", at + 90, 290),
            event(runtime, f"{launch}Copy", at + 92, 5, correlation=2 * step + 2),
            event("gpu_memcpy", "Copy(D2M)", at + 350, 5, device=0, stream=1, correlation=2 * step + 2, bytes=4),
            *(event(kind, name, at + 100 + n, 270 - 2 * n) for n, (kind, name) in enumerate(waits)),
        ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


XPU, OTHER = ("xpu_runtime", "xpu_driver"), ("privateuse1_runtime", "privateuse1_driver")
PLAIN, CUDA = ("runtime", "runtime"), ("cuda_runtime", "cuda_driver")


@pytest.mark.parametrize(
    ("categories", "launch", "wait", "inner"),
    [
        (XPU, "urEnqueueKernelLaunch", "", "zeEventHostSynchronize"),
        (XPU, "urEnqueueKernelLaunch", "urEventWait", ""),
        (XPU, "urEnqueueKernelLaunch", "urQueueFinish", "zeFenceHostSynchronize"),
        (XPU, "piEnqueueKernelLaunch", "piEventsWait", ""),
        (PLAIN, "clEnqueueNDRangeKernel", "clFinish", ""),
        (PLAIN, "synLaunch", "synStreamSynchronize", ""),
        (OTHER, "musaLaunchKernel", "musaStreamSynchronize", ""),
        (OTHER, "aclrtLaunchKernel", "aclrtSynchronizeStreamWithTimeout", ""),
        (OTHER, "cnrtInvokeKernel", "", "cnrtQueueSync"),
        (CUDA, "cudaLaunchKernel", "cudaStreamSynchronize", "cuStreamSynchronize"),
    ],
)
def test_waits(tmp_path: Path, categories: tuple[str, str], launch: str, wait: str, inner: str) -> None:
    """A wait is found by its name, once for nested calls, with what it waited for and how long."""
    waits = [each for each in zip(categories, (wait, inner), strict=True) if each[1]]
    path = write(tmp_path / "trace.json", categories[0], launch, *waits)
    report = instrument.audit_syncs(path)
    (found,) = report.syncs
    assert ("item", STEPS, STEPS * 270_000, "D2H") == (found.op, found.count, found.blocked_ns, found.direction)
    assert found.cause.startswith(waits[0][1])
    assert dict.fromkeys(range(STEPS), 1) == found.steps
    result = CliRunner().invoke(app, ["syncs", str(path)])
    assert 1 == result.exit_code
    assert "every step waits for the GPU once" in result.output


@pytest.mark.parametrize(
    ("runtime", "launch"), [("mtia_runtime", "runFunction - execute"), ("privateuse1_runtime", "newchipLaunch")]
)
def test_unknown_runtimes(tmp_path: Path, runtime: str, launch: str) -> None:
    """Without a call of a known runtime nothing is claimed: the command names the calls, and ends with 3."""
    path = write(tmp_path / "trace.json", runtime, launch, (runtime, "newchipBarrier"))
    report = instrument.audit_syncs(path)
    assert [] == report.syncs
    assert "does not know which calls of the trace's runtime wait" in report.unavailable_reason
    with pytest.raises(AssertionError, match="nothing could be checked"):
        report.assert_max(9)
    result = CliRunner().invoke(app, ["syncs", str(path)])
    assert 3 == result.exit_code
    assert launch in result.output
    assert "No line makes" not in result.output


def test_calls_of_another_runtime_beside_a_known_one(tmp_path: Path) -> None:
    """Waits of the known runtime are found, and the coverage names the calls that are not known."""
    path = write(
        tmp_path / "trace.json", "cuda_runtime", "newchipLaunch", ("cuda_runtime", "cudaStreamSynchronize")
    )
    report = instrument.audit_syncs(path)
    assert [STEPS] == [found.count for found in report.syncs]
    assert any("newchipLaunch" in sentence for sentence in report.coverage)


def test_a_directory_of_ranks(tmp_path: Path) -> None:
    """A rank that synchronizes too often outweighs one of which nothing is known."""
    write(tmp_path / "rank0.json", "mtia_runtime", "runFunction")
    write(tmp_path / "rank1.json", "cuda_runtime", "cudaLaunchKernel", ("cuda_runtime", "cudaDeviceSynchronize"))
    result = CliRunner().invoke(app, ["syncs", str(tmp_path)])
    assert 1 == result.exit_code
