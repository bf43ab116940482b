"""Perfetto's binary traces, as torch.profiler and rocprofv3 write them."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from instrument.base.errors import TraceError
from instrument.read.jobs.read import read_trace
from tests.support.protobuf import message

BASE = 1_795_954_026_000_000_000
Args = dict[str, "int | str | list[int]"]
Row = tuple[str, int, int, Args]  # name, begin and end in ns, arguments


def packet(*fields: tuple[int, int | str | bytes]) -> bytes:
    return message((1, message(*fields)))


def thread(uuid: int, pid: int, tid: int, name: str) -> bytes:
    return packet((60, message((1, uuid), (4, message((1, pid), (2, tid), (5, name))))))


def annotation(name: str, value: int | str | list[int]) -> tuple[int, bytes]:
    if isinstance(value, list):
        return 4, message((10, name), *((12, message((4, each))) for each in value))
    return 4, message((10, name), (4 if isinstance(value, int) else 6, value))


def group(track: int, rows: Sequence[Row], names: Sequence[str], category: int = 0) -> bytes:
    """Return slices as torch writes them: all begins, then all ends."""
    out = b""
    for name, begin, _, args in rows:
        own = [annotation(*item) for item in args.items()]
        kinds = [(3, category)] * bool(category)
        event = message(*kinds, *own, (9, 1), (10, names.index(name) + 1), (11, track))
        out += packet((8, BASE + begin), (10, 1), (11, event))
    for _, _, end, _ in rows:
        out += packet((8, BASE + end), (10, 1), (11, message((9, 2), (11, track))))
    return out


def torch_trace(categories: Sequence[str] = ()) -> bytes:
    operators: list[Row] = [("ProfilerStep#3", 0, 9000, {}), ("aten::mm", 100, 4000, {"External id": 5})]
    calls: list[Row] = [("cudaLaunchKernel", 300, 900, {"cbid": 211, "correlation": 7})]
    sizes: Args = {"grid": [4, 2, 1], "block": [64, 1, 1]}
    work: list[Row] = [
        ("gemm", 2000, 3000, {"device": 0, "stream": 7, "correlation": 7} | sizes),
        ("Memcpy HtoD (Pinned -> Device)", 3000, 3500, {"device": 0, "stream": 7, "bytes": 64, "correlation": 8}),
    ]
    names = [row[0] for row in [*operators, *calls, *work]]
    interned = [(2, message((1, place), (2, name))) for place, name in enumerate(names, 1)]
    interned += [(1, message((1, place), (2, name))) for place, name in enumerate(categories, 1)]
    numbers = range(1, len(categories) + 1) if categories else [0] * 4
    out = thread(1, 40, 41, "python") + thread(2, 0, 7, "stream 7")
    out += packet((10, 1), (13, 1), (12, message(*interned)))
    out += group(1, operators[:1], names, numbers[0]) + group(1, operators[1:], names, numbers[1])
    return out + group(1, calls, names, numbers[2]) + group(2, work, names, numbers[3] if categories else 0)


@pytest.mark.parametrize("categories", [(), ("user_annotation", "cpu_op", "cuda_runtime", "kernel")])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_torch(tmp_path: Path, categories: Sequence[str], pack: type[bytes]) -> None:
    """Steps, operators, calls and GPU work with its launch, to the nanosecond; the file may be gzip."""
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(pack(torch_trace(categories)))
    trace = read_trace(path)
    assert (trace.format, trace.epoch_ns, bool(trace.lost)) == ("perfetto", BASE, False)
    assert (trace.steps.number.tolist(), trace.steps.duration_ns.tolist()) == ([3], [9000])
    assert (trace.operators.text("name"), trace.operators.start_ns.tolist()) == (["aten::mm"], [100])
    assert (trace.gpu.start_ns.tolist(), trace.gpu.duration_ns.tolist()) == ([2000, 3000], [1000, 500])
    assert (trace.gpu.blocks.tolist()[0], trace.gpu.bytes.tolist()[1], trace.gpu.stream.tolist()) == (
        8,
        64,
        [7, 7],
    )
    assert (trace.gpu.operator.tolist()[0], trace.gpu.launch.tolist(), trace.gpu.step.tolist()[0]) == (
        0,
        [0, -1],
        0,
    )
    assert trace.threads[0].name == "python"
    assert trace.args(trace.gpu, 0) == {}


def counter(gpu: int, iid: int, number: int, at: int, value: float | int) -> bytes:
    """Return a value of a counter as torch writes it."""
    own = message((1, number), (3 if isinstance(value, float) else 2, value))
    return packet((8, BASE + at), (10, 1), (52, message((4, iid), (2, own))))


def test_counters(tmp_path: Path) -> None:
    """The counters of each GPU have their name, their unit and their device; those without a name are left out."""
    specs = [
        message((1, number), (2, name)) for number, name in enumerate(("Power (W)", "Cycles (Current Kernel)"))
    ]
    names = [(47, message((1, gpu + 1), (3, gpu), (2, message(*((1, each) for each in specs))))) for gpu in (0, 1)]
    content = torch_trace() + packet((10, 1), (13, 1), (12, message(*names)))
    content += counter(0, 1, 0, 500, 650.5) + counter(1, 2, 0, 700, 300.0) + counter(0, 1, 1, 2000, 1_980_000)
    content += counter(0, 9, 0, 500, 1.0) + counter(0, 1, 7, 500, 1.0) + counter(0, 1, 0, 600, float("nan"))
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(content)
    found = read_trace(path).counters
    assert found.text("name") == ["Power (W)", "Power (W)", "Cycles (Current Kernel)"]
    assert (found.text("unit"), found.device.tolist()) == (["W", "W", ""], [0, 1, 0])
    assert (found.start_ns.tolist(), found.value.tolist()) == ([500, 700, 2000], [650.5, 300.0, 1_980_000.0])


def test_render_stages() -> None:
    """A file that torch 2.14 encoded has its GPU work as render stages alone, with launches and collectives."""
    trace = read_trace(Path(__file__).parents[1] / "data" / "render_stages.pftrace")
    gpu = trace.gpu
    assert (trace.lost.left_out, trace.steps.duration_ns.tolist()) == ({}, [9000])
    assert (trace.operators.start_ns.tolist(), trace.operators.duration_ns.tolist()) == ([400], [500])
    names = ["gemm", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "ncclDevKernel_AllReduce_Sum_f32"]
    assert (gpu.text("name"), gpu.text("category")) == (names, ["kernel", "memcpy", "memset", "kernel"])
    assert (gpu.start_ns.tolist(), gpu.duration_ns.tolist()) == ([2000, 3000, 3600, 5000], [1000, 500, 100, 1500])
    assert (gpu.device.tolist(), gpu.stream.tolist()) == ([0, 0, 0, 1], [7, 7, 7, 20])
    launches = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaLaunchKernel"]
    assert [trace.runtime.text("name")[row] for row in gpu.launch] == launches
    assert (gpu.operator.tolist(), gpu.bytes.tolist()) == ([0, -1, -1, 0], [-1, 64, 128, -1])
    assert (gpu.blocks[0], gpu.block_threads[0], gpu.registers[0], gpu.shared_bytes[0]) == (8, 64, 32, 1024)
    assert (gpu.text("collective")[3], gpu.text("group")[3], gpu.elements_in[3]) == ("allreduce", "0", 1024)


def test_the_lane_of_a_render_stage(tmp_path: Path) -> None:
    """A stage that does not say its stream has the number of its lane; one without a name, that of its kind."""
    names = [(24, message((1, iid), (2, name))) for iid, name in ((3, "Memset"), (100, "[07] stream 7"))]
    stage = message((2, 50), (11, 2), (13, 100), (14, 3))
    path = tmp_path / "t.pftrace"
    path.write_bytes(packet((10, 1), (12, message(*names))) + packet((8, BASE), (10, 1), (53, stage)))
    gpu = read_trace(path).gpu
    assert (gpu.text("name"), gpu.text("category"), gpu.duration_ns.tolist()) == (["Memset"], ["memset"], [50])
    assert (gpu.device.tolist(), gpu.stream.tolist()) == ([2], [7])


def slices(track: int, category: str, name: str, begin: int, end: int, **args: int | str) -> bytes:
    """Return a slice as Perfetto's SDK writes it."""
    own = [annotation(*item) for item in args.items()]
    opened = message(*own, (9, 1), (11, track), (22, category), (23, name))
    return packet((8, begin), (10, 2), (11, opened)) + packet(
        (8, end), (10, 2), (11, message((9, 2), (11, track)))
    )


def test_rocprof(tmp_path: Path) -> None:
    """Calls of HIP, ranges of rocTX, and the lanes of streams with their device."""
    lane = packet((60, message((1, 9), (2, "COMPUTE AGENT [4] STREAM [2] (GPU)"))))
    content = thread(1, 101, 101, "python") + lane
    content += slices(1, "marker_api", "forward", 100, 900) + slices(
        1, "hip_api", "hipLaunchKernel", 200, 300, corr_id=7
    )
    content += slices(9, "kernel_dispatch", "add.kd", 400, 800, corr_id=7, agent="GPU 4")
    path = tmp_path / "results.pftrace"
    path.write_bytes(content)
    trace = read_trace(path)
    assert (trace.gpu.text("name"), trace.gpu.duration_ns.tolist()) == (["add.kd"], [400])
    assert (trace.gpu.device.tolist(), trace.gpu.stream.tolist(), trace.gpu.launch.tolist()) == ([4], [2], [0])
    assert trace.regions.text("name") == ["forward"]


def test_nested_slices(tmp_path: Path) -> None:
    """In order of time, an end closes the innermost slice."""
    half = [packet((8, at), (11, message((9, 1), (11, 1), (23, name)))) for at, name in ((10, "a"), (20, "b"))]
    ends = [packet((8, at), (11, message((9, 2), (11, 1)))) for at in (30, 50)]
    path = tmp_path / "t.pftrace"
    path.write_bytes(thread(1, 5, 5, "main") + b"".join(half + ends))
    trace = read_trace(path)
    assert (trace.regions.text("name"), trace.regions.duration_ns.tolist()) == (["a", "b"], [40, 10])


@pytest.mark.parametrize(("begins", "ends"), [((10, 20), (20, 50)), ((10, 10), (10, 50))])
def test_a_slice_without_length_in_another(tmp_path: Path, begins: tuple[int, int], ends: tuple[int, int]) -> None:
    """It is the inner one that has none, and not the outer one that ends as the inner one begins."""
    half = [
        packet((8, at), (11, message((9, 1), (11, 1), (23, name)))) for at, name in zip(begins, "ab", strict=True)
    ]
    rest = [packet((8, at), (11, message((9, 2), (11, 1)))) for at in ends]
    path = tmp_path / "t.pftrace"
    path.write_bytes(thread(1, 5, 5, "main") + b"".join(half + rest))
    regions = read_trace(path).regions
    assert dict(zip(regions.text("name"), regions.duration_ns.tolist(), strict=True)) == {"a": 40, "b": 0}


def test_texts_that_are_given_anew(tmp_path: Path) -> None:
    """After a sequence has cleared its state, the numbers of texts mean others; earlier slices keep theirs."""
    content = thread(1, 5, 5, "main")
    for at, name in ((10, "forward"), (30, "backward")):
        content += packet((10, 1), (13, 1), (12, message((2, message((1, 1), (2, name))))))
        content += packet((8, at), (10, 1), (11, message((9, 1), (10, 1), (11, 1))))
        content += packet((8, at + 5), (10, 1), (11, message((9, 2), (11, 1))))
    path = tmp_path / "t.pftrace"
    path.write_bytes(content)
    assert read_trace(path).regions.text("name") == ["forward", "backward"]


@pytest.mark.parametrize("field", [(58, 64), (59, message((58, 65)))])
def test_clocks_of_a_sequence(tmp_path: Path, field: tuple[int, int | bytes]) -> None:
    """Times that are differences are refused, and not taken for absolute ones."""
    path = tmp_path / "t.pftrace"
    path.write_bytes(torch_trace() + packet((8, BASE), (10, 1), field))
    with pytest.raises(TraceError, match="clocks of its own"):
        read_trace(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    """Render stages without a name are counted; a file without slices, and one that is cut off, are named."""
    path = tmp_path / "t.pftrace"
    path.write_bytes(torch_trace() + packet((8, BASE), (53, b"")))
    assert read_trace(path).lost.left_out == {"GPU events without a name, in render stages": 1}
    path.write_bytes(torch_trace()[:-3])
    with pytest.raises(TraceError, match="it is cut off or damaged"):
        read_trace(path)
    path.write_bytes(thread(1, 5, 5, "main"))
    with pytest.raises(TraceError, match="it has no slices of a program"):
        read_trace(path)
