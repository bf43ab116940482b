"""In old traces, the range of a DataLoader is an operator, and nothing says which thread runs the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instrument.explain.diagnosis.diagnose import diagnose

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def operator(name: str, at: int, took: int, id: int, thread: str = "100") -> dict[str, Any]:
    place = {"pid": 7, "tid": thread, "ts": at, "dur": took}
    return {"ph": "X", "cat": "Operator", "name": name, "args": {"External id": id}} | place


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a trace of six batches that take 7 ms to load, and 2.1 ms to compute."""
    events: list[dict[str, Any]] = []
    for n in range(6):
        at, ids = 1000 + 9100 * n, {"External id": 11 + 2 * n, "correlation": n + 1}
        call = operator("cudaLaunchKernel", at + 7010, 10, 0) | {"cat": "Runtime", "args": ids}
        kernel = {"ph": "X", "cat": "Kernel", "name": "gemm", "pid": 0, "tid": "stream 7", "ts": at + 7030}
        events += [
            operator(LOADER, at, 7000, 10 + 2 * n),
            operator("aten::mm", at + 7000, 100, 11 + 2 * n),
            operator("aten::randn", at, 100, 100 + n, thread="200"),  # of a thread that loads
            call,
            kernel | {"dur": 2000, "args": ids | {"device": 0, "stream": 7}},
        ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return file


def test_waiting_for_input(path: Path) -> None:
    """The time in the DataLoader is waiting for input, and a replay can leave it out."""
    found = diagnose(path)
    assert found.bound == "input"
    assert found.parts["input"] == 6 * 7_000_000
    assert "input-wait" in {each.rule for each in found.findings}
    assert found.what_if(without=["dataloader"]).step_ns < 6 * 2_200_000
