"""Traces of several ranks: the search for files, parallel reading, and alignment of clocks."""

from __future__ import annotations

import glob
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from instrument.base.errors import TraceError
from instrument.read.jobs.align import Clock, align, collective_kernels
from instrument.read.jobs.ranks import TraceSet, read_ranks
from instrument.read.jobs.trace_files import find_trace_files, rank_from_name
from instrument.read.kineto.kineto import read_kineto
from instrument.read.tables.links import assemble
from instrument.read.tables.table import KERNEL, Strings
from instrument.read.tables.trace import ReadLosses, Thread, Trace
from instrument.show.terminal.console import show
from instrument.show.terminal.ranks import rank_table
from tests.support.readers import die, talk
from tests.support.shared_traces import shared

ROOT = Path(__file__).parents[2]


def event(category: str, name: str, at: int, duration: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": at, "dur": duration, "args": args}


def write(path: Path, rank: int | None = None, world_size: int | None = None, step: int = 3, at: int = 0) -> Path:
    """Write a Kineto file of one step with a collective of group "0" that ends 50 µs into it."""
    kernel = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "correlation": 1,
        "stream": 7,
        "device": 0,
    }
    events = [
        event("user_annotation", f"ProfilerStep#{step}", at, 90),
        event("cpu_op", "c10d::allreduce_", at + 4, 8),
        event("cuda_runtime", "cudaLaunchKernel", at + 5, 2, correlation=1),
        event("kernel", "ncclDevKernel_AllReduce", at + 10, 40, **kernel),
    ]
    content: dict[str, Any] = {"schemaVersion": 1, "traceEvents": events}
    if rank is not None:
        content["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.1795230243371808300.pt.trace.json.gz", 0),
        ("rank-70.Apr_03_18_51_38.1102.pt.trace.json.gz", 70),
        ("mtia_rank_3.json.gz", 3),
        ("rank12_trace.json", 12),
        ("worker5_step_12.1694128201545.pt.trace.json", 5),
        ("param_dlrm_8rank_r4.json.gz", 4),
        ("profile_2.json", 2),
        ("report_11.nsys-rep", 11),
        ("rank_6/trace.json", 6),
        ("host_30017.1694128201545.pt.trace.json", None),
        ("node-a_local_rank_0.json", 0),
        ("trace_step_100.json", None),
        ("trace.json", None),
        ("bench4.json", None),
    ],
)
def test_rank_from_file_name(name: str, rank: int | None) -> None:
    """Common file names give the rank; dates, steps and process ids do not."""
    assert rank_from_name(Path("/runs/8gpu") / name) == rank


@pytest.mark.parametrize("executor", ["processes", "threads"])
def test_folder_of_ranks(tmp_path: Path, executor: str) -> None:
    """The files of a folder become a set by rank; other files are ignored, and missing ranks listed."""
    for rank in (2, 0):
        write(tmp_path / f"host_{900 + rank}.17.pt.trace.json", rank, world_size=4)
    for other in ("manifest.jsonl", "notes.txt", "plot.png", "rank1.json.gz.part", ".rank1.json"):
        (tmp_path / other).write_text("no trace")
    traces = read_ranks(tmp_path, read_kineto, ThreadPoolExecutor(2) if executor == "threads" else None)
    assert (traces.ranks, traces.missing, traces.world_size) == ([0, 2], [1, 3], 4)
    assert list(traces) == [0, 2]
    assert [trace.rank for trace in traces.values()] == [0, 2]
    assert traces[2].path == tmp_path / "host_902.17.pt.trace.json"
    assert traces[2].gpu.text("name") == ["ncclDevKernel_AllReduce"]
    assert repr(traces) == "<traces of 2 of 4 ranks, 2 missing>"


def test_dask_executor(tmp_path: Path) -> None:
    """Any executor works, such as the executor of a Dask cluster."""
    distributed = pytest.importorskip("distributed")
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json")
    (tmp_path / "rank2.json").write_text("no trace")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=str(tmp_path / "dask")
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        traces = read_ranks(str(tmp_path / "*.json"), read_kineto, client.get_executor())
    assert traces.ranks == [0, 1, 3]
    assert list(traces.failed) == [tmp_path / "rank2.json"]
    assert len(traces[3].gpu) == 1


@pytest.mark.parametrize("files", [["rank0.json"], ["rank0.json", "rank1.json"]])
def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    """A trace has the given path, and the args of its events can be read again."""
    monkeypatch.chdir(tmp_path)
    for name in files:
        write(Path(name))
    trace = read_ranks(files, read_kineto)[0]
    assert trace.path == Path("rank0.json")
    assert trace.args(trace.gpu, 0)["Collective name"] == "allreduce"


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that cannot be read is listed with the reason, and its rank is missing."""
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json")
    (tmp_path / "rank1.json").write_text("")
    gone = tmp_path / "rank3.json"
    traces = read_ranks([*sorted(tmp_path.iterdir()), gone], read_kineto)
    assert (traces.ranks, traces.missing) == ([0, 2], [1])
    assert set(traces.failed) == {tmp_path / "rank1.json", gone}
    assert "No such file" in traces.failed[gone]


@pytest.mark.parametrize(("read", "reason"), [(die, "exit code 9"), (talk, "EOFError: cut off")])
def test_misbehaving_reader(
    tmp_path: Path, read: Callable[[Path], Trace], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that ends its process, prints or raises loses only its own file."""
    monkeypatch.setattr("instrument.read.jobs.ranks.usable_cores", lambda: 2)
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json")
    traces = read_ranks(tmp_path, read)
    assert traces.ranks == [1, 2, 3]
    assert reason in traces.failed[tmp_path / "rank0.json"]


def test_no_readable_file(tmp_path: Path) -> None:
    """One sentence names the files and the cause."""
    for rank in range(5):
        (tmp_path / f"rank{rank}.json").write_text("")
    with pytest.raises(
        TraceError, match=r"none of 5 files can be read: rank0.json: .*; rank2.json: .* and 2 more"
    ):
        read_ranks(tmp_path, read_kineto)
    for paths, reason in [
        (tmp_path / "empty", "no file that ends in"),
        (tmp_path / "*.db", "matches it as a pattern"),
        ([], '"paths" must be a folder, a pattern or files: it is empty'),
    ]:
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(TraceError, match=reason):
            read_ranks(paths, read_kineto)


def test_nested_folders(tmp_path: Path) -> None:
    """The last of several window folders is read, by number; all of several rank folders are."""
    for window in (2, 10):
        for rank in range(2):
            write(tmp_path / f"windows/step-{window}/rank{rank}.json", step=window)
    traces = read_ranks(tmp_path / "windows", read_kineto)
    assert [trace.steps.number.tolist() for trace in traces.values()] == [[10], [10]]
    for rank in range(3):
        write(tmp_path / f"ranks/rank_{rank}/trace.json")
    assert read_ranks(tmp_path / "ranks", read_kineto).ranks == [0, 1, 2]


def test_several_windows_of_a_rank(tmp_path: Path) -> None:
    """Of several windows in one folder, the set holds the last that most ranks have, and lists the others."""
    for rank in range(3):
        for step in (3, 5, 7):
            if (rank, step) != (1, 7):
                write(tmp_path / f"host_{rank}.{step}.pt.trace.json", rank, 3, step, at=step * 1000)
    traces = read_ranks(tmp_path, read_kineto)
    assert [trace.steps.number.tolist() for trace in traces.values()] == [[5], [5], [5]]
    assert len(traces.left_out) == 5
    assert traces.left_out[tmp_path / "host_0.7.pt.trace.json"] == "rank 0, step 7"


def test_files_without_a_rank(tmp_path: Path) -> None:
    """Files without a rank get free numbers in order of their names, and the set lists them."""
    write(tmp_path / "a.json")
    write(tmp_path / "b.json")
    write(tmp_path / "rank0.json")
    traces = read_ranks(tmp_path, read_kineto)
    assert {rank: trace.path.name for rank, trace in traces.items()} == {0: "rank0.json", 1: "a.json", 2: "b.json"}
    assert traces.guessed == [1, 2]


def test_impossible_rank(tmp_path: Path) -> None:
    """An impossible rank in a file is ignored, and does not make ranks missing."""
    write(tmp_path / "rank1.json", rank=10**12, world_size=10**13)
    traces = read_ranks([tmp_path / "rank1.json"], read_kineto)
    assert (traces.ranks, traces.missing) == ([1], [0])


def test_script_without_a_main_guard(tmp_path: Path) -> None:
    """A script without a main guard runs once, with or without child processes; torch is not imported."""
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from instrument.read.jobs import ranks\n"
        "from instrument.read.kineto import kineto\n"
        "ranks.usable_cores = lambda: 2\n"
        "def own(path): return kineto.read_kineto(path)\n"
        f"print(ranks.read_ranks({str(tmp_path)!r}, kineto.read_kineto))\n"
        f"print(ranks.read_ranks({str(tmp_path)!r}, own))\n"
        f"sys.executable = ''\n"
        f"print(ranks.read_ranks({str(tmp_path)!r}, kineto.read_kineto))\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=env)
    assert (done.stdout, done.stderr) == ("<traces of 3 of 3 ranks>\n" * 3, "")


def test_pickling(tmp_path: Path) -> None:
    """An unpickled trace keeps its rows, its strings and the lookup of args."""
    trace = read_kineto(write(tmp_path / "rank0.json"))
    copy = pickle.loads(pickle.dumps(trace))
    assert copy.gpu.strings is copy.strings
    assert copy.gpu.start_ns.tolist() == trace.gpu.start_ns.tolist()
    assert copy.args(copy.gpu, 0) == trace.args(trace.gpu, 0) != {}


def trace_of(
    ends_ns: list[int],
    *,
    group: str = "0",
    names: list[str] | None = None,
    steps: list[int] | None = None,
    epoch_ns: int = 0,
    ranks: list[int] | None = None,
    collective: str = "allreduce",
) -> Trace:
    """Return a trace whose collectives end at given times, in given steps."""
    strings = Strings()
    count = len(ends_ns)
    end = np.array(ends_ns, np.int64)
    gpu = {
        "start_ns": end - 100,
        "duration_ns": np.full(count, 100),
        "name": np.array([strings[name] for name in names or ["ncclDevKernel"] * count], int),
        "category": np.full(count, KERNEL),
        "collective": np.full(count, strings[collective]),
        "group": np.full(count, strings[group]),
        "correlation": np.arange(count),
    }
    columns = {"gpu": gpu}
    if steps is not None:
        numbers = np.unique(steps)
        # steps follow by number, and launches are in their middle
        base = int(end.min()) - 10**9
        columns["steps"] = {
            "start_ns": base + numbers * 1000,
            "duration_ns": np.full(len(numbers), 1000),
            "number": numbers,
            "thread": np.zeros(len(numbers)),
        }
        calls = {"start_ns": base + np.array(steps) * 1000 + 500, "thread": np.zeros(count)}
        columns["operators"] = dict(calls)
        columns["runtime"] = calls | {"correlation": np.arange(count)}
    if names is not None:
        gpu["collective"] = np.zeros(count, int)
    info = {"distributedInfo": {"pg_config": [{"pg_name": group, "ranks": ranks}]}} if ranks else {}
    return assemble(
        Path("-"),
        "kineto",
        columns,
        strings,
        [Thread(1, 1)],
        devices=[],
        metadata=info,
        lost=ReadLosses(),
        epoch_ns=epoch_ns,
    )


HOUR = 3_600_000_000_000


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
    jitter=st.integers(0, 3_000),
    offset=st.integers(-HOUR, HOUR),
    since_1970=st.booleans(),
    marked=st.booleans(),
)
def test_known_offsets_are_found(
    seed: int, count: int, jitter: int, offset: int, since_1970: bool, marked: bool
) -> None:
    """Clocks that are hours apart are aligned to within the jitter of the collectives' ends."""
    random = np.random.default_rng(seed)
    true = since_1970 * 1_750_000_000_000_000_000 + np.cumsum(random.integers(20_000, 50_000_000, count))
    steps = [index // 5 for index in range(count)] if marked else None
    offsets = [0, offset, -offset // 7]
    traces = {
        rank: trace_of((true - apart + random.integers(-jitter, jitter + 1, count)).tolist(), steps=steps)
        for rank, apart in enumerate(offsets)
    }
    for (rank, clock), apart in zip(align(traces).items(), offsets, strict=True):
        assert abs(clock.offset_ns - apart) <= 2 * jitter
        assert clock.spread_ns <= 4 * jitter
        assert clock.collectives == (count if rank else 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(-20, 20), st.integers(-HOUR, HOUR), st.integers(0, 1000))
def test_windows_with_different_starts(seed: int, skew: int, offset: int, jitter: int) -> None:
    """Without steps, a rank whose recording started earlier or later is still matched."""
    random = np.random.default_rng(seed)
    true = np.cumsum(random.integers(1_000_000, 1_100_000, 80))
    late = true + random.integers(-jitter, jitter + 1, 80) - offset
    clock = align({0: trace_of(true[max(0, skew) :].tolist()), 5: trace_of(late[max(0, -skew) :].tolist())})[5]
    assert abs(clock.offset_ns - offset) <= jitter
    assert clock.collectives == 80 - abs(skew)


def test_regular_collectives() -> None:
    """Regular collectives are not shifted."""
    random = np.random.default_rng(0)
    ends = np.arange(30) * 1_000_000
    for jitter in (0, 100, 20_000):
        noisy = ends + random.integers(-jitter, jitter + 1, 30) - HOUR
        clock = align({0: trace_of(ends.tolist()), 1: trace_of(noisy.tolist())})[1]
        assert abs(clock.offset_ns - HOUR) <= jitter


def test_collectives_are_matched_by_step() -> None:
    """Steps with equal numbers are compared; work before the first step is not."""
    ends = np.arange(6) * 1_000_000
    clocks = align(
        {
            0: trace_of(ends.tolist(), steps=[1, 2, 3, 4, 5, 6]),
            1: trace_of((ends[2:] - 70).tolist(), steps=[3, 4, 5, 6]),
        }
    )
    assert clocks[1] == Clock(70, "collectives", 0, 4, 0)
    apart = {0: trace_of([10**6], steps=[1]), 1: trace_of([10**6], steps=[2], epoch_ns=5)}
    assert align(apart)[1] == Clock(5, "epoch", 0)


def test_ranks_without_common_collectives() -> None:
    """Ranks without common collectives are aligned by the time since 1970, and marked; others follow them."""
    traces = {
        2: trace_of([1000, 2000], group="a", epoch_ns=100),
        3: trace_of([1500, 2500], group="b", epoch_ns=70),
        4: trace_of([1400, 2400], group="b", epoch_ns=7),
        6: trace_of([], epoch_ns=7),
    }
    assert align(traces) == {
        2: Clock(0, "reference", 2),
        3: Clock(-30, "epoch", 2),
        4: Clock(70, "collectives", 3, 2, 0),
        6: Clock(-93, "epoch", 2),
    }


def test_groups_with_equal_names() -> None:
    """Groups with the same name and different ranks are distinct."""
    traces = {
        0: trace_of([1000, 2000], group="tp", ranks=[0, 1]),
        1: trace_of([1100, 2100], group="tp", ranks=[0, 1]),
        2: trace_of([9000, 9900], group="tp", ranks=[2, 3]),
    }
    assert [(clock.offset_ns, clock.source) for clock in align(traces).values()] == [
        (0, "reference"),
        (-100, "collectives"),
        (0, "epoch"),
    ]


def test_collective_kernels() -> None:
    """Kernels of NCCL and RCCL are recognized by name; sends and receives do not count."""
    named = trace_of([100, 200, 300], names=["ncclKernel_AllReduce", "gemm", "rcclGeneric"])
    assert collective_kernels(named).tolist() == [True, False, True]
    assert not collective_kernels(trace_of([100], collective="send")).any()
    mine = align({0: named, 1: named}, lambda trace: trace.gpu.matching("name", re.compile("gemm")))
    assert mine[1].collectives == 1


def test_starts_on_a_common_clock() -> None:
    """`TraceSet.start_ns` is on the clock of the lowest rank; the tables are unchanged."""
    traces = TraceSet({1: trace_of([1000, 2000]), 4: trace_of([400, 1400])})
    assert traces.offsets_ns == {1: 0, 4: 600}
    assert traces.start_ns(4).tolist() == traces.start_ns(1, "gpu").tolist() == [900, 1900]
    assert traces[4].gpu.start_ns.tolist() == [300, 1300]
    assert traces.missing == [0, 2, 3]


def test_eight_real_ranks() -> None:
    """The clocks of eight GPUs of one machine agree to 2 µs in files of whole µs."""
    files = [shared(f"param_dlrm_8rank_r{rank}.json.gz") for rank in range(8)]
    traces = read_ranks(files, read_kineto)
    assert (traces.ranks, traces.missing, traces.world_size) == (list(range(8)), [], 8)
    for rank, clock in traces.clocks.items():
        assert abs(clock.offset_ns) <= 2000
        assert clock.spread_ns <= 1000
        assert clock.collectives == (8 if rank else 0)
    for executor in (None, ThreadPoolExecutor(2)):
        assert_same(traces, read_ranks(files, read_kineto, executor))


def assert_same(one: TraceSet, other: TraceSet) -> None:
    for rank, trace in one.items():
        assert trace.strings == other[rank].strings
        for column in trace.gpu:
            np.testing.assert_array_equal(trace.gpu[column], other[rank].gpu[column])


def test_executor_is_left_open(tmp_path: Path) -> None:
    """The given executor is used, and left open."""
    calls: list[Path] = []

    def read(path: Path) -> Trace:
        calls.append(path)
        return read_kineto(path)

    executor: Executor = ThreadPoolExecutor(1)
    read_ranks([write(tmp_path / "rank0.json")], read, executor)
    assert calls == [tmp_path / "rank0.json"]
    assert executor.submit(len, calls).result() == 1


# Folders and patterns


@pytest.fixture
def cyclic_links(tmp_path: Path) -> Path:
    """Return a folder with cyclic links and one trace."""
    write(tmp_path / "a" / "b" / "t.json", 0, 1)
    for number in range(12):
        (tmp_path / f"up{number}").symlink_to(tmp_path)
        (tmp_path / "a" / "b" / f"over{number}").symlink_to("../..")
    (tmp_path / "a" / "latest.json").symlink_to("b/t.json")
    os.mkfifo(tmp_path / "a" / "b" / "pipe.json")
    return tmp_path


@pytest.mark.parametrize("pattern", ["", "**/*.json", "**", "**/**/*/**/t.json", "*/*/*/*/*/*/*/*/*/*/*.json"])
def test_cyclic_links(cyclic_links: Path, pattern: str) -> None:
    """Each file is found once despite cyclic links, under its own name if that matches."""
    [found] = find_trace_files(cyclic_links / pattern).files
    assert found.resolve() == cyclic_links / "a" / "b" / "t.json"
    if not pattern.startswith("*/"):
        assert found == cyclic_links / "a" / "b" / "t.json"


def test_patterns_match_like_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without links, a pattern matches the files that glob matches."""
    for name in ("a/1.json", "a/b/2.json", ".hidden/3.json", "a/.4.json", "[x]/5.json", "6.json"):
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "*.json",
        "**/*.json",
        "a/**",
        "**/b/*",
        "*/.*.json",
        ".*/*",
        "[[]x]/*",
        "./a/*.json",
        "a/../6*",
    ):
        names = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207
        expected = {name for name in names if name.is_file()}
        assert expected == set(find_trace_files(pattern).files), pattern
        whole = {tmp_path / name for name in expected}
        assert whole == set(find_trace_files(tmp_path / pattern).files) or ".." in pattern
    assert find_trace_files(tmp_path / "[x]").files == [tmp_path / "[x]" / "5.json"]


def test_files_that_are_not_traces(tmp_path: Path) -> None:
    """The error counts small files that are not traces."""
    for number in range(3):
        (tmp_path / f"config{number}.json").write_text("{}")
    with pytest.raises(TraceError, match=r"it holds 3 files .* none contains \"traceEvents\""):
        find_trace_files(tmp_path)
    trace = write(tmp_path / "trace.json")
    assert find_trace_files(tmp_path).files == [trace]
    with pytest.raises(TraceError, match=r"no file that ends in \.json"):
        (tmp_path / "empty").mkdir()
        find_trace_files(tmp_path / "empty")


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many files are an error that says what to do."""
    monkeypatch.setattr("instrument.read.jobs.trace_files.MAX_FILES", 3)
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json", rank, 4)
    with pytest.raises(TraceError, match="4 files that may be traces, and up to 3 are read together"):
        find_trace_files(tmp_path)
    assert len(find_trace_files(tmp_path / "rank[12].json").files) == 2
    monkeypatch.setattr("instrument.read.jobs.trace_files._MAX_NAMES", 3)
    with pytest.raises(TraceError, match="more than 3 files and folders"):
        find_trace_files(tmp_path / "**" / "*.json")


def test_folders_of_several_runs(tmp_path: Path) -> None:
    """The last window of the run that was written last is read, and the other folders are listed."""
    windows = [
        "lr-2/window-0001",
        "lr-10/window-0002",
        "lr-10/window-0010",
        "lr-30/window-0001",
        "lr-1/window-0001",
    ]
    written = [3, 9, 8, 5, 4]
    for window, seconds in zip(windows, written, strict=True):
        path = tmp_path / window / "rank0.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"traceEvents": [], "schemaVersion": 1}))
        os.utime(path, (seconds, seconds))
    traces = read_ranks(tmp_path, read_kineto)
    assert traces[0].path == tmp_path / "lr-10" / "window-0010" / "rank0.json"
    reason = "only the last of these folders is read"
    assert traces.left_out == {tmp_path / window: reason for window in windows if window != "lr-10/window-0010"}
    out = StringIO()
    show(Console(file=out, width=200), rank_table(traces, "auto"))
    assert f"Left out: {tmp_path / 'lr-1' / 'window-0001'} ({reason})\n" in out.getvalue()
