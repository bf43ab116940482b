"""Reports of Nsight Systems: the real nsys, `nsys stats` as the oracle, and the values of each table."""

from __future__ import annotations

import pickle
import re
import shutil
import sqlite3
import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import instrument
from instrument.base.errors import TraceError
from instrument.read.measures.launches import projection
from instrument.read.profilers import nsight_report
from instrument.read.profilers.nsight import read_nsight
from instrument.read.tables.table import COLUMNS, KERNEL, MEMCPY, MEMSET
from instrument.read.tables.trace import Coverage, Device, Thread, Trace
from tests.support import nsys
from tests.traces.nsys_report import HOST, Database, one_of_each_kind, random_database, stats, thread

PROGRAM = """
    import sys
    import threading
    import time
    from instrument import annotate, mark, profile, schedule
    from instrument.base.compat.tools import nvtx_domain

    domain = nvtx_domain("loader")
    attributes = domain.get_event_attributes

    def work():
        domain.push_range(attributes("read", color="red", category="disk", payload=2.5))
        with annotate("decode", payload=-3):
            time.sleep(0.002)
        domain.pop_range()

    with annotate("outer", color="green", category="compute", payload=7):
        with annotate("inner"):
            time.sleep(0.001)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    free = domain.start_range(attributes("free", category=9))
    print(time.time_ns())
    mark("saved")
    domain.end_range(free)
    with profile(sys.argv[1], schedule=schedule(wait=1, warmup=1, active=2, repeat=1)) as prof:
        for _ in range(4):
            with annotate("forward"):
                time.sleep(0.001)
            prof.step()
    domain.push_range(attributes("open"))
    crossing = domain.start_range(attributes("crossing"))
    thread = threading.Thread(target=domain.end_range, args=(crossing,))
    thread.start()
    thread.join()
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[nsys.Report, Path]:
    """Return a report of the real nsys, and its export with all tables."""
    folder = tmp_path_factory.mktemp("real")
    env = {"RANK": "3", "WORLD_SIZE": "8"}
    report = nsys.profile(PROGRAM, tmp_path=folder, args=[str(folder / "out")], env=env, own_process=True)
    database = folder / "full.sqlite"
    command = [nsys.nsys(), "export", "--lazy=false", "--type=sqlite", f"--output={database}", str(report.file)]
    subprocess.run(command, check=True, capture_output=True)
    return report, database


def described(trace: Trace) -> list[tuple[object, ...]]:
    """Return name, domain, category, color, payload and parent of each region."""
    names = trace.regions.text("name")
    columns = (trace.regions.text(column) for column in ("domain", "category", "payload"))
    parents = [names[row] if row >= 0 else None for row in trace.regions.parent]
    return list(zip(names, *columns, parents, strict=True))


@pytest.mark.nsys
def test_real_report(real: tuple[nsys.Report, Path]) -> None:
    """A real report has every range with domain, category, payload, thread and nesting, and the steps."""
    report, database = real
    trace = read_nsight(database)
    assert not trace.lost
    assert trace.format == "nsight systems"
    assert (trace.rank, trace.world_size) == (3, 8)
    assert described(trace) == [
        ("outer", "instrument", "compute", "7", None),
        ("inner", "instrument", "", "", "outer"),
        ("read", "loader", "disk", "2.5", None),
        ("decode", "instrument", "", "-3", "read"),
        ("free", "loader", "9", "", None),
        *[("forward", "instrument", "", "", None)] * 4,
        ("open", "loader", "", "", None),
        ("crossing", "loader", "", "", "open"),
    ]
    by_name = dict(zip(trace.regions.text("name"), range(len(trace.regions)), strict=True))
    color = {name: trace.regions.color[row] for name, row in by_name.items()}
    assert (color["outer"] & 0xFFFFFF, color["read"]) == (0x008000, 0xFF0000)
    threads = trace.regions.thread
    assert threads[by_name["decode"]] == threads[by_name["read"]] != threads[by_name["outer"]]
    assert threads[by_name["outer"]] == threads[by_name["open"]] == threads[by_name["crossing"]]
    main = trace.threads[threads[by_name["outer"]]]
    assert main.process == main.thread  # Linux numbers the first thread like its process
    assert trace.metadata["processes"].keys() == {main.process}

    assert trace.steps.number.tolist() == [2, 3]
    forward = trace.regions.where(trace.regions.matching("name", re.compile("forward")))
    for row, step in enumerate((2, 3)):
        assert (
            trace.steps.start_ns[row] <= forward.start_ns[step] < forward.end_ns[step] <= trace.steps.end_ns[row]
        )
    assert list(zip(trace.others.text("name"), trace.others.text("category"), strict=True)) == [
        ("saved", "mark"),
        ("capture", "capture"),
        ("instrument_steps=2-3", "mark"),  # the steps that were run
    ]
    printed = int(next(line for line in report.stdout.splitlines() if line.strip().isdigit()))
    assert 0 <= trace.others.start_ns[0] + trace.epoch_ns - printed < 1e9


@pytest.mark.nsys
def test_report_is_exported(real: tuple[nsys.Report, Path], tmp_path: Path) -> None:
    """A .nsys-rep gives the same trace as its export, no file is written beside it, and args can be looked up."""
    report, database = real
    copy = tmp_path / "a report?#%.nsys-rep"
    shutil.copy(report.file, copy)
    trace, exported = read_nsight(copy), read_nsight(database)
    assert described(trace) == described(exported)
    for kind in ("regions", "steps", "others"):
        for column in COLUMNS[kind]:
            assert getattr(trace, kind)[column].tolist() == getattr(exported, kind)[column].tolist(), (
                kind,
                column,
            )
    args = trace.args(trace.regions, 0)
    assert (args["textId"], args["int64Value"], args["eventType"]) == ("outer", 7, 59)
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.nsys
def test_metadata_without_environment(real: tuple[nsys.Report, Path]) -> None:
    """The metadata has the machine and the versions, but not the environment that the file contains."""
    trace = read_nsight(real[1])
    assert trace.metadata["Hostname"]
    assert any("VERSION" in name for name in trace.metadata)
    assert "WORLD_SIZE=8" in real[1].read_bytes().decode("latin-1")
    assert "WORLD_SIZE" not in str(trace.metadata)


def summed(names: list[str], durations: Any) -> dict[str, tuple[int, int]]:
    """Return how often each name occurs, and the sum of its durations."""
    count, total = Counter(names), Counter[str]()
    for name, duration in zip(names, durations.tolist(), strict=True):
        total[name] += duration
    return {name: (count[name], total[name]) for name in count}


def totals_of(rows: list[dict[str, str]], name: str, count: str, total: str) -> dict[str, tuple[int, int]]:
    """Return the same from `nsys stats`, which has one row per launch shape."""
    result: dict[str, tuple[int, int]] = {}
    for row in rows:
        calls, duration = result.get(row[name], (0, 0))
        result[row[name]] = calls + int(row[count]), duration + int(row[total])
    return result


def region_names(trace: Trace) -> list[str]:
    pairs = zip(trace.regions.text("domain"), trace.regions.text("name"), strict=True)
    return [f"{domain}:{name}".lstrip(":") for domain, name in pairs]


@pytest.mark.nsys
@pytest.mark.parametrize("seed", range(4))
def test_numbers_equal_nsys_stats(seed: int, real: tuple[nsys.Report, Path], tmp_path: Path) -> None:
    """Kernels, calls, memcpys, ranges and their projection agree with `nsys stats` on random work."""
    database = tmp_path / "made.sqlite"
    shutil.copy(real[1], database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM NVTX_EVENTS")
    random_database(seed).write(database)
    trace = read_nsight(database)
    assert not trace.lost

    kernels = totals_of(stats("cuda_gpu_kern_sum", database), "Name", "Instances", "Total Time (ns)")
    assert summed(trace.kernels.text("name"), trace.kernels.duration_ns) == kernels
    calls = totals_of(stats("cuda_api_sum", database), "Name", "Num Calls", "Total Time (ns)")
    assert summed(trace.runtime.text("name"), trace.runtime.duration_ns) == calls

    kinds = [f"[CUDA memcpy {name.split()[1]}]" for name in trace.memcpys.text("name")]
    sets = ["[CUDA memset]"] * len(trace.memsets)
    memory = totals_of(stats("cuda_gpu_mem_time_sum", database), "Operation", "Count", "Total Time (ns)")
    assert summed(kinds + sets, np.concatenate((trace.memcpys.duration_ns, trace.memsets.duration_ns))) == memory

    ranges = {name.lstrip(":"): row for name, row in
              totals_of(stats("nvtx_sum", database), "Range", "Instances", "Total Time (ns)").items()}  # fmt: skip
    assert summed(region_names(trace), trace.regions.duration_ns) == ranges

    projected, threads = projection(trace), [trace.threads[number] for number in trace.regions.thread]
    names, regions = region_names(trace), trace.regions
    found = Counter(
        (
            *(names[i], int(regions.start_ns[i]), int(regions.duration_ns[i])),
            *(threads[i].process, threads[i].thread),
            *(int(projected[column][i]) for column in ("start_ns", "duration_ns", "launches")),
        )
        for i in np.flatnonzero(projected.ops).tolist()
        if names[i] != "cross"
    )
    columns = ("Orig Start (ns)", "Orig Duration (ns)", "PID", "TID")
    columns += ("Projected Start (ns)", "Projected Duration (ns)", "NumGPUOps")
    expected = Counter(
        (row["Name"].lstrip(":"), *(int(row[column]) for column in columns))
        for row in stats("nvtx_gpu_proj_trace", database)
    )
    assert len(expected) > 10
    assert found == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pairs", [1 << 21, 5])
def test_projection_matches_its_definition(
    seed: int, pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projection follows its definition, however many pairs are processed at once."""
    monkeypatch.setattr("instrument.read.measures.launches._PAIRS", pairs)
    trace = read_nsight(random_database(seed).write(tmp_path / "made.sqlite"))
    regions, runtime, gpu = trace.regions, trace.runtime, trace.gpu
    found = projection(trace)
    assert len(found) == len(regions)
    for row in range(len(regions)):
        work = [
            op
            for op in range(len(gpu))
            if (call := gpu.launch[op]) >= 0
            and runtime.thread[call] == regions.thread[row]
            and regions.start_ns[row] <= runtime.start_ns[call]
            and runtime.end_ns[call] <= regions.end_ns[row]
        ]
        busy = {time for op in work for time in range(gpu.start_ns[op], gpu.end_ns[op])}
        start = min((int(gpu.start_ns[op]) for op in work), default=-1)
        end = max((int(gpu.end_ns[op]) for op in work), default=-1)
        expected = start, end - start, len(busy), len(work), len({gpu.launch[op] for op in work})
        columns = ("start_ns", "duration_ns", "busy_ns", "ops", "launches")
        assert tuple(int(found[column][row]) for column in columns) == expected


def test_projection_without_work(tmp_path: Path) -> None:
    """Without work all rows are empty; without regions there are no rows."""
    database = Database()
    database.span("alone", 1, 9, thread(1, 1))
    found = projection(read_nsight(database.write(tmp_path / "one.sqlite")))
    assert {name: column.tolist() for name, column in found.items()} == {
        "start_ns": [-1], "duration_ns": [0], "busy_ns": [0], "ops": [0], "launches": [0]
    }  # fmt: skip
    database = Database()
    database.kernel("alone", 1, 2)
    assert len(projection(read_nsight(database.write(tmp_path / "two.sqlite")))) == 0


def test_values_of_each_table(tmp_path: Path) -> None:
    """Launch shapes, sizes, names as in torch.profiler, devices, threads and all links are read."""
    trace = read_nsight(one_of_each_kind().write(tmp_path / "made.sqlite"))
    assert not trace.lost
    gpu = trace.gpu
    names = ["void gemm<float>(int)", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "CUDA graph 9"]
    assert gpu.text("name") == names
    assert gpu.category.tolist() == [KERNEL, MEMCPY, MEMSET, KERNEL]
    assert gpu.bytes.tolist() == [-1, 4096, 512, -1]
    for column, value in {
        "blocks": 264, "block_threads": 128, "registers": 32, "shared_bytes": 24, "blocks_per_sm": 2.0,
        "device": 0, "stream": 7,
    }.items():  # fmt: skip
        assert gpu[column][0] == value, column
    assert gpu.blocks.tolist() == [264, -1, -1, -1]
    assert gpu.launch.tolist() == [0, 1, 2, 3]
    assert gpu.region.tolist() == [0, 0, 1, 1]
    assert gpu.step.tolist() == [0, 0, 0, 0]
    assert trace.coverage["region"] == Coverage(4, 4, 260, 260)
    assert trace.runtime.text("name") == [
        "cudaLaunchKernel", "cudaMemcpyAsync", "cuMemsetD8Async", "cudaGraphLaunch", "cudaStreamSynchronize"
    ]  # fmt: skip
    categories = ["cuda_runtime", "cuda_runtime", "cuda_driver", "cuda_runtime", "cuda_runtime"]
    assert trace.runtime.text("category") == categories
    assert trace.syncs.text("name") == ["Stream Sync"]
    assert trace.syncs.correlation[0] == trace.runtime.correlation[4]
    assert (trace.others.text("name"), trace.others.text("category")) == (["poll"], ["osrt"])
    assert trace.regions.text("name") == ["region", "unregistered"]
    assert trace.regions.color.tolist() == [-1, 0xFFFFFFFF]
    assert (trace.steps.number.tolist(), trace.steps.duration_ns.tolist()) == ([17], [1000])
    assert trace.devices == [Device(0, "NVIDIA H100", 132, 2048, 80 << 30)]
    assert trace.threads == [Thread(42, 43, "python")]
    assert trace.metadata["processes"] == {42: "train.py"}
    assert trace.epoch_ns == 1_700_000_000_000_000_000
    assert trace.rank is None


def test_args_of_single_events(tmp_path: Path) -> None:
    """All values of an event are read from the file again, also by an unpickled trace."""
    trace = pickle.loads(pickle.dumps(read_nsight(one_of_each_kind().write(tmp_path / "made.sqlite"))))
    args = trace.args(trace.gpu, 0)
    assert (args["demangledName"], args["gridX"], args["correlationId"]) == ("void gemm<float>(int)", 66, 1)
    assert trace.args(trace.gpu, 3)["graphId"] == 9
    assert trace.args(trace.runtime, 1)["nameId"] == "cudaMemcpyAsync_v3020"
    assert trace.args(trace.steps, 0)["int64Value"] == 17


def test_processes_with_equal_ids(tmp_path: Path) -> None:
    """Equal correlation ids of two processes are not mixed; each process may have another GPU as its first."""
    database = Database()
    for process, gpu in ((10, 4), (11, 6)):
        tid = thread(process, process)
        database.add("TARGET_INFO_CUDA_DEVICE", pid=process, cudaId=0, gpuId=gpu)
        database.span(f"region {process}", 0, 100, tid)
        database.call("cudaLaunchKernel_v7000", 10, 20, tid, 1)
        database.kernel(f"kernel {process}", 30 + process, 50, correlationId=1, globalPid=tid & ~0xFFFFFF)
    environment = "HOME=/\0RANK=0\0WORLD_SIZE=2\0"
    database.add("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value=environment)
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    regions = np.array(trace.regions.text("name"))[trace.gpu.region]
    assert list(zip(trace.gpu.text("name"), regions, trace.gpu.device, strict=True)) == [
        ("kernel 10", "region 10", 4),
        ("kernel 11", "region 11", 6),
    ]
    assert trace.rank is None  # several processes, each with its own rank


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("uint64Value", -1, "18446744073709551615"),
        ("int64Value", -1, "-1"),
        ("doubleValue", 0.1, "0.1"),
        ("int32Value", 0, "0"),
        ("jsonText", '{"a": "\u00e9"}', '{"a": "\u00e9"}'),
        ("jsonText", b"\xff\x00", "FF00"),
        ("binaryData", b"\x01\x02", "0102"),
        ("int64Value", "text", "text"),
        ("uint64Value", "text", "text"),
    ],
)
def test_payloads(column: str, value: Any, shown: str, tmp_path: Path) -> None:
    """Any payload becomes a string: unsigned integers exactly, text verbatim, bytes in hexadecimal."""
    database = Database()
    database.span("region", 0, 1, thread(1, 1), **{column: value})
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    assert trace.regions.text("payload") == [shown]


def test_unfinished_ranges(tmp_path: Path) -> None:
    """Unfinished ranges last until the last event, and the metadata has their number."""
    database = Database()
    database.span("open", 10, None, thread(1, 1))
    database.call("cudaLaunchKernel_v7000", 20, 30, thread(1, 1), 1)
    database.kernel("late", 500, 700, correlationId=1, globalPid=thread(1, 0))
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    assert trace.regions.end_ns.tolist() == [700]
    assert trace.metadata["unfinished_ranges"] == 1
    assert trace.gpu.region.tolist() == [0]
    assert not trace.lost


def test_without_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nsys, the error says what to do."""
    path = tmp_path / "x.nsys-rep"
    path.write_bytes(b"anything")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError, match=r"not installed; .* nsys export --type sqlite x\.nsys-rep"):
        read_nsight(path)


def test_an_nsys_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why an export failed is said even if nsys does not tell its version."""
    path, program = tmp_path / "x.nsys-rep", tmp_path / "nsys"
    path.write_bytes(b"anything")
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && exec sleep 60\necho wrong magic >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(nsight_report, "_VERSION_SECONDS", 0.2)
    with pytest.raises(
        TraceError, match=r"failed: wrong magic\. If the report is newer .*\(of an unknown version\)"
    ):
        read_nsight(path)


@pytest.mark.nsys
@pytest.mark.parametrize("kept", [3000, 20])
def test_damaged_report(kept: int, real: tuple[nsys.Report, Path], tmp_path: Path) -> None:
    """The error has the message of nsys."""
    path = tmp_path / "cut.nsys-rep"
    path.write_bytes(real[0].file.read_bytes()[:kept])
    with pytest.raises(TraceError, match=r"cut\.nsys-rep: nsys export failed: \w+"):
        read_nsight(path)
    assert list(tmp_path.iterdir()) == [path]


def test_sampled_metrics(tmp_path: Path) -> None:
    """SM activity, traffic and clock are counters of their GPU; the clock, written in Hz, is in MHz as named."""
    database, tid, place = one_of_each_kind(), thread(42, 43), {"globalPid": HOST + (42 << 24), "streamId": 7}
    database.call("cudaLaunchKernel", 100_000, 100_010, tid, 1)
    database.kernel("gemm_f16", 200_000, 1_200_000, correlationId=1, **place)
    for time in range(100_000, 2_000_000, 100_000):
        for gpu, active in ((0, 80), (1, 50)):
            database.sample("SMs Active [Throughput %]", gpu, time, active)
            database.sample("DRAM Read Bandwidth [Throughput %]", gpu, time, 40)
            database.sample("DRAM Write Bandwidth [Throughput %]", gpu, time, 20)
            database.sample("GPC Clock Frequency [MHz]", gpu, time, 1_980_000_000)
            database.sample("Compute Warps in Flight [Avg]", gpu, time, 4)
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    rows = instrument.metrics(trace)["counter_table"]
    assert {(row["name"], row["device"]): (row["unit"], row["mean"], row["samples"]) for row in rows} == {
        (name, gpu): (unit, value, 19 + (name.startswith("SMs") and not gpu))
        for gpu, active in ((0, 80.0), (1, 50.0))
        for name, unit, value in (
            ("SMs Active [Throughput %]", "%", active),
            ("DRAM Read Bandwidth [Throughput %]", "%", 40.0),
            ("DRAM Write Bandwidth [Throughput %]", "%", 20.0),
            ("GPC Clock Frequency [MHz]", "MHz", 1980.0),
        )
    }
    (family,) = (row for row in instrument.metrics(trace)["counted_families"] if row["family"] == "gemm")
    assert (0.8, 0.6) == (family["sm_active"], pytest.approx(family["dram_share"]))
    assert 250 == trace.counters.start_ns.min()
    assert not trace.lost


def test_samples_without_a_time_or_a_value(tmp_path: Path) -> None:
    """They are counted as lost; the others are read."""
    database = one_of_each_kind()
    for time, value in ((None, 7), (300, None), (1 << 62, 7), (400, 60)):
        database.sample("SMs Active [Throughput %]", 0, time, value)
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    assert [(250, 80), (400, 60)] == list(zip(trace.counters.start_ns, trace.counters.value, strict=True))
    assert (3, ["GPU_METRICS: without a time or a value"]) == (trace.lost.events, list(trace.lost.reasons))
