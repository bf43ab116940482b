from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instrument.read.profilers.rocpd import read_rocpd
from instrument.read.profilers.rocprof import read_rocprof
from instrument.read.tables.intervals import merge_overlaps, total_ns
from instrument.read.tables.table import KERNEL, MEMCPY
from instrument.read.tables.trace import Device, Trace

from ..support.shared_traces import shared
from .rocm_files import STEP, Call, Kernel, Recording, as_json, write_json, write_rocpd

Read = Callable[..., Trace]


def from_json(folder: Path, *recordings: Recording) -> Trace:
    return read_rocprof(write_json(folder / "results.json", recordings))


def from_schema_3(folder: Path, *recordings: Recording) -> Trace:
    return read_rocpd(write_rocpd(folder / "results.db", recordings, 3))


def from_schema_4(folder: Path, *recordings: Recording) -> Trace:
    return read_rocpd(write_rocpd(folder / "results.db", recordings, 4))


@pytest.fixture(params=[from_json, from_schema_3, from_schema_4])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    return lambda *recordings: request.param(tmp_path, *recordings)


def rows(table: Any, *columns: str) -> list[tuple[Any, ...]]:
    texts = {"name", "category"}
    return list(zip(*[table.text(c) if c in texts else table[c].tolist() for c in columns], strict=True))


def start_of(args: dict[str, Any]) -> Any:
    """Return the start of a record in the JSON, of a row of a view, or of a sample."""
    return args.get("start_timestamp", args.get("start", args.get("timestamp")))


def test_gpu_work(read: Read) -> None:
    """Kernels and memcpys have times, device, stream, name and size."""
    trace = read(STEP)
    assert rows(trace.gpu, "name", "category", "start_ns", "duration_ns", "device", "stream", "bytes") == [
        ("before", "kernel", 50, 40, 0, 0, -1),
        ("gemm", "kernel", 1000, 1000, 0, 2, -1),
        ("allreduce", "kernel", 1500, 1500, 1, 5, -1),
        ("Memcpy HtoD (Host -> Device)", "memcpy", 2000, 500, 0, 2, 4096),
        ("Memcpy DtoD (Device -> Device)", "memcpy", 2600, 100, 1, 0, 8),
    ]
    assert (trace.format, trace.epoch_ns, bool(trace.lost)) == ("rocprof", 0, False)
    assert trace.gpu.category.tolist() == [KERNEL, KERNEL, KERNEL, MEMCPY, MEMCPY]


def test_blocks(read: Read) -> None:
    """A grid in work items becomes blocks, rounded up in each dimension."""
    kernels = read(STEP).kernels
    assert rows(kernels, "blocks", "block_threads", "registers", "shared_bytes")[1:] == [
        (4 * 3 * 1, 256, 96, 64),
        (8 * 1 * 2, 128, 32, 0),
    ]
    assert kernels.blocks_per_sm.tolist() == [4 / 304, 12 / 304, 16 / 304]


def test_launches(read: Read) -> None:
    """The launch of a kernel is the HIP call, even if an HSA call inside it has the kernel's id."""
    trace = read(STEP)
    names = trace.runtime.text("name")
    launches = [names[row] if row >= 0 else None for row in trace.gpu.launch.tolist()]
    assert launches == [None, "hipLaunchKernel", "hipLaunchKernel", "hipMemcpyAsync", None]
    assert trace.runtime.correlation[trace.gpu.launch[1:4]].tolist() == [3, 9, 5]
    assert (trace.coverage["launch"].linked, trace.coverage["launch"].of) == (3, 5)
    launched = trace.gpu.where(trace.gpu.launch >= 0)
    assert np.all(trace.runtime.start_ns[launched.launch] <= launched.start_ns)


def test_calls(read: Read) -> None:
    """Calls of every API are runtime calls with their API and thread."""
    trace = read(STEP)
    assert rows(trace.runtime, "name", "category", "start_ns", "duration_ns") == [
        ("hipLaunchKernel", "hip", 300, 100),
        ("hsa_signal_store_screlease", "hsa", 350, 10),
        ("hipMemcpyAsync", "hip", 500, 100),
        ("ncclAllReduce", "rccl", 800, 200),
        ("hipLaunchKernel", "hip", 850, 50),
    ]
    threads = [trace.threads[number] for number in trace.runtime.thread.tolist()]
    assert [(thread.process, thread.thread) for thread in threads] == [(100, 101)] * 4 + [(100, 102)]


def test_markers(read: Read) -> None:
    """Ranges of rocTX are regions and steps, marks and other calls are not."""
    trace = read(STEP)
    assert rows(trace.regions, "name", "start_ns", "duration_ns") == [("forward", 200, 4800)]
    assert rows(trace.steps, "name", "number", "duration_ns") == [("ProfilerStep#3", 3, 8900)]
    assert rows(trace.others, "name", "category", "start_ns")[1:] == [
        ("saved", "mark", 700),
        ("roctxProfilerPause", "roctx", 710),
    ]
    names = trace.regions.text("name")
    assert [names[row] if row >= 0 else None for row in trace.gpu.region.tolist()][:4] == [
        None,
        "forward",
        "forward",
        "forward",
    ]
    assert trace.gpu.step.tolist() == [-1, 0, 0, 0, -1]


def test_operators_of_emit_nvtx(read: Read) -> None:
    """The ranges of torch's emit_nvtx are operators with their sequence number, on ROCm as on CUDA."""
    named = [
        Call("MARKER_CORE_RANGE_API", "roctxThreadRangeA", 100, 900, 1, text="data, op_id = 4"),
        Call("MARKER_CORE_RANGE_API", "roctxThreadRangeA", 200, 800, 2, text="aten::mul, seq = 7, op_id = 5"),
    ]
    trace = read(Recording(calls=named))
    assert trace.regions.text("name") == ["data"]
    assert rows(trace.operators, "name", "start_ns", "sequence") == [("aten::mul", 200, 7)]


def test_allocations(read: Read) -> None:
    """Allocations of HIP are separate from allocations of PyTorch."""
    trace = read(STEP)
    assert rows(trace.others, "category", "start_ns", "duration_ns")[0] == ("memory_allocation", 10, 10)
    assert not trace.memory


def test_counters(read: Read) -> None:
    """The values of a counter's instances are summed for each kernel."""
    counted = (("SQ_WAVES", 1.5), ("SQ_WAVES", 2.0), ("GRBM_COUNT", 7.0))
    kernels = [Kernel("a", 10, 20, 1, counters=counted), Kernel("b", 30, 50, 2, counters=counted[2:])]
    trace = read(Recording(kernels=kernels))
    assert sorted(rows(trace.counters, "start_ns", "duration_ns", "name", "value")) == [
        (10, 10, "GRBM_COUNT", 7.0),
        (10, 10, "SQ_WAVES", 3.5),
        (30, 20, "GRBM_COUNT", 7.0),
    ]


def test_kernels_of_counters(tmp_path: Path) -> None:
    """If only counters were recorded, the trace has their kernels."""
    recording = Recording(kernels=[Kernel("a", 10, 20, 1, stream=3, counters=(("SQ_WAVES", 1.0),))])
    path = tmp_path / "counters.json"
    path.write_text(json.dumps(as_json([recording], dispatches=False)))
    trace = read_rocprof(path)
    assert rows(trace.gpu, "name", "start_ns", "duration_ns", "device") == [("a", 10, 10, 0)]
    assert rows(trace.counters, "name", "value") == [("SQ_WAVES", 1.0)]
    assert trace.args(trace.gpu, 0)["dispatch_data"]["dispatch_info"]["kernel_id"] == 1


def test_queues(read: Read) -> None:
    """Without recorded HIP streams, each queue is a stream."""
    trace = read(Recording(kernels=[Kernel("a", 10, 20, 1, queue=7), Kernel("b", 10, 20, 2, queue=8)]))
    assert trace.gpu.stream.tolist() == [7, 8]


def test_several_processes(read: Read) -> None:
    """Equal ids of two processes stay distinct."""
    one = Recording([Call("HIP_RUNTIME_API", "hipLaunchKernel", 5, 6, 1)], [Kernel("a", 10, 20, 1, stream=3)])
    other = Recording(
        [Call("HIP_RUNTIME_API", "hipMemcpyAsync", 3, 4, 1)],
        [Kernel("b", 30, 50, 1, stream=3), Kernel("c", 60, 70, 2, stream=3)],
        pid=200,
    )
    trace = read(one, other)
    assert trace.gpu.text("name") == ["a", "b", "c"]
    assert [(thread.process, thread.thread) for thread in trace.threads] == [(100, 101), (200, 101)]
    names = trace.runtime.text("name")
    assert [names[row] if row >= 0 else None for row in trace.gpu.launch.tolist()] == [
        "hipLaunchKernel",
        "hipMemcpyAsync",
        None,
    ]
    first, second, third = trace.gpu.stream.tolist()
    assert first == 3 != second == third
    assert [start_of(trace.args(trace.gpu, row)) for row in range(3)] == [10, 30, 60]
    assert len(trace.metadata["processes"]) == 2


def test_devices(read: Read) -> None:
    """GPUs are listed with their properties; CPUs are not."""
    assert read(STEP).devices == [Device(n, "AMD Instinct MI300X", 304, 2048, 3 << 30) for n in (0, 1)]


def test_args(read: Read) -> None:
    """All values of an event can be looked up, also by an unpickled trace."""
    trace = pickle.loads(pickle.dumps(read(STEP)))
    for table in (trace.gpu, trace.runtime, trace.regions, trace.others):
        assert [start_of(trace.args(table, row)) for row in range(len(table))] == table.start_ns.tolist()
    assert 4096 in trace.args(trace.gpu, 3).values()


def test_rank_from_environment(tmp_path: Path) -> None:
    """The environment in a database gives the rank; its other variables are not in the trace."""
    environment = {"RANK": "3", "WORLD_SIZE": "8", "TOKEN": "secret"}
    trace = from_schema_3(tmp_path, Recording(environment=environment))
    assert (trace.rank, trace.world_size) == (3, 8)
    assert "secret" not in repr(trace.metadata)
    assert from_json(tmp_path, STEP).rank is None


def test_thread_names(tmp_path: Path) -> None:
    """A database has the names of threads."""
    assert [thread.name for thread in from_schema_3(tmp_path, STEP).threads] == ["thread 101", "thread 102"]


def test_empty_recording(read: Read) -> None:
    """An empty recording is an empty trace."""
    trace = read(Recording())
    assert not trace.gpu and not trace.runtime and not trace.lost


def test_real_file() -> None:
    """Every number of the real file matches a plain reading of its JSON."""
    path = shared("tl_rocprofv3_908_results.json.gz")
    with gzip.open(path) as file:
        [process] = json.load(file)["rocprofiler-sdk-tool"]
    trace = read_rocprof(path)
    records = process["buffer_records"]["kernel_dispatch"]
    spans = [(record["start_timestamp"], record["end_timestamp"]) for record in records]
    assert len(trace.kernels) == len(trace.gpu) == len(records) == 43_915
    assert int(trace.gpu.duration_ns.sum()) == sum(end - start for start, end in spans)
    assert int(trace.gpu.end_ns.max() - trace.gpu.start_ns.min()) == max(e for _, e in spans) - min(spans)[0]
    assert total_ns(merge_overlaps(trace.gpu.start_ns, trace.gpu.end_ns)) == _covered(spans)

    symbols = {symbol["kernel_id"]: symbol for symbol in process["kernel_symbols"]}
    expected: dict[str, int] = defaultdict(int)
    for record in records:
        name = symbols[record["dispatch_info"]["kernel_id"]]["formatted_kernel_name"]
        expected[name] += record["end_timestamp"] - record["start_timestamp"]
    actual: dict[str, int] = defaultdict(int)
    for name, duration in zip(trace.gpu.text("name"), trace.gpu.duration_ns.tolist(), strict=True):
        actual[name] += duration
    assert expected == actual

    order = sorted(range(len(records)), key=lambda i: (spans[i][0], spans[i][0] - spans[i][1]))
    ordered = [records[i] for i in order]
    assert trace.gpu.correlation.tolist() == [record["correlation_id"]["internal"] for record in ordered]
    assert trace.gpu.stream.tolist() == [record["stream_id"]["handle"] for record in ordered]
    assert trace.gpu.blocks.tolist() == [_blocks(record["dispatch_info"]) for record in ordered]
    assert trace.args(trace.gpu, 4321) == ordered[4321]
    assert (trace.devices[0].name, trace.devices[0].sms, len(trace.devices)) == ("AMD Instinct MI350X", 256, 8)
    assert not trace.lost
    assert trace.coverage["launch"].linked == 0  # recorded without HIP calls


def _covered(spans: list[tuple[int, int]]) -> int:
    total = reach = 0
    for start, end in sorted(spans):
        total += max(end - max(start, reach), 0)
        reach = max(reach, end)
    return total


def _blocks(info: dict[str, Any]) -> int:
    product = 1
    for axis in "xyz":
        product *= -(-info["grid_size"][axis] // info["workgroup_size"][axis])
    return product
