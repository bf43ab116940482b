"""XPlane files of JAX: hosts, GPUs and TPUs, and damaged ones."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from instrument.base.errors import TraceError
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_trace
from instrument.read.jobs.trace_files import find_trace_files
from instrument.read.profilers.protobuf_messages import PADDING, fields
from instrument.read.tables.table import KERNEL, MEMCPY
from tests.support.protobuf import message, varint
from tests.support.xplane import GPU, HOST, plane

TPU = plane("/device:TPU:0", {"Steps": [("5", 0, 90, {})], "XLA Ops": [("%fusion.1 = bf16[8]", 20, 30, {})]})
ENVIRONMENT = plane("Task Environment", {}, profile_start_time=1_795_954_026_011_094_565)


def written(folder: Path, *planes: bytes) -> Path:
    path = folder / "vm.xplane.pb"
    path.write_bytes(message(*((1, each) for each in planes)))
    return path


def test_host_and_gpu(tmp_path: Path) -> None:
    """Steps, annotations, frames and launches of the host; work on the streams of a device, with its launch."""
    trace = read_trace(written(tmp_path, HOST, GPU, ENVIRONMENT))
    assert (trace.format, trace.epoch_ns, bool(trace.lost)) == ("xplane", 1_795_954_026_011_094_565, False)
    assert (trace.steps.number.tolist(), trace.steps.duration_ns.tolist()) == ([5], [100_000])
    assert (trace.regions.text("name"), trace.regions.start_ns.tolist()) == (["mine"], [1_010_000])
    assert trace.frames.text("name") == ["train.py(12): main"]
    assert (trace.gpu.text("name"), trace.gpu.category.tolist()) == (["fusion_2", "MemcpyH2D"], [KERNEL, MEMCPY])
    assert (trace.gpu.device.tolist(), trace.gpu.stream.tolist()) == ([1, 1], [14, 14])
    assert [trace.runtime.text("name")[row] for row in trace.gpu.launch if row >= 0] == ["hipModuleLaunchKernel"]


def test_an_empty_line(tmp_path: Path) -> None:
    """A line without events, whose start may be 0, does not say when the recording began."""
    begin = 1_795_954_026_000_000_000
    event = message((1, 7), (2, 5000), (3, 10**6))
    lines = message((1, 5), (2, "python"), (3, begin), (4, event)), message((1, 6), (2, "idle"), (3, 0))
    trace = read_trace(written(tmp_path, message((2, "/host:CPU"), *((3, line) for line in lines))))
    assert trace.epoch_ns == begin


def test_tpu(tmp_path: Path) -> None:
    """The operations of a TPU are its work; the lanes that are derived from them are not."""
    trace = read_trace(written(tmp_path, TPU, HOST))
    assert (trace.gpu.text("name"), trace.gpu.duration_ns.tolist()) == (["%fusion.1 = bf16[8]"], [30_000])
    assert trace.unread_devices == {}


@pytest.mark.parametrize("at", [0, 1 << 62, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("offset", [0, 1 << 62, -(1 << 63)])
def test_impossible_times(tmp_path: Path, at: int, offset: int) -> None:
    """Times that no clock has end in numbers or an error, also in a file without a stat."""
    event = message((1, 7), (2, offset), (3, 1 << 62))
    line = message((1, 5), (2, "python"), (3, at), (4, event))
    path = written(tmp_path, message((2, "/host:CPU"), (3, line)))
    assert metrics(read_trace(path))["steps"]["n"] == 0


def test_damage(tmp_path: Path) -> None:
    """A file that is cut off, and one without an event."""
    path = written(tmp_path, HOST, GPU)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="it is cut off or damaged"):
        read_trace(path)
    assert len(read_trace(written(tmp_path, ENVIRONMENT)).others) == 0


def test_the_folder_of_jax(tmp_path: Path) -> None:
    """Of the two files that JAX writes of a host, one is read."""
    written(tmp_path, HOST)
    assert [path.name for path in find_trace_files(tmp_path).files] == ["vm.xplane.pb"]
    (tmp_path / "vm.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert [path.name for path in find_trace_files(tmp_path).files] == ["vm.trace.json.gz"]


def test_without_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which command installs it."""
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(TraceError, match=r"needs protobuf: pip install 'torch-instrument\[xplane\]'"):
        read_trace(written(tmp_path, HOST))


@pytest.mark.parametrize("seed", range(20))
def test_integers_of_any_length(seed: int) -> None:
    """The fields of many messages are those that were written, up to the largest number."""
    dice = np.random.default_rng(seed)
    numbers = [int(dice.integers(0, 1 << int(dice.integers(1, 64)), dtype=np.uint64)) for _ in range(99)]
    numbers += [0, 127, 128, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    parts = [
        message((1, number), (15, b"text" * (number % 5)), (300, b"not read"), (2, number // 3))
        for number in numbers
    ]
    ends = np.cumsum([len(part) for part in parts])
    data = np.frombuffer(b"".join(parts) + PADDING, np.uint8)
    found = list(fields(data, ends - [len(part) for part in parts], ends))
    assert [number for _, number, _, _ in found] == [1, 15, 2]
    assert found[0][2].view(np.uint64).tolist() == numbers
    assert np.asarray(found[1][3]).tolist() == [4 * (number % 5) for number in numbers]
    assert found[2][2].tolist() == [number // 3 for number in numbers]


def test_fields_in_any_order() -> None:
    """Messages whose fields differ in order, number and type give each row its own values."""
    fixed = b"\x69" + bytes(8) + b"\x75" + bytes(4)  # the fields 13 and 14, of 8 and of 4 bytes
    parts = [
        message((1, 7), (2, 300)),
        message((2, 1 << 40), (3, "text"), (1, 200)),
        fixed + message((1, 5)),
        b"",
        message((3, "a"), (3, "")) + fixed,
    ]
    ends = np.cumsum([len(part) for part in parts])
    data = np.frombuffer(b"".join(parts) + PADDING, np.uint8)
    said: dict[tuple[int, int], list[int]] = {}
    for rows, number, value, size in fields(data, ends - [len(part) for part in parts], ends):
        for row, each in zip(rows.tolist(), (size if number == 3 else value).tolist(), strict=True):
            said.setdefault((row, number), []).append(each)
    assert {key: each for key, each in said.items() if key[1] < 4} == {
        **{(0, 1): [7], (0, 2): [300], (1, 1): [200], (1, 2): [1 << 40], (1, 3): [4], (2, 1): [5], (4, 3): [1, 0]}
    }
    assert {row for row, number in said if number == 13} == {row for row, number in said if number == 14} == {2, 4}


def test_any_bytes() -> None:
    """Messages of random bytes end, within their bytes."""
    dice = np.random.default_rng(0)
    data = np.frombuffer(dice.bytes(30_000) + PADDING, np.uint8)
    begins = np.arange(0, 30_000, 30)
    for rows, _, value, size in fields(data, begins, begins + 30):
        chosen = np.broadcast_to(size, len(rows)) > 0
        assert np.all(size >= 0) and (value + size <= begins[rows] + 30)[chosen].all()


def test_varint() -> None:
    """The test's own integers are those of the format: 300 has two bytes."""
    assert varint(300) == b"\xac\x02"
