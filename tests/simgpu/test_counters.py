"""Counters of the GPU as torch 2.14 writes them: its own code makes the files, of samples made here."""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from instrument.read.jobs.read import read_trace
from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the CUDA build of torch: make gpu-sim"),
]
BASE = 1_795_954_026_000_000_000
NAMES = {
    "Power (W)": ("W", 650.0),
    "Temperature (C)": ("C", 61.0),
    "SM Clock (MHz)": ("MHz", 1980.0),
    "Memory Clock (MHz)": ("MHz", 2619.0),
    "Fan Speed (%)": ("%", 40.0),
    "SM Active (%)": ("%", 75.0),
    "DRAM BW (%)": ("%", 50.0),
    "HBM Read (%)": ("%", 30.0),
    "dram__bytes.sum.per_second": ("B/s", 2e12),
}


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return torch's code, with a stand-in for the package cupti-python, of which it reads two lists of calls."""
    pytest.importorskip("torch.profiler._cupti")
    calls = IntEnum("calls", ["NONE"])
    package, cupti = ModuleType("cupti"), ModuleType("cupti.cupti")
    vars(cupti).update(Driver_api_trace_cbid=calls, Runtime_api_trace_cbid=calls)
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", cupti)
    from torch.profiler._cupti import monitor_trace

    return monitor_trace


def window() -> dict[str, Any]:
    """Return what torch samples of two GPUs, in turns: the environment packs two numbers of 32 bits into one."""
    times, kinds = BASE + 1_000_000 * np.arange(10), [3, 2, 1, 4]
    data = [650_000 | 700_000 << 32, 61, 1980 | 2619 << 32, 40]
    device = np.arange(10) % 2
    metrics = {
        "sm__cycles_active.avg.pct_of_peak_sustained_elapsed": 75.0,
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 50.0,
        "dram__read_throughput.avg.pct_of_peak_sustained_elapsed": 30.0,
        "dram__bytes.sum.per_second": 2e12,
    }
    return {
        "columns": {
            "environment": {
                "start_ns": np.repeat(times, 4),
                "device_id": np.repeat(device, 4),
                "environment_kind": np.tile(kinds, 10),
                "data": np.tile(np.array(data, np.uint64), 10),
            },
            "pm_sampling": {"start_ns": times, "device_id": device}
            | {name: np.full(10, value) for name, value in metrics.items()},
        }
    }


@pytest.mark.parametrize("kind", ["json", "json.gz", "pftrace"])
def test_counters(tmp_path: Path, writer: Any, kind: str) -> None:
    """Each counter has torch's name, its unit, its device, its times and its values."""
    if kind == "pftrace":
        pytest.importorskip("google.protobuf")
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.0, "dur": 20_000.0}
    recorded, path = tmp_path / "cpu.json", tmp_path / f"trace.{kind}"
    listed = [operator | {"args": {"External id": 1}}]
    recorded.write_text(json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": listed}))
    writer.merge_trace_window_into_chrome_trace(recorded, path, window())
    found = read_trace(path).counters
    assert {*found.text("name")} == {*NAMES}
    for name, (unit, value) in NAMES.items():
        rows = found.where(np.array(found.text("name")) == name)
        assert rows.value.tolist() == [value] * 10
        assert {*rows.text("unit")} == {unit}
        assert rows.device.tolist() == [0, 1] * 5
        assert (rows.start_ns - rows.start_ns[0]).tolist() == (1_000_000 * np.arange(10)).tolist()
