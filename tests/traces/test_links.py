"""Links of GPU work in files with several processes, threads and steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instrument.base.trace_marks import OVERLAPPING
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.trace_files import rank_from_name
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.summary import summarize
from instrument.read.tables.trace import Trace
from instrument.read.tables.work_classes import communication_mask

Event = dict[str, Any]


def complete(cat: str, name: str, ts: float, dur: float, process: int = 1, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": process,
        "tid": process,
        "args": args,
    }


def region(name: str, ts: float, dur: float, process: int = 1) -> Event:
    return complete("user_annotation", name, ts, dur, process)


def launch(ts: float, correlation: int, process: int = 1, thread: int | None = None) -> Event:
    event = complete("cuda_runtime", "cudaLaunchKernel", ts, 2, process, correlation=correlation)
    return event | {"tid": thread or process}


def kernel(ts: float, dur: float, correlation: int, name: str = "k", **args: Any) -> Event:
    return complete("kernel", name, ts, dur, 0, correlation=correlation, device=0, stream=7, **args)


def read(tmp_path: Path, *events: Event) -> Trace:
    (tmp_path / "trace.json").write_text(json.dumps(events))
    return read_kineto(tmp_path / "trace.json")


def test_links_stay_within_a_process(tmp_path: Path) -> None:
    """Work of one process is not linked to regions or steps of another."""
    steps = [region("ProfilerStep#0", 0, 100), complete("cpu_op", "o", 0, 1)]
    trace = read(tmp_path, *steps, region("train", 0, 100), launch(50, 1, process=2, thread=9), kernel(60, 5, 1))
    assert (trace.gpu.region[0], trace.gpu.step[0]) == (-1, -1)
    same = read(tmp_path, *steps, region("train", 0, 100), launch(50, 1, thread=9), kernel(60, 5, 1))
    assert (same.gpu.region[0], same.gpu.step[0]) == (0, 0)


def test_filler_ranges_are_not_regions(tmp_path: Path) -> None:
    """Filler ranges are in no table; work in them belongs to the open region."""
    ranges = [region("outer", 0, 20), region("inner", 10, 90), region(OVERLAPPING, 20, 80)]
    trace = read(tmp_path, region("ProfilerStep#0", 0, 100), *ranges, launch(50, 1), kernel(60, 5, 1))
    assert [row.path[-1] for row in summarize(trace).regions] == ["outer", "inner"]
    assert trace.regions.text("name")[trace.gpu.region[0]] == "inner"


def test_ambiguous_correlation(tmp_path: Path) -> None:
    """Ambiguous work is not linked, which the coverage shows; correlation 0 means none."""
    twice = [launch(1, 1, process=1), launch(2, 1, process=2)]
    trace = read(tmp_path, *twice, launch(3, 0), kernel(20, 5, 1), kernel(30, 5, 0))
    assert trace.gpu.launch.tolist() == [-1, -1]
    assert trace.coverage["launch"].linked == 0


@pytest.mark.parametrize("announced", [3, 4])
def test_last_step_without_operators(tmp_path: Path, announced: int) -> None:
    """A last step counts if work was launched in it, and does not if nothing was."""
    steps = [region(f"ProfilerStep#{step}", 100 * step, 100) for step in range(announced)]
    work = [
        event
        for step in range(3)
        for event in (launch(100 * step + 40, step + 1), kernel(100 * step + 50, 30, step + 1))
    ]
    trace = read(tmp_path, *steps, *work, complete("cpu_op", "aten::mm", 10, 20))
    assert trace.steps.number.tolist() == [0, 1, 2]
    assert trace.gpu.step.tolist() == [0, 1, 2]


def test_steps_within_steps(tmp_path: Path) -> None:
    """Work belongs to the innermost step that is open."""
    steps = [region("ProfilerStep#0", 0, 100), region("ProfilerStep#1", 10, 10), complete("cpu_op", "o", 99, 1)]
    trace = read(tmp_path, *steps, launch(15, 1), kernel(20, 1, 1), launch(50, 2), kernel(60, 1, 2))
    assert trace.steps.number[trace.gpu.step].tolist() == [1, 0]


def test_unreadable_events_are_reported(tmp_path: Path) -> None:
    """Events without a time, and ranges without an end, are reported as lost."""
    nowhere = {"ph": "X", "cat": "kernel", "name": "k", "dur": 5, "pid": 0, "tid": 7}
    begin = {"ph": "B", "cat": "user_annotation", "name": "r", "ts": 5, "pid": 1, "tid": 1}
    name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    trace = read(tmp_path, name, kernel(10**6, 5, 1), nowhere, begin)
    assert metrics(trace)["span_ns"] == 5_000
    assert trace.lost.events == 2
    assert "ranges with no end: r" in trace.lost.reasons


@pytest.mark.parametrize("odd", ["0e99999999999999999999", "1e-99999999999999999999"])
def test_extreme_exponents(tmp_path: Path, odd: str) -> None:
    """A time with an extreme exponent does not make a trace unreadable."""
    text = json.dumps([kernel(3_000_000_000_000.5, 5, 1)]).replace('"dur": 5', f'"dur": {odd}')
    (tmp_path / "trace.json").write_text(text)
    assert read_kineto(tmp_path / "trace.json").gpu.duration_ns.tolist() == [0]


@pytest.mark.parametrize("percent", ["inf", 1e308, -50])
def test_invalid_occupancy(tmp_path: Path, percent: object) -> None:
    """An invalid percentage is taken as missing."""
    trace = read(tmp_path, kernel(1, 5, 1, **{"est. achieved occupancy %": percent, "blocks per SM": percent}))
    assert metrics(trace)["occ_weighted"] is None
    json.dumps(metrics(trace), allow_nan=False)


def test_deep_nests(tmp_path: Path) -> None:
    """A thousand nested regions are fast, and the deepest are excluded."""
    regions = [region("r", at, 5_000 - 2 * at) for at in range(1_000)]
    work = [
        event for at in range(2_000) for event in (launch(1_500 + at / 2, at + 1), kernel(1_600 + at, 1, at + 1))
    ]
    trace = read(tmp_path, *regions, *work)
    assert max(len(stat.path) for stat in summarize(trace).regions) == 100
    assert sum(stat.gpu_ns or 0 for stat in summarize(trace).regions if len(stat.path) == 1) == 2_000_000
    assert metrics(trace)["region_table"][0]["gpu_busy_ns"] == 2_000_000


@pytest.mark.parametrize("name", ["internode1" * 40_000, "Cijk_" * 80_000, "fp8" * 100_000, "Fmha" * 80_000])
def test_endless_names(tmp_path: Path, name: str) -> None:
    """A long kernel name does not slow down the metrics."""
    assert metrics(read(tmp_path, kernel(1, 5, 1, name=name)))["kernels"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton_red_fused__to_copy_add_all_reduce_mean_mul_0", False),
        ("fsdp_all_gather_copy_out", False),
        ("void block_all_reduce_sum<float>", False),
        ("softmax_warp_all_reduce", False),
        ("index_reduce_scatter", False),
        ("one_shot_all_reduce_kernel", True),
        ("ncclDevKernel_AllReduce_Sum", True),
        ("oneccl_allgather", True),
    ],
)
def test_communication_kernels(tmp_path: Path, name: str, expected: bool) -> None:
    """Fused kernels named after a collective count as compute."""
    assert communication_mask(read(tmp_path, kernel(1, 5, 1, name=name)).gpu).tolist() == [expected]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("profile_2024-11-21.json", None),
        ("iter_100.json", None),
        ("llama-70.json", None),
        ("trace_2024.json", None),
        ("trace_3.json", 3),
        ("h100_rank12.pt.trace.json.gz", 12),
    ],
)
def test_numbers_in_file_names(name: str, rank: int | None) -> None:
    """A number in a file name is a rank only if the name says so."""
    assert rank_from_name(Path(name)) == rank
