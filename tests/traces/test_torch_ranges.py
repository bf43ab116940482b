"""Operators of PyTorch among the named ranges of Nsight Systems and rocprofv3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.jobs.read import read_trace
from instrument.read.profilers.nsight import read_nsight
from instrument.read.tables.links import split_off_operators
from instrument.read.tables.table import Strings
from instrument.read.tables.trace import Trace
from tests.support.shared_traces import shared

from .nsys_report import Database, thread

TID = thread(42, 43)
PYPROF = {
    "mod": "torch", "op": "conv2d", "args": [
        {"name": "", "type": "tensor", "shape": (8, 3, 32, 32), "dtype": "float16"},
        {"name": "", "type": "tensor", "shape": (4, 3, 3, 3), "dtype": "float16"},
        {"name": "stride", "type": "int", "value": 2},
    ],
}  # fmt: skip


def read(tmp_path: Path, *texts: str) -> Trace:
    """Return the trace of a report with these ranges, each inside the one before it."""
    database = Database()
    for number, text in enumerate(texts):
        database.span(text, number, 1000 - number, TID)
    return read_nsight(database.write(tmp_path / "made.sqlite"))


@pytest.mark.parametrize(
    ("text", "name", "sequence", "shapes"),
    [
        ("aten::mul, seq = 45328, op_id = 990726", "aten::mul", 45328, ""),
        ("aten::mul, op_id = 990726", "aten::mul", -1, ""),
        ("aten::mul, seq = 5", "aten::mul", 5, ""),
        ("aten::empty.memory_format", "aten::empty.memory_format", -1, ""),
        ("aten::add, op_id = 7, sizes = [[4], []], input_op_ids = [[1, 0], []]", "aten::add", -1, "[[4], []]"),
        ("AddmmBackward0, seq = 3, op_id = 20", "AddmmBackward0", 3, ""),
        ("FlashAttnFunc, seq = 3, op_id = 20", "FlashAttnFunc", 3, ""),
        ("flash_attn::_flash_attn_forward, op_id = 2", "flash_attn::_flash_attn_forward", -1, ""),
        ("record_param_comms, op_id = 2", "record_param_comms", -1, ""),
        ("detach_, op_id = 2", "detach_", -1, ""),
        (
            "autograd::engine::evaluate_function: MmBackward0, seq = 5, op_id = 7",
            "autograd::engine::evaluate_function: MmBackward0", 5, "",
        ),
        (str(PYPROF), "torch.conv2d", -1, "[[8, 3, 32, 32], [4, 3, 3, 3]]"),
    ],
)  # fmt: skip
def test_operators(tmp_path: Path, text: str, name: str, sequence: int, shapes: str) -> None:
    """Operators are rows of `operators`, and GPU work is linked to them."""
    database = Database()
    database.span("mine", 0, 1000, TID)
    database.span(text, 100, 900, TID)
    database.call("cudaLaunchKernel", 200, 210, TID, 1)
    database.kernel("k", 300, 400, correlationId=1, globalPid=TID & ~0xFFFFFF)
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    assert trace.regions.text("name") == ["mine"]
    assert trace.operators.text("name") == [name]
    assert (trace.operators.sequence.tolist(), trace.operators.text("shapes")) == ([sequence], [shapes])
    assert (trace.gpu.operator.tolist(), trace.gpu.region.tolist()) == ([0], [0])
    assert trace.args(trace.operators, 0)["start"] == 100


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("data, op_id = 5", "data"),
        ("FSDP::pre_forward (blocks.3), op_id = 990", "FSDP::pre_forward (blocks.3)"),
        ("FSDP::root_pre_forward, op_id = 990", "FSDP::root_pre_forward"),
        ("nccl:all_to_all, op_id = 5", "nccl:all_to_all"),
        ("Optimizer.step#SGD.step, op_id = 5", "Optimizer.step#SGD.step"),
        ("my::region", "my::region"),
        ("loss, seq = of mine", "loss, seq = of mine"),
        ("sizes, sizes = [[1]]", "sizes, sizes = [[1]]"),
        ("{'mod': 'LSTM', 'strRepr': '64, 128'}", "LSTM(64, 128)"),
        ("{'traceMarker': ['/usr/lib/a.py:3', '/home/me/train.py:12']}", "train.py:12"),
        ("{'traceMarker': ['C:\\\\me\\\\train.py:12']}", "train.py:12"),
        ("{'traceMarker': []}", "{'traceMarker': []}"),
        ("{'my': 'region'}", "{'my': 'region'}"),
        ("{'mod': open('/etc/passwd').read()}", "{'mod': open('/etc/passwd').read()}"),
        ("{'" + "(" * 3000, "{'" + "(" * 3000),
    ],
)
def test_regions(tmp_path: Path, text: str, name: str) -> None:
    """Regions of the program stay regions, without what torch or pyprof appends."""
    trace = read(tmp_path, text)
    assert (trace.regions.text("name"), len(trace.operators)) == ([name], 0)
    if "traceMarker" in text and name != text:
        assert trace.regions.text("payload")[0].endswith("train.py:12")


def test_lines_of_pyprof(tmp_path: Path) -> None:
    """A line of the program has the GPU time of the operators inside it."""
    trace = read(tmp_path, "{'traceMarker': ['/home/me/train.py:12']}", str(PYPROF))
    assert trace.regions.text("payload") == ["/home/me/train.py:12"]
    assert json.loads(trace.operators.text("types")[0]) == ["float16", "float16"]


@given(st.lists(st.text() | st.sampled_from(["a, seq = 1", "aten::b", "{'mod': 'c'", ", op_id = 9"]), max_size=9))
def test_any_text(texts: list[str]) -> None:
    """Every range is a region or an operator, whatever its text."""
    strings = Strings()
    times = np.arange(len(texts))
    names = np.array([strings[text] for text in texts], np.int64)
    columns: dict[str, Any] = {
        "regions": {"name": names, "start_ns": times, "duration_ns": times, "event": times, "thread": times}
    }
    split_off_operators(columns, strings)
    events = [event for kind in columns.values() for event in kind["event"].tolist()]
    assert sorted(events) == times.tolist()


@pytest.mark.parametrize(
    ("name", "operators", "regions"), [("mfu_2gpu_before", 53, 40), ("h100_2gpu_1s", 74, 102)]
)
def test_real_reports(name: str, operators: int, regions: int) -> None:
    """Thousands of names are the few operators and regions that were meant."""
    trace = read_trace(shared(f"nsys/{name}.sqlite"))
    assert (len({*trace.operators.text("name")}), len({*trace.regions.text("name")})) == (operators, regions)
    assert not any(", op_id = " in text for text in trace.regions.text("name") + trace.operators.text("name"))
