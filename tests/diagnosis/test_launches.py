"""Launches, synchronizations and occupancy of small traces."""

from __future__ import annotations

import pytest

from instrument.explain.metrics.metrics import metrics
from instrument.read.tables.trace import Device

from .small_traces import kernel, on_cpu, trace_of


def test_launches() -> None:
    """One call may launch many kernels; delays count from the call's start, for kernels only."""
    numbers = metrics(
        trace_of(
            runtime=[
                on_cpu("cudaGraphLaunch", 0, 8, correlation=1),
                on_cpu("cudaLaunchKernel", 10, 12, correlation=2),
                on_cpu("cudaMalloc", 20, 90, correlation=3),
            ],
            gpu=[
                kernel("a", 5, 10, correlation=1),
                kernel("b", 15, 20, correlation=1),
                kernel("c", 40, 45, correlation=2),
                kernel("d", 50, 55, correlation=77),
            ],
        )
    )
    assert numbers["launch_to_start_ns"] == {"median": 15, "p95": 30, "matched": 3, "unmatched": 1}
    assert numbers["launch_calls_ns"] == {"n": 2, "sum": 10, "median": 8, "max": 8}
    assert numbers["queue_length"] == {"max": 2, "mean": (10 + 20 + 35) / 45}


def test_synchronizations() -> None:
    """Concurrent synchronizations on two threads both count; their common time counts once."""
    numbers = metrics(
        trace_of(
            runtime=[
                on_cpu("cudaStreamSynchronize", 0, 10),
                on_cpu("hipDeviceSynchronize", 5, 20, thread=1),
                on_cpu("cudaLaunchKernel", 30, 40),
            ]
        )
    )
    assert (numbers["sync_calls"], numbers["sync_union_ns"]) == (2, 20)


@pytest.mark.parametrize(
    ("call", "blocks"), [("hipLaunchKernel", 512), ("hipExtModuleLaunchKernel", 2), ("hipModuleLaunchKernel", 512)]
)
def test_grid_of_threads(call: str, blocks: int) -> None:
    """One HIP function takes a grid of threads instead of blocks; an unlisted device is like the listed ones."""
    numbers = metrics(
        trace_of(
            devices=[Device(0, sms=4096, threads_per_sm=2048), Device(1, sms=4096, threads_per_sm=2048)],
            runtime=[on_cpu(call, 0, 1, correlation=1)],
            gpu=[kernel("k", 10, 20, device=4, blocks=512, block_threads=256, correlation=1)],
        )
    )
    assert numbers["sm_eff_span"] == blocks / 4096
    assert numbers["occ_limit_weighted"] == 100 * blocks / 4096 * 256 / 2048


def test_different_devices() -> None:
    """If listed devices differ, the properties of an unlisted one are unknown."""
    numbers = metrics(
        trace_of(devices=[Device(0, sms=4), Device(1, sms=8)], gpu=[kernel("k", 0, 10, device=4, blocks=2)])
    )
    assert numbers["sm_eff_span"] is None
    assert numbers.about("sm_eff_span").coverage == 0


def test_utilization_in_steps() -> None:
    """Utilization within the steps counts kernels only, clipped to the window."""
    numbers = metrics(
        trace_of(
            regions=[on_cpu("ProfilerStep#5", 0, 50), on_cpu("ProfilerStep#6", 60, 100)],
            operators=[on_cpu("aten::add", 10, 20), on_cpu("aten::add", 70, 80)],
            gpu=[kernel("k", 40, 70), kernel("k", 90, 200)],
        )
    )
    assert numbers["steps"] == {
        "n": 2,
        "names": ["ProfilerStep#5", "ProfilerStep#6"],
        "window_ns": 100,
        "min_ns": 40,
        "median_ns": 45.0,
        "max_ns": 50,
        "kernel_util_cpu_step_window": 0.4,
    }
    assert [(step["number"], step["busy_ns"], step["idle_ns"]) for step in numbers["per_step"]] == [
        (5, 10, 40),
        (6, 20, 20),
    ]
