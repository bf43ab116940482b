"""Shapes, operations and bytes of matmuls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from instrument.explain.metrics.metrics import metrics

from .small_traces import Row, kernel, on_cpu, trace_of

HALF = "c10::BFloat16"


def matmul(name: str, shapes: Any, types: list[str], start: int = 0, end: int = 10) -> Row:
    return on_cpu(name, start, end, shapes=json.dumps(shapes), types=json.dumps(types))


def rows(*operators: Row, **tables: list[Row]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = metrics(trace_of(operators=list(operators), **tables))["matmul_table"]
    return found


@pytest.mark.parametrize(
    ("name", "shapes", "sizes", "size"),
    [
        ("aten::mm", [[2, 3], [3, 5]], (1, 2, 5, 3), 6 + 15 + 10),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], (7, 2, 5, 3), 7 * 31),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], (1, 2, 5, 3), 5 + 31),
        ("aten::baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5], [], []], (7, 2, 5, 3), 7 * (10 + 31)),
        ("aten::linear", [[7, 2, 3], [5, 3], [5]], (7, 2, 5, 3), 42 + 15 + 5 + 70),
        ("aten::linear", [[2, 3], [5, 3], []], (1, 2, 5, 3), 31),
        ("aten::matmul", [[4, 1, 2, 3], [6, 3, 5]], (24, 2, 5, 3), 24 + 90 + 240),
        ("aten::matmul", [[3], [3, 5]], (1, 1, 5, 3), 3 + 15 + 5),
        ("aten::matmul", [[2, 3], [3]], (1, 2, 1, 3), 6 + 3 + 2),
    ],
)
def test_shapes(name: str, shapes: Any, sizes: tuple[int, ...], size: int) -> None:
    """Batch, m, n and k follow from the input shapes, operations from these, and bytes from inputs and result."""
    (found,) = rows(matmul(name, shapes, [HALF] * len(shapes)))
    batch, m, n, k = sizes
    assert (found["batch"], found["m"], found["n"], found["k"]) == sizes
    assert found["flops"] == 2 * batch * m * n * k
    assert found["bytes"] == 2 * size


def test_types() -> None:
    """Bytes follow from the types; for an unknown type, or another type of the result, they are None."""
    assert rows(matmul("aten::mm", [[2, 3], [3, 5]], ["float", "float"]))[0]["bytes"] == 4 * 31
    assert rows(matmul("aten::mm", [[2, 3], [3, 5]], ["float", "new"]))[0]["bytes"] is None
    assert rows(matmul("aten::_int_mm", [[2, 3], [3, 5]], ["signed char"] * 2))[0]["bytes"] is None
    assert rows(on_cpu("aten::mm", 0, 5, shapes="[[2, 3], [3, 5]]"))[0]["bytes"] is None


@pytest.mark.parametrize(
    "shapes", ["", "[]", "[[2, 3]]", "[[2, 3], [4, 5]]", "[[2, 3], []]", "[1, 2]", "{", "null"]
)
def test_unreadable_shapes(shapes: str) -> None:
    """Calls with missing or mismatched shapes are excluded."""
    assert rows(on_cpu("aten::mm", 0, 10, shapes=shapes, types='["float", "float"]')) == []


def test_innermost_only() -> None:
    """Only mm counts of nested linear, matmul and mm."""
    shapes, types = [[2, 3], [3, 5]], [HALF, HALF]
    found = rows(
        matmul("aten::linear", [[2, 3], [5, 3]], types, 0, 30),
        matmul("aten::matmul", shapes, types, 1, 20),
        matmul("aten::mm", shapes, types, 2, 10),
    )
    assert [(row["name"], row["calls"]) for row in found] == [("aten::mm", 1)]


def test_throughput() -> None:
    """Throughput is relative to the GPU time of the calls that have any."""
    shapes, types = [[200, 300], [300, 500]], [HALF, HALF]
    found = rows(
        matmul("aten::mm", shapes, types, 0, 10),
        matmul("aten::mm", shapes, types, 20, 30),
        runtime=[on_cpu("cudaLaunchKernel", 5, 6, correlation=1), on_cpu("cudaLaunchKernel", 7, 8, correlation=2)],
        gpu=[kernel("gemm", 50, 150, correlation=1), kernel("reduce", 150, 250, correlation=2)],
    )
    (row,) = found
    assert (row["calls"], row["gpu_calls"], row["gpu_ns"]) == (2, 1, 200)
    assert row["flops_per_s"] == pytest.approx(2 * 200 * 300 * 500 / 200e-9)
