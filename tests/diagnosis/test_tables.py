"""Tables of kernels, operators, regions and modules of small traces."""

from __future__ import annotations

from typing import Any

import pytest

from instrument.explain.metrics.metrics import Metrics, metrics

from .small_traces import kernel, on_cpu, trace_of


def launch_of(name: str, at: int, start: int, end: int, **columns: Any) -> tuple[Any, Any]:
    """Return a call and the kernel that it launches, with the call's time as correlation."""
    return (
        on_cpu("cudaLaunchKernel", at, at + 1, correlation=at),
        kernel(name, start, end, correlation=at, **columns),
    )


def of(numbers: Metrics, table: str, *columns: str) -> dict[str, tuple[Any, ...]]:
    return {row["name"]: tuple(row[column] for column in columns) for row in numbers[table]}


def test_kernel_table() -> None:
    """Kernels have count, sum, mean, extremes and share by name, longest first."""
    numbers = metrics(trace_of(gpu=[kernel("b", 0, 10), kernel("a", 10, 40), kernel("b", 50, 70)]))
    columns = ("count", "sum_ns", "mean_ns", "min_ns", "max_ns", "share")
    assert of(numbers, "kernel_table", *columns) == {
        "a": (1, 30, 30.0, 30, 30, 0.5),
        "b": (2, 30, 15.0, 10, 20, 0.5),
    }


@pytest.fixture
def nested() -> Metrics:
    """Return metrics of nested regions, with two overlapping kernels and one launched outside them."""
    pairs = [
        launch_of("k", 12, 100, 120, stream=1),
        launch_of("k", 31, 110, 140, stream=2),
        launch_of("k", 95, 200, 230),
    ]
    return metrics(
        trace_of(
            regions=[on_cpu("step", 0, 90), on_cpu("forward", 10, 50), on_cpu("forward", 20, 40)],
            operators=[
                on_cpu("aten::linear", 10, 38),
                on_cpu("aten::addmm", 11, 20),
                on_cpu("aten::addmm", 30, 35),
            ],
            frames=[
                on_cpu("nn.Module: Net_0", 0, 90),
                on_cpu("net.py(7): forward", 5, 80),
                on_cpu("nn.Module: Linear_0", 10, 39),
                on_cpu("linear.py(1): forward", 10, 39),
            ],
            runtime=[call for call, _ in pairs],
            gpu=[kernel for _, kernel in pairs],
        )
    )


def test_operator_table(nested: Metrics) -> None:
    """Operators have CPU time without children, GPU time with and without children, and covered GPU time."""
    columns = ("calls", "cpu_self_ns", "gpu_self_ns", "gpu_ns", "gpu_busy_ns")
    assert of(nested, "operator_table", *columns) == {
        "aten::linear": (1, 28 - 14, 0, 50, 40),
        "aten::addmm": (2, 14, 50, 50, 40),
    }


def test_region_table(nested: Metrics) -> None:
    """A kernel counts once for each enclosing name; projections are per call."""
    columns = ("calls", "cpu_ns", "gpu_count", "gpu_ns", "gpu_busy_ns", "gpu_projection_ns")
    assert of(nested, "region_table", *columns) == {
        "step": (1, 90, 2, 50, 40, 40),
        "forward": (2, 60, 2, 50, 40, 40 + 30),
    }


def test_module_table(nested: Metrics) -> None:
    """Modules include the work of inner modules, also through Python functions; other frames are excluded."""
    columns = ("calls", "gpu_ns", "gpu_busy_ns", "gpu_projection_ns")
    assert of(nested, "module_table", *columns) == {
        "nn.Module: Net_0": (1, 50, 40, 40),
        "nn.Module: Linear_0": (1, 50, 40, 40),
    }


def test_self_time_of_interleaved_children() -> None:
    """The common time of overlapping children is subtracted once."""
    numbers = metrics(trace_of(operators=[on_cpu("a", 0, 100), on_cpu("b", 10, 40), on_cpu("c", 30, 60)]))
    assert of(numbers, "operator_table", "cpu_self_ns")["a"] == (50,)


def test_projection_over_a_pause() -> None:
    """A projection lasts from the first start to the last end, including pauses."""
    pairs = [launch_of("k", 1, 10, 20), launch_of("k", 2, 80, 90)]
    numbers = metrics(
        trace_of(
            regions=[on_cpu("r", 0, 5)], runtime=[call for call, _ in pairs], gpu=[kernel for _, kernel in pairs]
        )
    )
    assert of(numbers, "region_table", "gpu_busy_ns", "gpu_projection_ns") == {"r": (20, 80)}
