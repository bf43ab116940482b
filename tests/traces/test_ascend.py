"""Traces of an Ascend NPU: torch_npu's trace_view.json."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from instrument.base.errors import TraceError
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_trace
from instrument.read.measures.summary import summarize
from instrument.read.tables.table import KERNEL, MEMCPY
from instrument.read.tables.trace import Device, Thread, Trace
from tests.support.shared_traces import shared

PYTHON, CANN, NPU, HCCL, OVERLAP = 10, 1010, 1020, 1030, 1040
MAIN, QUEUE = 11, 12
EPOCH = 1_736_408_883_000_000  # us
Event = dict[str, Any]


def us(at_ns: int) -> str:
    """Return a time as the profiler writes it: the microseconds since 1970 with three decimals, as text."""
    return f"{EPOCH + at_ns // 1000}.{at_ns % 1000:03}"


def span(name: str, pid: int, tid: int, start: int, end: int, cat: str | None = None, **args: Any) -> Event:
    """Return a complete event; times in ns."""
    category = {"cat": cat} if cat else {}
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": us(start),
        "dur": (end - start) / 1000,
        **category,
        "args": args,
    }


def arrow(start: int, tid: int, work: int) -> Event:
    """Return the arrow from the operator that runs at ``start`` to the work that starts at ``work``."""
    event = {"ph": "s", "cat": "async_npu", "name": "torch_to_npu", "id": EPOCH * 1000 + work}
    return event | {"pid": PYTHON, "tid": tid, "ts": us(start)}


def named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


EVENTS = [
    named("process", PYTHON, 0, "Python"), named("process", CANN, 0, "CANN"),
    named("process", NPU, 0, "Ascend Hardware"), named("process", HCCL, 0, "HCCL"),
    named("process", OVERLAP, 0, "Overlap Analysis"), named("thread", PYTHON, MAIN, "main"),
    named("thread", HCCL, 0, "Group 0 Communication"), named("thread", HCCL, 1, "Plane 0"),
    span("ProfilerStep#7", PYTHON, MAIN, 1_000, 90_000, "cpu_op"),
    span("aten::mm", PYTHON, MAIN, 2_000, 6_000, "cpu_op", **{
        "Sequence number": 5, "Input Dims": "2,3;\r\n3,4;\r\n", "Input type": "float;\r\nfloat;\r\nNone",
    }),
    arrow(3_000, MAIN, 20_001),
    span("mine", PYTHON, MAIN, 10_000, 18_000, "user_annotation"),
    span("aten::to", PYTHON, MAIN, 11_000, 12_000, "cpu_op"),
    arrow(11_500, MAIN, 40_000),
    span("main.py(3): main", PYTHON, MAIN, 1_000, 90_000, "python_function"),
    span("AscendCL@aclnnMm", CANN, QUEUE, 12_000, 14_000, level="acl", connection_id=1),
    span("AscendCL@aclrtMemcpyAsync", CANN, QUEUE, 15_000, 16_000, level="acl", connection_id=2),
    span("Hccl@Launch", CANN, QUEUE, 17_000, 18_000, level="hccl", connection_id=3),
    span("aclnnMm_MatMulCommon_MatMulV2", NPU, 2, 20_001, 30_004, **{"Task Type": "AI_CORE", "connection_id": 1}),
    span("MEMCPY_ASYNC", NPU, 2, 40_000, 50_000, **{"Task Type": "PCIE_DMA_SQE", "connection_id": 2}),
    span("EVENT_WAIT", NPU, 2, 50_000, 80_000, **{"Task Type": "EVENT_WAIT_SQE", "connection_id": 9}),
    span("SDMA", NPU, 4, 51_000, 52_000, **{"Task Type": "SDMA", "connection_id": 3}),
    span("hcom_allReduce__586_0_1", HCCL, 0, 50_000, 80_000, connection_id=3, data_type="FP32", count=4096),
    span("Memcpy", HCCL, 1, 51_000, 52_000),
    span("Computing", OVERLAP, 0, 20_001, 30_004),
    {"ph": "C", "name": "AI Core Freq", "pid": NPU, "tid": 0, "ts": us(5_000), "args": {"MHz": 1800, "unit": "x"}},
]  # fmt: skip


def written(tmp_path: Path, *events: Any) -> Path:
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps([*EVENTS, *events]))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return read_trace(written(tmp_path))


def test_work(trace: Trace) -> None:
    """Kernels, memcpys and collectives are GPU work, to the ns; events and parts of collectives are not."""
    gpu = trace.gpu
    assert gpu.text("name") == ["aclnnMm_MatMulCommon_MatMulV2", "MEMCPY_ASYNC", "hcom_allReduce__586_0_1"]
    assert gpu.category.tolist() == [KERNEL, MEMCPY, KERNEL]
    assert (gpu.start_ns - EPOCH * 1000).tolist() == [20_001, 40_000, 50_000]
    assert (gpu.duration_ns.tolist(), gpu.stream.tolist()) == ([10_003, 10_000, 30_000], [2, 2, -1])
    assert (gpu.text("collective")[2], gpu.text("dtype")[2], int(gpu.elements_in[2])) == (
        "allreduce",
        "FP32",
        4096,
    )
    assert gpu.text("family") == ["gemm", "memory", "collective"]
    assert {*trace.others.text("name")} == {"EVENT_WAIT", "SDMA", "Memcpy", "Computing"}
    assert (trace.format, trace.devices, bool(trace.lost)) == ("ascend", [Device(0, "Ascend NPU")], False)
    numbers = metrics(trace)
    parts = [numbers[name] for name in ("compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")]
    assert (parts, sum(parts)) == ([10_003, 30_000, 10_000, 9_996], numbers["span_ns"])


def test_links(trace: Trace) -> None:
    """Work belongs to the CANN call that launched it, and to the operator and region that asked for it."""
    gpu, operators = trace.gpu, trace.operators
    launches, names = trace.runtime.text("name"), operators.text("name")
    assert [launches[row] for row in gpu.launch.tolist()] == ["aclnnMm", "aclrtMemcpyAsync", "Launch"]
    assert [names[row] if row >= 0 else "" for row in gpu.operator.tolist()] == ["aten::mm", "aten::to", ""]
    assert gpu.region.tolist() == [-1, 0, 0]
    assert (gpu.step.tolist(), trace.steps.number.tolist()) == ([0, 0, 0], [7])
    assert trace.coverage["operator"].linked == 2
    assert {trace.threads[number] for number in trace.runtime.thread.tolist()} == {Thread(PYTHON, QUEUE)}
    assert summarize(trace).regions[0].gpu_ns == 40_000


def test_cpu(trace: Trace) -> None:
    """Operators have shapes and types as torch.profiler writes them; frames, counters and args are read."""
    mm = trace.operators.text("name").index("aten::mm")
    assert json.loads(trace.operators.text("shapes")[mm]) == [[2, 3], [3, 4], []]
    assert json.loads(trace.operators.text("types")[mm]) == ["float", "float", "None"]
    assert int(trace.operators.sequence[mm]) == 5
    assert trace.frames.text("name") == ["main.py(3): main"]
    assert (trace.counters.text("name"), trace.counters.value.tolist()) == (["AI Core Freq: MHz"], [1800])
    copy = pickle.loads(pickle.dumps(trace))
    assert copy.args(copy.gpu, 1) == {"Task Type": "PCIE_DMA_SQE", "connection_id": 2}


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "name": "k", "pid": NPU, "tid": 2, "ts": "soon", "dur": 1},
        {"ph": "X", "name": "k", "pid": NPU, "tid": 2, "ts": 1e300, "dur": 1},
        {"ph": "X", "name": "k", "pid": NPU, "tid": 2, "ts": us(1), "dur": "-"},
        {"ph": "X", "name": "k", "pid": NPU, "tid": 2, "ts": "9" * 400, "dur": 1},
    ],
)
def test_impossible_times(tmp_path: Path, event: dict[str, Any]) -> None:
    """An event whose time is no time is lost, and counted."""
    trace = read_trace(written(tmp_path, event))
    assert (len(trace.gpu), trace.lost.events) == (3, 1)


@pytest.mark.parametrize(
    "event",
    [
        span("k", NPU, 2, 60_000, 61_000, **{"Task Type": "AI_CORE", "connection_id": "9" * 40}),
        span("k", NPU, 2, 60_000, 61_000, **{"Task Type": "AI_CORE", "connection_id": [1]}),
        {"ph": "s", "cat": "async_npu", "name": "x", "id": "9" * 40, "pid": PYTHON, "tid": MAIN, "ts": us(1)},
        {"ph": "X", "name": "k", "pid": "new", "tid": "x", "ts": us(1), "dur": 1, "args": [1]},
        span("aten::x", PYTHON, MAIN, 1, 2, "cpu_op", **{"Input Dims": "(,;;9,x"}),
    ],
)
def test_odd_values(tmp_path: Path, event: dict[str, Any]) -> None:
    """Odd values are unknown, and cost no other event."""
    trace = read_trace(written(tmp_path, event))
    assert len(trace.gpu) >= 3 and not trace.lost


def test_damaged_file(tmp_path: Path) -> None:
    """A file that is cut off is read as far as it goes, without the NPU, which is no error of its own."""
    text = written(tmp_path).read_text()
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    trace = read_trace(tmp_path / "cut.json")
    assert trace.lost and len(trace.operators) > 0
    (tmp_path / "none.json").write_text('["Ascend Hardware"')
    with pytest.raises(TraceError):
        read_trace(tmp_path / "none.json")


def test_real_trace() -> None:
    """The sums are those that CANN computed itself, but for the rounding of each of its intervals to the ns."""
    path = shared("npu/ascend_level1_rank0_trace_view.json")
    trace = read_trace(path)
    own = {"Computing": 0, "Communication": 0, "Communication(Not Overlapped)": 0}
    for event in json.loads(path.read_text()):
        if event["name"] in own:
            own[event["name"]] += round(event["dur"] * 1000)
    numbers = metrics(trace)
    found = [numbers[name] for name in ("compute_ns", "comm_ns", "exposed_comm_ns")]
    assert found == pytest.approx(list(own.values()), abs=100)
    assert (numbers["kernels"], numbers["memcpys"], len(trace.runtime)) == (191, 24, 707)
    assert (trace.coverage["launch"].linked, trace.coverage["operator"].linked) == (215, 210)
    assert trace.steps.number.tolist() == [50]
