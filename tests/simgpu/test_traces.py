"""What torch.profiler writes is what the device did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


def recorded(step: Callable[[], object], folder: Path) -> tuple[list[dict[str, Any]], list[simgpu.Entry]]:
    """Return the events of a recording, their times in ns, and the log of the same time."""
    with simgpu.log() as entries, profile() as recording:
        step()
        torch.cuda.synchronize()
    path = folder / "trace.json"
    recording.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(), parse_float=str)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    for event in events:
        event["start"] = int(trace["baseTimeNanoseconds"]) + nanoseconds(event["ts"])
        event["duration"] = nanoseconds(event["dur"])
    return events, entries


def nanoseconds(microseconds: str | int) -> int:
    """Convert without a float, which has not the digits."""
    whole, _, fraction = str(microseconds).partition(".")
    return int(whole) * 1000 + int(fraction.ljust(3, "0"))


def training_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 32).to("cuda")).sum().backward()
        optimizer.step()


def test_a_trace_has_each_work_of_the_log_to_the_nanosecond(tmp_path: Path) -> None:
    training_step()

    events, entries = recorded(training_step, tmp_path)

    category = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
    seen = {event["args"]["correlation"]: event for event in events if event["cat"] in category}
    done = {entry.correlation: entry for entry in entries if entry.kind in category.values()}
    assert seen.keys() == done.keys()
    offsets = set()
    for correlation, entry in done.items():
        event = seen[correlation]
        assert category[event["cat"]] == entry.kind
        assert entry.kind != "kernel" or event["name"] == entry.name
        assert (event["args"]["device"], event["args"]["stream"]) == (entry.device, entry.stream)
        assert abs(event["duration"] - entry.duration) <= 1
        offsets.add(event["start"] - entry.start)
    # Both clocks are the same TSC; each reading of what it is in CLOCK_REALTIME is off by up to a microsecond.
    assert max(offsets) - min(offsets) <= 2
    assert abs(max(offsets)) < 10_000


def test_each_of_many_recordings_has_as_many_kernels_as_launches(tmp_path: Path) -> None:
    for _ in range(8):
        events, entries = recorded(training_step, tmp_path)

        launches = {event["args"]["correlation"] for event in events if event["name"] == "cudaLaunchKernel"}
        kernels = {event["args"]["correlation"] for event in events if event["cat"] == "kernel"}
        assert launches == kernels
        assert len(launches) == sum(entry.kind == "kernel" for entry in entries)


def test_a_synchronization_is_recorded_as_long_as_it_blocked(tmp_path: Path) -> None:
    torch.cuda.synchronize()

    events, entries = recorded(lambda: torch.cuda._sleep(10_000_000), tmp_path)

    calls = [event for event in events if event["name"] == "cudaDeviceSynchronize"]
    call = max(calls, key=lambda event: event["duration"])
    wait = max((entry for entry in entries if entry.kind == "wait_device"), key=lambda entry: entry.duration)
    assert abs(call["duration"] - (wait.returned - wait.start)) < 1_000_000
    assert call["duration"] >= wait.end - wait.start
