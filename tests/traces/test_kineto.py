"""Every column of every table equals the `json` module's reading of the same file."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from instrument.read.kineto import chunks, text
from instrument.read.kineto.kineto import read_kineto
from instrument.read.tables.table import COLUMNS
from instrument.read.tables.trace import Device, Trace

from ..support.kineto_oracle import check_columns, events_of
from ..support.kineto_text import STYLES, Event, events, ordinary, since_1970, written
from ..support.shared_traces import shared

SAMPLES = [
    "deepseek_train_h800.json.gz",
    "hta_alexnet_cudasync.json.gz",
    "hta_event_sync_multistream.json.gz",
    "hta_gpu_user_annotation.json.gz",
    "hta_large_integer.json.gz",
    "hta_nccl_data.json.gz",
    "hta_ns_resolution.json.gz",
    "kineto_docs_after_fix.json",
    "kineto_docs_before_fix.json",
    "malformed_bare_array.json",
    *(f"param_dlrm_8rank_r{rank}.json.gz" for rank in range(8)),
    "tl_h100_bert_small.json.gz",
    "tl_h100_qwen05b.json.gz",
    "tl_mi300_bert_small.json.gz",
    "tl_torch_compile_triton.json.gz",
    "tl_vllm_decode_full_cudagraph.json.gz",
]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def check_args(trace: Trace, events: list[Event], rows: int = 20) -> None:
    """The args of some rows of each table match their events."""
    chosen = random.Random(0)
    for kind in COLUMNS:
        table = getattr(trace, kind)
        for row in chosen.sample(range(len(table)), min(rows, len(table))):
            args = events[int(table.event[row])].get("args")
            expected = json.loads(json.dumps(args, default=float)) if isinstance(args, dict) else {}
            assert expected == trace.args(table, row)


@pytest.mark.parametrize("name", SAMPLES)
def test_real_traces(name: str) -> None:
    """Nothing of a real trace is lost, and each value matches the file, times to the ns."""
    path = shared(name)
    trace, events = read_kineto(path), events_of(path)
    assert not trace.lost
    check_columns(trace, events)
    check_args(trace, events, rows=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=events() | events(times=since_1970) | events(phases="X", max_size=40),
    style=st.sampled_from(STYLES),
    block=st.sampled_from([2, 7, 50, 300, 1 << 20]),
    packed=st.booleans(),
)
def test_random_traces(folder: Path, events: list[Event], style: str, block: int, packed: bool) -> None:
    """Random events are read correctly, with any formatting and any block size."""
    data = written(events, style=style)
    path = write(folder / "trace.json", gzip.compress(data, 1) if packed else data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK", block)
        trace = read_kineto(path)
        assert not trace.lost
        check_columns(trace, events)
        check_args(trace, events)
    if style != "array":
        assert (3, 8) == (trace.rank, trace.world_size)


def test_events_longer_than_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event whose args hold 100,000 objects that look like events is read."""
    monkeypatch.setattr(text, "BLOCK", 10_000)
    monkeypatch.setattr(chunks, "BLOCK", 10_000)
    listed = ordinary(3)
    listed[1]["args"]["frames"] = [{"name": "a", "ph": 1}, {"id": 2}] * 50_000
    trace = read_kineto(write(tmp_path / "trace.json", written(listed)))
    assert not trace.lost
    check_columns(trace, listed)
    check_args(trace, listed)


def test_times_since_1970_are_exact(tmp_path: Path) -> None:
    """Decimals of a time count even if a float cannot represent them."""
    path = write(tmp_path / "t.json", b'[{"ph":"X","cat":"kernel","ts":1712195495406752.103,"dur":0.5}]')
    assert [1712195495406752103] == read_kineto(path).gpu.start_ns.tolist()


def test_metadata_before_and_after(tmp_path: Path) -> None:
    """Keys before and after the events are metadata, from which devices and ranks are read."""
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": ordinary(1),
        "deviceProperties": [{"id": 0, "name": "H100", "numSms": 132, "maxThreadsPerMultiprocessor": 2048}, 7],
        "distributedInfo": {"rank": 5, "world_size": 16},
        "baseTimeNanoseconds": 1_751_410_836_000_000_000,
    }
    trace = read_kineto(write(tmp_path / "t.json", json.dumps(content, default=float).encode()))
    assert [Device(0, "H100", 132, 2048), Device(0)] == trace.devices
    assert (5, 16, 1_751_410_836_000_000_000) == (trace.rank, trace.world_size, trace.epoch_ns)
    assert "ms" == trace.metadata["displayTimeUnit"]
    assert not trace.lost


def test_order_does_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with equal start and duration keep the order of the file, also across categories."""
    categories = ("cuda_driver", "cuda_runtime") * 3
    listed = [
        {"ph": "X", "cat": category, "name": str(number), "ts": 1} for number, category in enumerate(categories)
    ]
    path = write(tmp_path / "t.json", written(listed))
    for block in (1 << 20, 20):
        monkeypatch.setattr(text, "BLOCK", block)
        assert ["0", "1", "2", "3", "4", "5"] == read_kineto(path).runtime.text("name")


def test_huge_numbers(tmp_path: Path) -> None:
    """Integers and steps beyond 64 bits, and counters beyond a float, are unknown and not errors."""
    big = "9" * 400
    listed = [
        f'{{"ph":"X","cat":"kernel","ts":1,"args":{{"device":{2**40},"registers per thread":{big},"stream":7}}}}',
        f'{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{big}","ts":1}}',
        f'{{"ph":"C","name":"c","ts":1,"args":{{"a":{big},"b":2}}}}',
        f'{{"ph":"X","cat":"cpu_op","ts":1,"args":{{"x":{"9" * 5000}}}}}',
    ]
    trace = read_kineto(write(tmp_path / "t.json", f"[{','.join(listed)}]".encode()))
    assert not trace.lost
    assert (-1, -1, 7) == (trace.gpu.device[0], trace.gpu.registers[0], trace.gpu.stream[0])
    assert (0, 1) == (len(trace.steps), len(trace.regions))
    assert [("c: b", 2.0)] == list(zip(trace.counters.text("name"), trace.counters.value.tolist(), strict=True))
    assert {} == trace.args(trace.operators, 0)


def test_args_after_pickling_and_deletion(tmp_path: Path) -> None:
    """An unpickled trace looks up args; without the file this raises FileNotFoundError."""
    listed = ordinary(9)
    path = write(tmp_path / "t.json.gz", gzip.compress(written(listed)))
    trace = pickle.loads(pickle.dumps(read_kineto(path)))
    check_columns(trace, listed)
    check_args(trace, listed)
    again = pickle.loads(pickle.dumps(trace))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        again.args(again.gpu, 0)
    with pytest.raises(IndexError, match="from 0 to 8: 9"):
        again.look_up(9)


# Recordings of this torch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("inner"):
            return self.linear(x).relu()


@pytest.fixture(scope="module")
def recorded(folder: Path) -> tuple[Any, Trace, list[Event]]:
    """Return a profile with all options on, the trace read from its file, and the file's events."""
    model = torch.nn.Sequential(Block(), Block())
    model(torch.ones(2, 8)).sum().backward()  # warm-up, not recorded
    options = {"with_stack": True, "record_shapes": True, "profile_memory": True, "with_modules": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as prof:
        for _ in range(3):
            with record_function("outer"):
                model(torch.ones(2, 8)).sum().backward()
    path = folder / "recorded.json"
    prof.export_chrome_trace(str(path))
    return prof, read_kineto(path), events_of(path)


def test_recorded_trace(recorded: tuple[Any, Trace, list[Event]]) -> None:
    """Operators and regions of a recorded trace match the profiler's own events."""
    prof, trace, listed = recorded
    assert not trace.lost
    check_columns(trace, listed)
    check_args(trace, listed)
    profiled = Counter(event.name for event in prof.events() if event.name != "[memory]")
    read = Counter(trace.operators.text("name") + trace.regions.text("name"))
    # torch itself leaves out an operator that is the only child of its namesake.
    assert all(0 < profiled[name] <= count for name, count in read.items())
    assert all(profiled[name] == read[name] for name in ("aten::addmm", "aten::relu", "outer", "inner"))
    assert {"aten::addmm", "aten::relu", "outer", "inner"} <= read.keys()
    for event in prof.events():
        if event.name in ("outer", "inner"):
            durations = trace.regions.duration_ns[trace.regions.name == trace.strings.index(event.name)]
            assert min(abs(durations / 1000 - event.cpu_time_total)) < 0.01
    assert len(trace.memory)
    assert any(name.startswith("nn.Module: Block") for name in trace.frames.text("name"))


def test_recorded_nesting(recorded: tuple[Any, Trace, list[Event]]) -> None:
    """Each inner region lies in an outer one."""
    _, trace, _ = recorded
    names = trace.regions.text("name")
    parents = [names[row] if row >= 0 else None for row in trace.regions.parent.tolist()]
    assert {("outer", None): 3, ("inner", "outer"): 6} == Counter(zip(names, parents, strict=True))
