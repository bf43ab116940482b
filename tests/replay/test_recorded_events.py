"""Waits for events that CUPTI recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from instrument.explain.replay.gpu_waits import find_event_waits, gpu_order, recorded_waits
from instrument.explain.replay.replay import Replayer
from instrument.read.jobs.read import read_trace
from tests.support.shared_traces import shared


def call(name: str, ts: int, number: int, dur: int = 2) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1} | {
        "args": {"correlation": number}
    }


def kernel(ts: int, dur: int, stream: int, number: int) -> dict[str, Any]:
    args = {"correlation": number, "device": 0, "stream": stream}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "pid": 0, "tid": stream, "args": args}


def sync(name: str, ts: int, number: int, stream: int, awaited: int, record: int) -> dict[str, Any]:
    args = {"correlation": number, "device": 0, "stream": stream, "wait_on_stream": awaited}
    return {"ph": "X", "cat": "cuda_sync", "name": name, "ts": ts, "dur": 1, "pid": 0, "tid": stream} | {
        "args": args | {"wait_on_cuda_event_record_corr_id": record}
    }


def test_recorded_waits(tmp_path: Path) -> None:
    """Stream 9 and then the thread wait for the first kernel on stream 8, not for the one launched last."""
    events = [
        call("cudaLaunchKernel", 0, 1), kernel(10, 300, 8, 1),
        call("cudaEventRecord", 3, 2),
        call("cudaLaunchKernel", 6, 3), kernel(16, 5, 7, 3),
        call("cudaStreamWaitEvent", 9, 4), sync("Stream Wait Event", 9, 4, 9, 8, 2),
        call("cudaLaunchKernel", 12, 5), kernel(312, 20, 9, 5),
        call("cudaEventSynchronize", 15, 6, 298), sync("Event Sync", 15, 6, -1, 8, 2),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    rows = {stream: row for row, stream in enumerate(trace.gpu.stream.tolist())}
    order = gpu_order(trace)
    assert [wait.target for wait in recorded_waits(trace, order)] == [rows[8], rows[8]]
    assert find_event_waits(trace, order).tolist() == [[rows[9], rows[8]]]
    replayer = Replayer(trace)
    assert (replayer.unchanged.times_ns == replayer.graph.recorded_ns).all()


def test_recorded_waits_of_a_real_trace() -> None:
    """In a real trace, a kernel on one stream waits for the event after a kernel on another."""
    trace = read_trace(shared("hta_event_sync_multistream.json.gz"))
    ((work, target),) = find_event_waits(trace, gpu_order(trace)).tolist()
    assert (trace.gpu.stream[work], trace.gpu.stream[target]) == (24, 20)
