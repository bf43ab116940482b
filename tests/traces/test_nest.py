"""Parents, open ranges and links equal those found by comparing every pair."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.read.kineto.kineto import read_kineto
from instrument.read.tables.nest import NestedRanges
from instrument.read.tables.table import Table
from instrument.read.tables.trace import Trace

from ..support.kineto_text import Event, written
from ..support.shared_traces import shared

Ranges = list[tuple[int, int]]

moments = st.integers(0, 30)
ranges = st.lists(st.tuples(moments, st.integers(0, 12)), max_size=14).map(
    lambda pairs: sorted(
        ((start, start + length) for start, length in pairs), key=lambda pair: (pair[0], -pair[1])
    )
)


def nest(ranges: Ranges) -> NestedRanges:
    start, end = np.array(ranges, np.int64).reshape(-1, 2).T
    return NestedRanges(start, end)


def open_at(ranges: Ranges, at: int) -> int:
    """Return the last started range that is open at a time."""
    return max((row for row, (start, end) in enumerate(ranges) if start <= at < end), default=-1)


def parent(ranges: Ranges, row: int) -> int:
    """Return the last started earlier range that contains a range and is open when it starts."""
    begin, end = ranges[row]
    return max((other for other in range(row) if ranges[other][1] >= end and ranges[other][1] > begin), default=-1)


@settings(deadline=None, max_examples=600)
@given(ranges)
def test_parents(ranges: Ranges) -> None:
    """Parents are right for ranges that nest, overlap, are empty, or share a start or an end."""
    assert [parent(ranges, row) for row in range(len(ranges))] == nest(ranges).parents.tolist()


@settings(deadline=None, max_examples=300)
@given(ranges)
def test_open_ranges(ranges: Ranges) -> None:
    """The innermost open range is right at each time, also before the first range and after the last."""
    times = list(range(-2, 45))
    assert [open_at(ranges, at) for at in times] == nest(ranges).innermost_at(np.array(times)).tolist()


@pytest.mark.parametrize("length", [15, 10_000_000])
def test_time_for_overlapping_ranges(length: int) -> None:
    """Nesting 200,000 overlapping ranges takes less than 5 s."""
    start = np.arange(200_000) * 10
    began = time.perf_counter()
    assert np.all(NestedRanges(start, start + length).parents == -1)
    assert time.perf_counter() - began < 5


# Links


def slow_links(trace: Trace) -> list[tuple[int, int, int, int, int]]:
    """Return launch, operator, region, module and step of each row, found by comparing it with all others."""

    def innermost(table: Table, thread: int, at: int, prefix: str = "") -> int:
        names = table.text("name") if prefix else []
        rows = [
            row
            for row in np.flatnonzero(
                (table.thread == thread) & (table.start_ns <= at) & (table.end_ns > at)
            ).tolist()
            if not prefix or names[row].startswith(prefix)
        ]
        return max(rows, default=-1)

    rows = trace.steps or trace.regions
    totals = {thread: int(rows.duration_ns[rows.thread == thread].sum()) for thread in sorted(set(rows.thread))}
    main = max(totals, key=lambda thread: totals[thread], default=-1)
    links = []
    for row in range(len(trace.gpu)):
        correlation, external = int(trace.gpu.correlation[row]), int(trace.gpu.external[row])
        launches: Any = np.flatnonzero(trace.runtime.correlation == correlation) if correlation >= 0 else []
        named: Any = np.flatnonzero(trace.operators.external == external) if external >= 0 else []
        launch = operator = region = module = step = -1
        thread = at = None
        if len(launches):
            launch = int(launches[0])
            thread, at = int(trace.runtime.thread[launch]), int(trace.runtime.start_ns[launch])
            operator = innermost(trace.operators, thread, at)
        elif len(named) and external != correlation:
            operator = int(named[0])
            thread, at = int(trace.operators.thread[operator]), int(trace.operators.start_ns[operator])
        if thread is not None and at is not None:
            region = innermost(trace.regions, thread, at)
            if region < 0:
                region = innermost(trace.regions, main, at)
            module = innermost(trace.frames, thread, at, "nn.Module: ")
            running = np.flatnonzero((trace.steps.start_ns <= at) & (trace.steps.end_ns > at))
            step = int(running[-1]) if len(running) else -1
        links.append((launch, operator, region, module, step))
    return links


def links(trace: Trace) -> list[tuple[int, ...]]:
    columns = [trace.gpu[name].tolist() for name in ("launch", "operator", "region", "module", "step")]
    return list(zip(*columns, strict=True))


def check_coverage(trace: Trace) -> None:
    for number, link in enumerate(("launch", "operator", "region", "module", "step")):
        linked = [row for row, found in enumerate(links(trace)) if found[number] >= 0]
        coverage = trace.coverage[link]
        assert (len(linked), len(trace.gpu)) == (coverage.linked, coverage.of)
        assert trace.gpu.duration_ns[linked].sum() == coverage.linked_ns
        assert trace.gpu.duration_ns.sum() == coverage.of_ns


_FIXED = {
    "ph": st.just("X"),
    "pid": st.just(1),
    "tid": st.integers(1, 2),
    "ts": moments,
    "dur": st.integers(0, 30),
}
_ids = st.integers(-1, 5)


def _events(category: str, names: list[str], **args: st.SearchStrategy[int]) -> st.SearchStrategy[list[Event]]:
    fixed = {"cat": st.just(category), "name": st.sampled_from(names), "args": st.fixed_dictionaries(args)}
    return st.lists(st.fixed_dictionaries(_FIXED | fixed), max_size=6)


_ANY = st.tuples(
    _events("kernel", ["gemm"], correlation=_ids, **{"External id": _ids}),
    _events("cuda_runtime", ["cudaLaunchKernel"], correlation=_ids),
    _events("cpu_op", ["aten::mm", "aten::addmm"], **{"External id": _ids}),
    _events("user_annotation", ["ProfilerStep#1", "ProfilerStep#2", "forward", "a"]),
    _events("python_function", ["nn.Module: Linear_0", "nn.Module: Block_0", "f", "g"]),
).map(lambda lists: [event for events in lists for event in events])


@settings(deadline=None, max_examples=150)
@given(events=_ANY)
def test_links_of_random_traces(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    """All links and their coverage are right for random ranges."""
    path = tmp_path_factory.getbasetemp() / "links.json"
    path.write_bytes(written(events))
    trace = read_kineto(path)
    assert slow_links(trace) == links(trace)
    check_coverage(trace)


@pytest.mark.parametrize(
    "name",
    [
        "hta_gpu_user_annotation.json.gz",
        "param_dlrm_8rank_r1.json.gz",
        "tl_h100_bert_small.json.gz",
        "tl_h100_qwen05b.json.gz",
        "tl_vllm_decode_full_cudagraph.json.gz",
    ],
)
def test_links_of_real_traces(name: str) -> None:
    """All links and their coverage are right for real traces."""
    trace = read_kineto(Path(shared(name)))
    assert slow_links(trace) == links(trace)
    check_coverage(trace)
