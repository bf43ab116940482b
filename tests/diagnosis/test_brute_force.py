"""Metrics of random small traces equal those computed from sets of single nanoseconds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.explain.metrics.metrics import metrics

from .small_traces import Row, kernel, memcpy, memset, on_cpu, trace_of

Points = set[int]


@st.composite
def work(draw: st.DrawFn) -> list[Row]:
    rows = []
    for correlation in range(draw(st.integers(0, 8))):
        start, size = draw(st.integers(0, 40)), draw(st.integers(0, 12))
        kind = draw(st.sampled_from(["gemm", "ncclDevKernel", "Memcpy DtoD (Device -> Device)", "fill"]))
        columns = {
            "device": draw(st.integers(0, 1)),
            "stream": draw(st.integers(0, 1)),
            "correlation": correlation,
            "blocks_per_sm": draw(st.sampled_from([float("nan"), 0.0, 0.25, 0.5, 2.0])),
            "occupancy_percent": draw(st.sampled_from([float("nan"), 0.0, 25.0, 100.0])),
        }
        if kind == "fill":
            rows.append(memset(start, start + size, **columns))
        else:
            make = memcpy if kind.startswith("Memcpy") else kernel
            rows.append(make(kind, start, start + size, **columns))
    return rows


LAUNCHES = st.lists(st.none() | st.integers(-10, 50), min_size=8, max_size=8)


def points(row: Row) -> Points:
    return set(range(row["start_ns"], row["start_ns"] + row["duration_ns"]))


def covered(rows: list[Row]) -> Points:
    return set().union(*map(points, rows))


def end(row: Row) -> int:
    return int(row["start_ns"] + row["duration_ns"])


def metrics_of(rows: list[Row], launches: list[int | None], steps: list[tuple[int, int]]) -> Any:
    return metrics(
        trace_of(
            gpu=rows,
            runtime=[
                on_cpu("cudaLaunchKernel", at, at + 1, correlation=place)
                for place, at in enumerate(launches)
                if at is not None
            ],
            regions=[on_cpu(f"ProfilerStep#{place}", *step) for place, step in enumerate(steps)],
            operators=[on_cpu("aten::add", begin + 1, begin + 2) for begin, _ in steps],
        )
    )


@given(work(), LAUNCHES, st.sampled_from([[], [(0, 20)], [(0, 20), (20, 45)]]))
@settings(deadline=None, max_examples=60)
def test_time(rows: list[Row], launches: list[int | None], steps: list[tuple[int, int]]) -> None:
    """The parts of the span and of each step are right, and add up."""
    numbers = metrics_of(rows, launches, steps)
    by_kind = {
        kind: covered([row for row in rows if row["name"].startswith(kind)])
        for kind in ("gemm", "nccl", "Memcpy", "Memset")
    }
    compute, busy = by_kind["gemm"] | by_kind["Memset"], covered(rows)
    span = max(map(end, rows)) - min(row["start_ns"] for row in rows) if rows else 0
    expected = {
        "span_ns": span,
        "busy_ns": len(busy),
        "idle_ns": span - len(busy),
        "compute_ns": len(compute),
        "comm_ns": len(by_kind["nccl"]),
        "exposed_comm_ns": len(by_kind["nccl"] - compute),
        "exposed_memcpy_ns": len(by_kind["Memcpy"] - compute - by_kind["nccl"]),
        "overlap_comm_compute_ns": len(by_kind["nccl"] & by_kind["gemm"]),
    }
    assert expected == {key: numbers[key] for key in expected}
    parts = ("compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")
    assert sum(numbers[part] for part in parts) == span
    for step, found in zip(steps, numbers["per_step"], strict=True):
        window = set(range(*step))
        assert found["busy_ns"] == len(busy & window)
        assert found["exposed_comm_ns"] == len((by_kind["nccl"] - compute) & window)
        assert sum(found[part] for part in parts) == found["duration_ns"] == len(window)


@given(work(), LAUNCHES)
@settings(deadline=None, max_examples=60)
def test_idle(rows: list[Row], launches: list[int | None]) -> None:
    """Gaps by stream and device, and the launches after them, are right."""
    numbers = metrics_of(rows, launches, [])
    launch = {place: at for place, at in enumerate(launches) if at is not None}
    ordered = sorted(rows, key=lambda row: row["start_ns"])
    streams: dict[str, list[Row]] = {}
    for row in ordered:
        streams.setdefault(f"dev{row['device']}/stream{row['stream']}", []).append(row)
    for name, members in streams.items():
        idle = {"host_wait": 0, "kernel_wait": 0, "other": 0, "n": len(members)}
        for before, row in pairwise(members):
            host = launch.get(row["correlation"], -100) > end(before)
            idle["host_wait" if host else "kernel_wait"] += row["start_ns"] - end(before)
        assert numbers["idle_streams_ns"][name] == idle
    gaps: dict[str, int] = {}
    reach = ordered[0]["start_ns"] if ordered else 0
    for row in ordered:
        if row["start_ns"] > reach:
            at = launch.get(row["correlation"])
            cause = "unknown" if at is None else "host_wait" if at >= reach else "launch_latency"
            gaps[cause] = gaps.get(cause, 0) + row["start_ns"] - reach
        reach = max(reach, end(row))
    assert numbers["gaps_device_ns"] == gaps
    assert sum(gaps.values()) == numbers["idle_ns"]


@given(work(), LAUNCHES)
@settings(deadline=None, max_examples=60)
def test_queue(rows: list[Row], launches: list[int | None]) -> None:
    """The length of the queue is right at each nanosecond."""
    numbers = metrics_of(rows, launches, [])
    spans = [(at, end(row)) for row, at in zip(rows, launches, strict=False) if at is not None and at <= end(row)]
    if not spans:
        assert numbers["queue_length"] == {"max": None, "mean": None}
        return
    first, last = min(at for at, _ in spans), max(to for _, to in spans)
    lengths = [sum(at <= time < to for at, to in spans) for time in range(first, last)]
    assert numbers["queue_length"]["mean"] == (pytest.approx(sum(lengths) / len(lengths)) if lengths else None)
    assert numbers["queue_length"]["max"] == max(lengths, default=0)


@given(work())
@settings(deadline=None, max_examples=60)
def test_efficiency(rows: list[Row]) -> None:
    """Multiprocessors in use at each nanosecond, and the occupancy of kernels, are right."""
    numbers = metrics_of(rows, [], [])
    kernels = [row for row in rows if row["category"] == "kernel"]
    sized = [row for row in kernels if row["blocks_per_sm"] > 0]
    used, ran = 0.0, 0
    for device in (0, 1):
        on_device = [row for row in sized if row["device"] == device]
        for at in covered(on_device):
            used += min(1.0, sum(row["blocks_per_sm"] for row in on_device if at in points(row)))
        ran += len(covered(on_device))
    devices = len({row["device"] for row in sized})
    span = numbers["span_ns"] * devices
    assert numbers["sm_eff_span"] == (pytest.approx(used / span) if span else None)
    assert numbers["sm_eff_kernel_time"] == (pytest.approx(used / ran) if ran else None)
    known = [row for row in kernels if row["occupancy_percent"] >= 0]
    weight = sum(row["duration_ns"] for row in known)
    total = sum(row["duration_ns"] * row["occupancy_percent"] for row in known)
    assert numbers["occ_weighted"] == (pytest.approx(total / weight) if weight else None)
