"""The metrics mapping: its keys, their definitions, and incomplete traces."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.explain.metrics.metrics import DEFINITIONS, metrics

from .small_traces import kernel, memcpy, memset, on_cpu, trace_of


def small_trace() -> Any:
    return trace_of(
        regions=[on_cpu("ProfilerStep#3", 0, 400), on_cpu("forward", 10, 90)],
        operators=[on_cpu("aten::mm", 20, 40)],
        runtime=[on_cpu("cudaLaunchKernel", 25, 30, correlation=1)],
        gpu=[kernel("gemm", 100, 300, correlation=1), memcpy("Memcpy DtoD (Device -> Device)", 350, 500, bytes=8)],
    )


def test_every_number_is_defined() -> None:
    """The keys of every trace match the table of definitions."""
    assert metrics(small_trace()).keys() == DEFINITIONS.keys()
    assert metrics(trace_of()).keys() == DEFINITIONS.keys()


@pytest.mark.parametrize("key", DEFINITIONS)
def test_definition(key: str) -> None:
    """Each metric has a definition, unit, window and coverage."""
    about = metrics(small_trace()).about(key)
    assert about.definition.endswith((".", ";")) and about.unit and about.window
    assert about.coverage is None or 0 <= about.coverage <= 1
    empty = metrics(trace_of()).about(key)
    assert (empty.window_ns, empty.coverage) == (None, None)


def test_windows_and_coverage() -> None:
    """Windows are the first and last times; coverage is the share of linked GPU time."""
    numbers = metrics(small_trace())
    assert numbers.about("busy_ns").window_ns == (100, 500)
    assert numbers.about("steps").window_ns == (0, 400)
    assert numbers.about("queue_length").window_ns == (25, 500)
    assert numbers.about("operator_table").window_ns == (0, 500)
    assert numbers.about("region_table").coverage == 200 / 350
    assert numbers.about("module_table").coverage == 0.0
    assert (numbers.about("step_lengths").window_ns, numbers.about("step_lengths").coverage) == (
        (0, 400),
        200 / 350,
    )
    assert (numbers.about("loop").window_ns, numbers.about("loop").coverage) == (None, None)
    with pytest.raises(KeyError):
        numbers.about("nothing")


def test_step_lengths() -> None:
    """If the work of a step runs while the next one launches, the loop is as fast as the GPU."""
    numbers = metrics(
        trace_of(
            regions=[on_cpu(f"ProfilerStep#{step}", 100 * step, 100 * step + 90) for step in (3, 4, 5)],
            runtime=[
                on_cpu("cudaLaunchKernel", 100 * step + 10, 100 * step + 20, correlation=step)
                for step in (3, 4, 5)
            ],
            gpu=[kernel("gemm", 1000 * step, 1000 * step + 990, correlation=step) for step in (3, 4, 5)],
        )
    )
    assert numbers["step_lengths"][1] == {
        "name": "ProfilerStep#4",
        "number": 4,
        "cpu_ns": 90,
        "gpu_first_ns": 4000,
        "gpu_last_ns": 4990,
        "gpu_ns": 990,
        "gpu_period_ns": 1000,
        "run_ahead_ns": 4990 - 490,
        "launch_delay_ns": 4000 - 410,
        "gpu_busy_ns": 990,
    }
    assert numbers["loop"] == {
        "bound": "gpu",
        "unknown": None,
        "step_ns": 1000.0,
        "clock": "gpu",
        "steps": 2,
        "gpu_step_ns": 1000.0,
        "cpu_step_ns": 100.0,
        "synchronized_step_ns": None,
        "synchronized_steps": 0,
        "gpu_waits_share": 0.0,
        "cpu_waits_share": 0.0,
        "queue_waits_share": 0.0,
        "exposed_comm_share": 0.0,
        "run_ahead_ns": {"median": 4500, "max": 5400},
    }
    assert numbers.about("loop").window_ns == (3990, 5990)
    assert numbers.about("loop").coverage == 1.0
    assert numbers.about("step_lengths").window_ns == (300, 5990)
    assert [row["busy_ns"] for row in numbers["per_step"]] == [0, 0, 0]
    assert metrics(trace_of())["loop"] is None


def test_pickling() -> None:
    """Unpickled metrics keep their definitions."""
    numbers = metrics(small_trace())
    other = pickle.loads(pickle.dumps(numbers))
    assert other == numbers
    assert other.about("busy_ns") == numbers.about("busy_ns")


def test_split_of_overlapping_work() -> None:
    """Overlapping work on two streams is split into parts that add up."""
    numbers = metrics(
        trace_of(
            gpu=[
                kernel("gemm", 0, 100),
                kernel("ncclDevKernel_AllReduce", 50, 150, stream=9),
                memcpy("Memcpy HtoD (Pinned -> Device)", 140, 170, stream=10),
                memset(200, 210),
            ]
        )
    )
    expected = {
        "span_ns": 210,
        "busy_ns": 180,
        "idle_ns": 30,
        "compute_ns": 110,
        "kernel_compute_ns": 100,
        "comm_ns": 100,
        "memcpy_ns": 30,
        "memset_ns": 10,
        "exposed_comm_ns": 50,
        "exposed_memcpy_ns": 20,
        "overlap_comm_compute_ns": 50,
        "kernel_sum_ns": 200,
        "kernel_util_span": 150 / 210,
    }
    assert expected == {key: numbers[key] for key in expected}


def test_gaps_at_the_limit() -> None:
    """A gap before work that was launched early is a latency if it is shorter than 30 us."""
    starts = [0, 30_009, 60_019]  # gaps of 29,999 and 30,000 ns
    numbers = metrics(
        trace_of(
            runtime=[on_cpu("cudaLaunchKernel", -9 + i, -8 + i, correlation=i + 1) for i in range(3)],
            gpu=[kernel("k", at, at + 10, correlation=i + 1) for i, at in enumerate(starts)],
        )
    )
    assert numbers["gaps_device_ns"] == {"launch_latency": 29_999, "other": 30_000}
    (stream,) = numbers["idle_streams_ns"].values()
    assert (stream["kernel_wait"], stream["other"]) == (29_999, 30_000)


@pytest.mark.parametrize(("launched", "cause"), [(9, "launch_latency"), (10, "host_wait"), (11, "host_wait")])
def test_gaps_by_the_time_of_the_launch(launched: int, cause: str) -> None:
    """A gap is the CPU's if the work after it was launched when the GPU was idle already."""
    numbers = metrics(
        trace_of(
            runtime=[
                on_cpu("cudaLaunchKernel", start, start + 1, correlation=i + 1)
                for i, start in enumerate([-9, launched])
            ],
            gpu=[kernel("k", start, start + 10, correlation=i + 1) for i, start in enumerate([0, 15])],
        )
    )
    assert numbers["gaps_device_ns"] == {cause: 5}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"operators": [on_cpu("aten::mm", 0, 5)]},
        {"regions": [on_cpu("ProfilerStep#1", 0, 5)]},
        {"gpu": [memcpy("Memcpy DtoH (Device -> Pinned)", 3, 9)]},
        {"gpu": [kernel("empty", 5, 5)]},
        {"gpu": [kernel("a", 0, 10), kernel("b", 5, 8), kernel("c", 5, 5), kernel("d", 7, 20)]},
        {"gpu": [kernel("a", 0, 10, device=-1, stream=-1, blocks_per_sm=0.5, occupancy_percent=0.0)]},
        {"runtime": [on_cpu("cudaDeviceSynchronize", 0, 5)]},
    ],
    ids=["nothing", "cpu", "step", "copy", "instant", "overlap", "unknown place", "sync"],
)
def test_incomplete_traces(tables: dict[str, Any]) -> None:
    """Incomplete traces have all keys, without NaN; a ratio to 0 is None."""
    numbers = metrics(trace_of(**tables))
    json.dumps(numbers, allow_nan=False)
    assert numbers.keys() == DEFINITIONS.keys()
    assert (numbers["busy_pct"] is None) == (numbers["span_ns"] == 0)


@pytest.mark.parametrize("pattern", ["(", "*", 7, re.compile(b"nccl")])
def test_invalid_pattern(pattern: Any) -> None:
    """An invalid regular expression is refused with the argument's name and value."""
    with pytest.raises(ValueError, match='"collectives" must be') as caught:
        metrics(trace_of(), pattern)
    assert repr(pattern) in str(caught.value)


def test_own_pattern() -> None:
    """A given pattern replaces the known kernels; text ignores case, a compiled pattern keeps its flags."""
    trace = trace_of(gpu=[kernel("MyExchange", 0, 10), kernel("ncclDevKernel_Generic", 20, 25)])
    assert metrics(trace)["comm_ns"] == 5
    assert metrics(trace, "exchange")["comm_ns"] == 10
    assert metrics(trace, re.compile("exchange"))["comm_ns"] == 0


TIMES = st.sampled_from([0, 1, 7, -5, 2**62, -(2**62), 2**63 - 1, -(2**63)])


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=5))
@settings(deadline=None, max_examples=60)
def test_impossible_times(times: list[tuple[int, int, int]]) -> None:
    """Negative durations and times beyond 64 bits, as in damaged files, raise no error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = metrics(
            trace_of(
                gpu=[
                    {
                        **kernel("k", 0, 0, correlation=place, blocks_per_sm=0.5),
                        "start_ns": start,
                        "duration_ns": size,
                    }
                    for place, (start, size, _) in enumerate(times)
                ],
                runtime=[on_cpu("launch", at, at, correlation=place) for place, (_, _, at) in enumerate(times)],
                operators=[{**on_cpu("aten::mm", at, at), "duration_ns": size} for _, size, at in times],
            )
        )
    json.dumps(numbers, allow_nan=False)


def test_several_gpus() -> None:
    """Each GPU has its own split of the time; compute on one does not hide communication on another."""
    numbers = metrics(
        trace_of(
            gpu=[
                kernel("gemm", 0, 100),
                kernel("ncclDevKernel_AllReduce", 20, 80, device=1),
                memcpy("Memcpy HtoD (Pinned -> Device)", 80, 90, device=1),
            ]
        )
    )
    assert (numbers["busy_ns"], numbers["exposed_comm_ns"]) == (100, 0)
    parts = ("device", "gpu_events", "work_ns", "compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")
    assert [tuple(gpu[name] for name in parts) for gpu in numbers["per_gpu"]] == [
        (0, 1, 100, 100, 0, 0, 0),
        (1, 2, 70, 0, 60, 10, 30),
    ]
    assert metrics(trace_of())["per_gpu"] == []
