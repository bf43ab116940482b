"""Summaries of traces recorded by torch, and of a hand-written trace with GPU work."""

from __future__ import annotations

import gzip
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from instrument.base.errors import InstrumentError, TraceError
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.summary import OperatorStat, RegionStat, Summary, merge
from instrument.read.measures.summary import summarize as summarize_trace
from instrument.read.tables.steps import whole_window
from tests.support.shared_traces import shared
from tests.support.torch_versions import records_all_threads

GPU_TRACE = Path(__file__).parent.parent / "data" / "gpu_two_steps.json"
BASE_US = 1_712_195_495_000_000

Event = dict[str, Any]


def summarize(path: Path) -> Summary:
    return summarize_trace(read_kineto(path))


def region(name: str, start_us: float, dur_us: float, thread: object = 1, cat: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": start_us, "dur": dur_us, "pid": 1, "tid": thread}


def launched(correlation: int, at_us: float, dur_us: float, thread: object = 1) -> list[Event]:
    """Return a launch and its kernel."""
    args = {"args": {"correlation": correlation}}
    return [
        region("cudaLaunchKernel", at_us, 1, thread, "cuda_runtime") | args,
        region("gemm", at_us + 5, dur_us, "stream 7", "kernel") | args | {"pid": "GPU 0"},
    ]


def write(folder: Path, events: list[Event]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def paths(summary: Summary) -> list[str]:
    return ["/".join(stat.path) for stat in summary.regions]


def union_ns(ranges: list[tuple[int, int]]) -> int:
    """Return the time that the ranges cover, with overlaps counted once."""
    return len({ns for start, end in ranges for ns in range(start, end)})


# A trace with GPU work


def test_regions_of_a_gpu_trace() -> None:
    """GPU time goes to the region that launched it, also from the threads of the backward pass."""
    expected = (
        RegionStat(("forward",), 2, 480_000, 320_000, 50_125 + 20_000 + 30_500 + 5_005, frozenset(range(2))),
        RegionStat(("forward", "attention"), 2, 160_000, 160_000, 50_125 + 20_000 + 30_500, frozenset(range(2))),
        RegionStat(("backward",), 1, 300_000, 300_000, 100_500, frozenset(range(1))),
        RegionStat(("Optimizer.step#SGD.step",), 1, 100_000, 100_000, 900, frozenset(range(1))),
    )
    assert expected == summarize(GPU_TRACE).regions


def test_totals_of_a_gpu_trace() -> None:
    """Work that was not launched in the window is counted separately; GPU annotations are not counted."""
    summary = summarize(GPU_TRACE)
    assert (summary.steps, summary.step_ns) == (2, 2_000_500)
    assert (summary.step_numbers, summary.step_times_ns) == ((5, 6), (1_000_000, 1_000_500))
    assert (summary.gpu_total_ns, summary.gpu_unattributed_ns) == (219_040, 7_007 + 3_003 + 2_000)
    assert (summary.outside_ns, summary.outside_gpu_ns) == (199_500, 4_000)  # "evaluate", after the last step


def test_operators_of_a_gpu_trace() -> None:
    """Operators have their self time and the GPU work that they launched, longest first."""
    expected = (
        OperatorStat("MmBackward0", 1, 110_000, 0, 1),
        OperatorStat("aten::mm", 3, 100_000, 50_125 + 100_500 + 20_000 + 30_500, 2),
        OperatorStat("aten::copy_", 1, 20_000, 7_007, 1),
        OperatorStat("aten::relu", 1, 20_000, 5_005, 1),
        OperatorStat("aten::empty", 1, 0, 0, 1),
    )
    assert expected == summarize(GPU_TRACE).operators


def test_thread_with_its_own_region(tmp_path: Path) -> None:
    """Launches of other threads belong to the thread of the steps only if no region is open on their own."""
    events = [region("ProfilerStep#0", 0, 100), region("backward", 0, 100), region("comm", 10, 20, thread=2)]
    trace = write(tmp_path, events + launched(1, 15, 7, thread=2) + launched(2, 40, 9, thread=2))
    assert {s.path[0]: s.gpu_ns for s in summarize(trace).regions} == {"backward": 9_000, "comm": 7_000}


def test_categories_of_2021(tmp_path: Path) -> None:
    """In 2021, categories began with capitals, and steps were operators."""
    events = [
        region("ProfilerStep#0", 0, 100, cat="Operator"),
        region("aten::mm", 10, 20, cat="Operator") | {"args": {"external id": 4}},
        region("gemm", 30, 5, "stream 7", cat="Kernel") | {"args": {"external id": 4, "correlation": 9}},
    ]
    summary = summarize(write(tmp_path, events))
    assert (summary.steps, summary.step_ns) == (1, 100_000)
    assert (OperatorStat("aten::mm", 1, 20_000, 5_000, 1),) == summary.operators


# Recordings of this torch


def test_recorded_nesting(tmp_path: Path) -> None:
    """Recorded regions form a tree with their counts; CPU-only traces have no GPU time."""

    def step() -> None:
        with record_function("forward"):
            for _ in range(2):
                with record_function("block"), record_function("block"):
                    torch.ones(4).sum()
        with record_function("backward"):
            torch.ones(4).sum()

    path = tmp_path / "trace.json.gz"
    plan = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(5):
            step()
            profiler.step()

    summary = summarize(path)
    assert summary.steps == 3
    expected = {"forward": 3, "forward/block": 6, "forward/block/block": 6, "backward": 3}
    assert expected == dict(zip(paths(summary), [stat.calls for stat in summary.regions], strict=True))
    forward, block, inner, backward = summary.regions
    assert forward.self_ns + block.cpu_ns == forward.cpu_ns
    assert block.self_ns + inner.cpu_ns == block.cpu_ns
    assert forward.cpu_ns + backward.cpu_ns < summary.step_ns
    assert [stat.calls for stat in summary.operators if stat.name == "aten::ones"] == [9]
    assert summary.gpu_total_ns is None
    assert {stat.gpu_ns for stat in summary.regions} == {stat.gpu_ns for stat in summary.operators} == {None}


def test_recorded_optimizer(tmp_path: Path) -> None:
    """Torch's own annotations are regions."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("update"):
        weight.sum().backward()
        optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    summary = summarize(tmp_path / "trace.json")
    assert paths(summary) == ["update", "update/Optimizer.step#SGD.step"]
    assert summary.steps == 0
    assert summary.regions[0].cpu_ns <= summary.step_ns


def test_recorded_threads(tmp_path: Path) -> None:
    """Ranges nest on their own thread only, even if they overlap in time."""
    config = records_all_threads()

    def work() -> None:
        with record_function("worker"):
            torch.ones(4).sum()

    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, experimental_config=config) as profiler, record_function("main"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    summary = summarize(tmp_path / "trace.json")
    assert paths(summary) == ["main", "worker"]
    assert {True} == {stat.self_ns == stat.cpu_ns for stat in summary.regions}


# Ranges of any shape

moments = st.integers(0, 60)
ranges = st.lists(st.tuples(st.integers(0, 2), moments, moments), max_size=12)
launches = st.lists(st.tuples(st.integers(0, 3), moments, st.integers(0, 9)), max_size=12)


@settings(deadline=None, max_examples=60)
@given(ranges=ranges, launches=launches, steps=st.booleans())
def test_times_add_up(
    tmp_path_factory: pytest.TempPathFactory,
    ranges: list[tuple[int, int, int]],
    launches: list[tuple[int, int, int]],
    steps: bool,
) -> None:
    """Self times of random ranges add up to the covered time; steps hold what starts in them, to their end."""
    events = [region("ab"[i % 2], start, dur, thread) for i, (thread, start, dur) in enumerate(ranges)]
    events += [region("ProfilerStep#1", 0, 50)] * steps
    for correlation, (thread, at, dur) in enumerate(launches, start=1):
        events += launched(correlation, at, dur, thread)
    path = write(tmp_path_factory.mktemp("any"), events)
    summary = summarize(path)

    roots = [stat.gpu_ns or 0 for stat in summary.regions if len(stat.path) == 1]
    assert sum(roots) + (summary.gpu_unattributed_ns or 0) == (summary.gpu_total_ns or 0)
    assert 1_000 * sum(dur for *_, dur in launches) == (summary.gpu_total_ns or 0) + summary.outside_gpu_ns
    marked = summary.steps > 0  # false if nothing runs in the step
    begin, end = (0, 50) if marked else (ns // 1_000 for ns in whole_window(read_kineto(path)))
    inside = [
        (thread, max(start, begin), max(min(start + dur, end) - max(start, begin), 0))
        for thread, start, dur in ranges
        if start < 50 or not marked
    ]
    within = [dur for _, start, dur in launches if start < 50 or not marked]
    assert 1_000 * sum(within) == (summary.gpu_total_ns or 0)
    assert len(inside) == sum(stat.calls for stat in summary.regions)
    assert 1_000 * sum(dur for *_, dur in inside) == sum(stat.cpu_ns for stat in summary.regions)
    assert all(0 <= stat.self_ns <= stat.cpu_ns for stat in summary.regions)
    covered = sum(union_ns([(s, s + dur) for t, s, dur in inside if t == thread]) for thread in range(3))
    assert 1_000 * covered <= sum(stat.self_ns for stat in summary.regions)
    if marked:
        open_ = union_ns([(start, start + dur) for _, start, dur in inside])
        assert 1_000 * (50 - open_) == summary.no_region_ns


@settings(deadline=None, max_examples=60)
@given(brackets=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=30))
def test_self_times_of_nested_ranges(
    tmp_path_factory: pytest.TempPathFactory, brackets: list[tuple[bool, int]]
) -> None:
    """The self times of nested ranges add up to the time during which any is open."""
    clock, open_, closed = 0, [], []
    for opens, wait in [*brackets, *[(False, 1)] * len(brackets)]:
        clock += wait
        if opens:
            open_.append(clock)
        elif open_:
            closed.append((open_.pop(), clock, len(open_)))
    events = [region(f"depth {depth}", start, end - start) for start, end, depth in closed]
    summary = summarize(write(tmp_path_factory.mktemp("nested"), events))
    covered = union_ns([(start, end) for start, end, _ in closed])
    assert 1_000 * covered == sum(stat.self_ns for stat in summary.regions)
    assert all(stat.path == tuple(f"depth {i}" for i in range(len(stat.path))) for stat in summary.regions)


def test_interleaved_tasks_are_siblings(tmp_path: Path) -> None:
    """Ranges of two asyncio tasks overlap inside the loop's range; their common time is covered once."""
    trace = write(tmp_path, [region("loop", 0, 100), region("a", 10, 50), region("b", 30, 60)])
    expected = {"loop": 20_000, "loop/a": 50_000, "loop/b": 60_000}
    summary = summarize(trace)
    assert expected == dict(zip(paths(summary), [stat.self_ns for stat in summary.regions], strict=True))
    assert summary.overlap_ns == 30_000
    assert merge([summary, summary]).overlap_ns == 60_000
    threads = [region("loop", 0, 100), region("a", 10, 50), region("b", 30, 60, thread=2), region("c", 60, 30)]
    assert summarize(write(tmp_path, threads)).overlap_ns == 0


def test_times_since_1970_are_exact(tmp_path: Path) -> None:
    """Microseconds with more decimals than a float holds are exact to the nanosecond."""
    text = json.dumps({"traceEvents": [region("a", 803, 0), region("b", 937, 0.125)]})
    for decimals in ("803", "937"):
        text = text.replace(f'"ts": {decimals}', f'"ts": {BASE_US}.{decimals}')
    trace = tmp_path / "trace.json"
    trace.write_text(text)
    assert summarize(trace).step_ns == 937 - 803 + 125


# Several windows


def test_merge_adds_up() -> None:
    """Two equal windows add up to one with doubled numbers."""
    once = summarize(GPU_TRACE)
    twice = merge([once, once])
    assert merge([once]) == once
    assert (4, 2 * once.step_ns) == (twice.steps, twice.step_ns)
    assert paths(once) == paths(twice)
    gpu_ns = [stat.gpu_ns or 0 for stat in once.regions]
    assert [2 * ns for ns in gpu_ns] == [stat.gpu_ns for stat in twice.regions]
    assert twice.gpu_unattributed_ns == 2 * 12_010


def test_merge_keeps_the_tree_in_order(tmp_path: Path) -> None:
    """A region that only a later window has follows its siblings, and has no GPU time."""
    first = summarize(write(tmp_path, [region("a", 0, 10), region("x", 1, 2), region("b", 20, 10)]))
    second = summarize(write(tmp_path, [region("c", 0, 10), region("a", 20, 10), region("y", 21, 2)]))
    assert paths(merge([first, second])) == ["a", "a/x", "a/y", "b", "c"]
    gpu = summarize(GPU_TRACE)
    assert gpu.gpu_total_ns == merge([first, gpu]).gpu_total_ns
    assert merge([first, gpu]).regions[0].gpu_ns == 0


def test_merge_of_no_windows() -> None:
    """No windows make an empty summary."""
    assert Summary(0, 0, (), (), None, None) == merge([])


# Damaged files


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b'{"traceEvents": [{"ph": "X", "na', "ends in an event"),
        (b'{"traceEvents": [{"name": "{"device": "cpu"}"}]}', "not JSON"),
        (b'{"rocprofiler-sdk-tool": []}', "traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon"}]}', "not JSON"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12], "cut off"),
        (b"\x1f\x8bnot gzip at all", "method"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, reason: str) -> None:
    """The error names the file and the damage."""
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=reason) as caught:
        summarize(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, InstrumentError)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value)))


def test_missing_file(tmp_path: Path) -> None:
    """A missing file raises FileNotFoundError."""
    with pytest.raises(FileNotFoundError):
        summarize(tmp_path / "missing.json")


def test_bare_array_of_events(tmp_path: Path) -> None:
    """A bare array of events is read."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([region("a", 0, 10)]))
    assert paths(summarize(path)) == ["a"]


def test_empty_trace(tmp_path: Path) -> None:
    """An empty window is valid."""
    assert merge([]) == summarize(write(tmp_path, []))


def test_announced_step_that_did_not_run(tmp_path: Path) -> None:
    """A last step without operators, which a loop announces as it ends, does not count."""
    events = [region("ProfilerStep#4", 0, 10), region("aten::mm", 2, 5, cat="cpu_op")]
    whole = summarize(write(tmp_path, events))
    assert summarize(write(tmp_path, [*events, region("ProfilerStep#5", 10, 1)])) == whole
    assert (whole.steps, whole.step_ns) == (1, 10_000)


def test_steps_named_by_the_trace(tmp_path: Path) -> None:
    """Events after the last step that ran, in a range announced by the loop, are outside the steps."""
    steps = [region(f"ProfilerStep#{number}", 10 * number, 10) for number in range(1, 5)]
    work = [region("aten::mm", start, 4, cat="cpu_op") for start in (11, 21, 31, 42, 46)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"instrument_steps": "1-3", "traceEvents": [*steps, *work]}))
    summary = summarize(path)
    assert (summary.steps, summary.step_numbers, summary.step_ns) == (3, (1, 2, 3), 30_000)
    assert [(stat.name, stat.calls) for stat in summary.operators] == [("aten::mm", 3)]
    assert summary.outside_ns == 10_000


def test_work_of_other_processes(tmp_path: Path) -> None:
    """Steps contain the events of their own process only."""
    other = region("load", 12, 4) | {"pid": 2}
    events = [region("ProfilerStep#1", 10, 10), region("forward", 11, 5), region("aten::mm", 12, 2, cat="cpu_op")]
    assert paths(summarize(write(tmp_path, [*events, other]))) == ["forward"]


def node(number: int, start_us: float, thread: object = 1, kind: str = "AddmmBackward0") -> list[Event]:
    """Return an autograd node as torch records it, with its number from the forward."""
    engine = region(f"autograd::engine::evaluate_function: {kind}", start_us, 1, thread, "cpu_op")
    args = {"Sequence number": number, "Fwd thread id": 1}
    return [engine, region(kind, start_us, 1, thread, "cpu_op") | {"args": args}]


def addmm(number: int, start_us: float, thread: object = 1) -> Event:
    """Return an operator of a forward, with the number of the autograd node that it creates."""
    return region("aten::addmm", start_us, 1, thread, "cpu_op") | {"args": {"Sequence number": number}}


LACKS_G = ["G (backward)", "G (backward)/Linear (backward)"]


@pytest.mark.parametrize("thread", [1, 2], ids=["CPU", "thread of autograd"])
@pytest.mark.parametrize(
    ("first_step", "partial"),
    [
        ([], []),  # G does not run in the step
        (node(3, 12), LACKS_G),
        (node(3, 12, kind="MseLossBackward0"), []),  # the loss, outside any module
        ([*node(3, 12), *node(25, 27)], []),  # a function, which has no region in later steps either
        ([addmm(9, 11), *node(9, 12)], LACKS_G),  # its forward is in the trace, before G had hooks
        ([addmm(4, 11, thread=7), *node(4, 12)], []),  # another thread, with its own numbers
        ([region("F (backward)", 12, 2), *node(3, 12)], []),  # hooks of a warm-up
    ],
)
def test_partial_backward_regions(
    tmp_path: Path, first_step: list[Event], partial: list[str], thread: int
) -> None:
    """A region is partial if nodes of its kind run outside regions, and their forward ran before the window."""
    events = [region(f"ProfilerStep#{number}", 10 * number, 10) for number in range(1, 4)]
    events += [addmm(number, start) for number, start in ((10, 11), (20, 21), (30, 31))]
    for number, start in ((10, 15), (20, 25), (30, 35)):
        events += [region("D (backward)", start, 2, thread), region("Linear (backward)", start, 1, thread)]
        events += node(number, start, thread)
    for number, start in ((21, 22), (31, 32)):
        events += [region("G", start - 1, 0.5), addmm(number, start - 1)]
        events += [region("G (backward)", start, 2, thread), region("Linear (backward)", start, 1, thread)]
        events += node(number, start, thread)
    first_step = [event if event["name"] == "aten::addmm" else event | {"tid": thread} for event in first_step]
    summary = summarize(write(tmp_path, [*events, *first_step]))
    assert partial == ["/".join(stat.path) for stat in summary.regions if stat.partial]


def test_program_outside_the_steps(tmp_path: Path) -> None:
    """The summary of a whole program covers its steps only."""
    steps = [region("ProfilerStep#3", 100, 100), region("ProfilerStep#9", 300, 100)]
    regions = [region("forward", start, 20) for start in (0, 110, 210, 310, 410)]
    work = [item for number, start in enumerate((5, 115, 215), 1) for item in launched(number, start, 7)]
    operators = [region("aten::mm", start, 4, cat="cpu_op") for start in (1, 111, 311, 411)]
    trace = read_kineto(write(tmp_path, [*steps, *regions, *work, *operators]))
    trace.format = "nsight systems"
    summary = summarize_trace(trace)
    assert [("forward", 2, 40_000, 7_000)] == [
        (stat.path[-1], stat.calls, stat.cpu_ns, stat.gpu_ns) for stat in summary.regions
    ]
    assert [2] == [operator.calls for operator in summary.operators]
    assert (summary.gpu_total_ns, summary.gpu_unattributed_ns) == (7_000, 0)
    assert summary.outside_gpu_ns == 14_000


def kernel(start_us: float, dur_us: float, correlation: int | None, stream: int = 7) -> Event:
    """Return a kernel whose launch is not in the trace."""
    ids = {} if correlation is None else {"correlation": correlation}
    args = {"args": ids | {"device": 0, "stream": stream}}
    return region("gemm", start_us, dur_us, f"stream {stream}", "kernel") | {"pid": "GPU 0"} | args


def on_stream(events: list[Event], stream: int = 7) -> list[Event]:
    for event in events:
        if event["cat"] == "kernel":
            event["args"] = event["args"] | {"device": 0, "stream": stream}
    return events


STEP = [region("ProfilerStep#4", 10, 90), region("aten::mm", 20, 60, cat="cpu_op")]


@pytest.mark.parametrize(
    ("more", "before", "by_time", "total"),
    [
        ([kernel(12, 9, 1), kernel(22, 5, 2)], 14, 0, 7),  # the stream ran it when the recording began
        ([kernel(22, 5, 2, stream=9), kernel(60, 6, 3, stream=9)], 11, 0, 7),  # a stream without later launches
        ([kernel(45, 9, 200)], 0, 9, 16),  # after other work of the trace: the launch is unknown
        ([kernel(12, 9, None)], 0, 9, 16),  # without a correlation id
        ([kernel(2, 3, None), kernel(12, 9, None)], 0, 9, 16),  # one before the step, which counts in no step
    ],
)
def test_work_without_its_launch(tmp_path: Path, more: list[Event], before: int, by_time: int, total: int) -> None:
    """Work launched before the recording is in no step; work without a launch is in the step in which it runs."""
    summary = summarize(write(tmp_path, [*STEP, *on_stream(launched(50, 30, 7)), *more]))
    assert (summary.before_gpu_ns, summary.by_time_gpu_ns) == (before * 1000, by_time * 1000)
    assert summary.gpu_total_ns == total * 1000
    assert summary.gpu_total_ns + summary.outside_gpu_ns == (7 + sum(event["dur"] for event in more)) * 1000
    twice = merge([summary, summary])
    assert (twice.before_gpu_ns, twice.by_time_gpu_ns) == (2 * before * 1000, 2 * by_time * 1000)


def test_trace_without_calls(tmp_path: Path) -> None:
    """Without recorded calls, work belongs to the step in which it runs."""
    summary = summarize(write(tmp_path, [*STEP, kernel(12, 9, 1), kernel(60, 5, 2), kernel(120, 4, 3)]))
    assert (summary.before_gpu_ns, summary.by_time_gpu_ns) == (0, 14_000)
    assert (summary.gpu_total_ns, summary.outside_gpu_ns) == (14_000, 4_000)


def test_kernels_of_a_graph(tmp_path: Path) -> None:
    """All kernels of a graph belong to its one launch."""
    launch, first = on_stream(launched(50, 30, 7))
    launch["name"] = "cudaGraphLaunch"
    summary = summarize(write(tmp_path, [*STEP, launch, first, *(kernel(at, 5, 50) for at in (45, 52, 130))]))
    assert (summary.gpu_total_ns, summary.before_gpu_ns, summary.by_time_gpu_ns) == (22_000, 0, 0)


def test_work_without_steps(tmp_path: Path) -> None:
    """Without steps, all GPU work counts, whenever it was launched."""
    summary = summarize(write(tmp_path, [STEP[1], *on_stream(launched(50, 30, 7)), kernel(12, 9, 1)]))
    assert (summary.gpu_total_ns, summary.outside_gpu_ns, summary.before_gpu_ns) == (16_000, 0, 9_000)


def test_work_before_a_real_recording() -> None:
    """On MI300X, a third of the recording's GPU time was launched before it."""
    summary = summarize(shared("tl_mi300_resnet_actckpt.json.gz"))
    assert summary.before_gpu_ns == summary.outside_gpu_ns == 31_834_405
    assert (summary.gpu_total_ns or 0) / 3 == pytest.approx(22.8e6, rel=0.01)
