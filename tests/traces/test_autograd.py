"""Backward passes on autograd threads, as on a GPU: their regions are inside the region that waits."""

from __future__ import annotations

import ctypes
import io
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity

import instrument
from instrument.explain.metrics.metrics import metrics
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.launches import projection
from instrument.read.measures.summary import Summary, merge, summarize
from instrument.read.profilers.nsight import read_nsight
from instrument.read.tables.autograd import engine_node_name
from instrument.read.tables.trace import Trace
from instrument.show.terminal.summary import print_summary

from ..support.shared_traces import shared
from ..support.torch_versions import records_all_threads
from .nsys_report import Database, thread

Event = dict[str, Any]
MAIN, DEVICE, OTHER = 10, 11, 12  # threads of process 10


def complete(category: str, name: str, start: int, end: int, tid: int = MAIN, **args: Any) -> Event:
    place = {"pid": MAIN, "tid": tid, "ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "args": args, **place}


def region(name: str, start: int, end: int, tid: int = MAIN) -> Event:
    return complete("user_annotation", name, start, end, tid)


def node(name: str, start: int, end: int, sequence: int, tid: int = DEVICE) -> Event:
    """Return a node that a backward pass runs."""
    name = f"autograd::engine::evaluate_function: {name}"
    return complete("cpu_op", name, start, end, tid, **{"Sequence number": sequence})


def forward(start: int, end: int, sequence: int, tid: int = MAIN) -> Event:
    """Return an operator that creates a node."""
    return complete("cpu_op", "aten::mm", start, end, tid, **{"Sequence number": sequence})


def kernel(correlation: int, at: int, start: int, end: int, tid: int = DEVICE) -> list[Event]:
    """Return a kernel and the call that launched it."""
    call = complete("cuda_runtime", "cudaLaunchKernel", at, at + 1, tid, correlation=correlation)
    work = complete("kernel", "gemm", start, end, 7, correlation=correlation, device=0, stream=7)
    return [call, work | {"pid": 0}]


def name_of(tid: int, name: str) -> Event:
    args = {"name": f"thread {tid} ({name})"}
    return {"ph": "M", "name": "thread_name", "pid": MAIN, "tid": tid, "ts": 0, "args": args}


def read(tmp_path: Path, *events: Event) -> Trace:
    (tmp_path / "trace.json").write_text(json.dumps(events))
    return read_kineto(tmp_path / "trace.json")


def parents(trace: Trace) -> dict[str, str | None]:
    """Return the name of each region's parent, by name."""
    names = trace.regions.text("name")
    around = [names[row] if row >= 0 else None for row in trace.regions.parent.tolist()]
    return dict(zip(names, around, strict=True))


def tree(summary: Summary) -> list[tuple[str, int, int, int, int | None]]:
    """Return each region as printed: indented, with calls, CPU, CPU self and GPU time in us."""
    return [
        ("  " * (len(row.path) - 1) + row.path[-1], row.calls, row.cpu_ns // 1000, row.self_ns // 1000, gpu)
        for row in summary.regions
        for gpu in [row.gpu_ns if row.gpu_ns is None else row.gpu_ns // 1000]
    ]


NODES = [forward(110, 115, 1), node("Mm", 500, 700, 1), forward(120, 125, 0), node("Mm", 700, 890, 0)]
NAME = [name_of(DEVICE, "pt_autograd_0")]


def step() -> list[Event]:
    """Return a step whose backward pass runs on the thread of a device."""
    return [
        region("ProfilerStep#3", 0, 1000),
        region("Sequential", 100, 300),
        *kernel(1, 110, 200, 290, MAIN),
        region("backward", 400, 900),
        region("Sequential (backward)", 450, 890, DEVICE),
        region("Block (backward)", 500, 600, DEVICE),
        *kernel(2, 510, 520, 620),
        region("Block (backward)", 650, 850, DEVICE),
        *kernel(3, 660, 700, 950),
        *kernel(4, 895, 950, 960),
        region("Optimizer.step", 910, 990),
        *kernel(5, 920, 1100, 1130, MAIN),
    ]


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0"),
        (
            "autograd::engine::evaluate_function: torch::autograd::CppNode<Lookup<int, 4>>",
            "torch::autograd::CppNode<Lookup<int, 4>>",
        ),
        ("autograd::engine::evaluate_function", None),
        ("MmBackward0", None),
        ("aten::mm: a", None),
    ],
)
def test_node_of_an_engine_operator(name: str, node: str | None) -> None:
    """The engine's operators name the node; Nsight Systems appends numbers."""
    assert engine_node_name(name) == node


@pytest.mark.parametrize("known_by", [NODES, NAME, [*NODES, *NAME], []], ids=["nodes", "name", "both", "regions"])
def test_tree_of_a_gpu(known_by: list[Event], tmp_path: Path) -> None:
    """The tree equals a CPU's; outermost regions take no longer than the step, and "backward" has its GPU time."""
    summary = summarize(read(tmp_path, *step(), *known_by))
    assert tree(summary) == [
        ("Sequential", 1, 200, 200, 90),
        ("backward", 1, 500, 60, 360),
        ("  Sequential (backward)", 1, 440, 140, 350),
        ("    Block (backward)", 2, 300, 300, 350),
        ("Optimizer.step", 1, 80, 80, 30),
    ]
    assert sum(row.cpu_ns for row in summary.regions if len(row.path) == 1) <= summary.step_ns == 1_000_000
    assert sum(row.self_ns for row in summary.regions) + summary.no_region_ns == summary.step_ns
    assert summary.gpu_unattributed_ns == 0


@pytest.mark.parametrize("first", ["python", "pt_autograd_0"])
def test_thread_with_two_names(first: str, tmp_path: Path) -> None:
    """The autograd name has priority over the inherited name, in whatever order Kineto writes them."""
    names = [name_of(DEVICE, first), name_of(DEVICE, "python"), name_of(DEVICE, "pt_autograd_0")]
    trace = read(tmp_path, *step(), region("hook", 895, 899, DEVICE), *names)
    assert [thread.name for thread in trace.threads if thread.autograd] == [f"thread {DEVICE} (pt_autograd_0)"]
    names.reverse()
    trace = read(tmp_path, *step(), region("hook", 895, 899, DEVICE), *names)
    assert parents(trace)["hook"] == "backward"


def test_numbers_of_regions(tmp_path: Path) -> None:
    """Metrics and projection assign to "backward" the work that its thread waited for."""
    trace = read(tmp_path, *step(), *NODES)
    (row,) = [row for row in metrics(trace)["region_table"] if row["name"] == "backward"]
    assert (row["gpu_count"], row["gpu_ns"], row["gpu_projection_ns"]) == (3, 360_000, 440_000)
    projected, names = projection(trace), trace.regions.text("name")
    found = {name: tuple(column[row] for column in projected.values()) for row, name in enumerate(names)}
    assert list(projected) == ["duration_ns", "busy_ns", "ops", "launches", "start_ns"]
    assert found["backward"] == (440_000, 360_000, 3, 3, 520_000)
    assert found["Sequential (backward)"] == (430_000, 350_000, 2, 2, 520_000)
    assert found["Sequential"] == (90_000, 90_000, 1, 1, 200_000)


def test_region_that_ends_late(tmp_path: Path) -> None:
    """Work belongs to the region in which it began; self times are not negative; no device counts twice."""
    late = [region("A (backward)", 450, 950, DEVICE), region("B (backward)", 500, 700, OTHER)]
    names = [name_of(DEVICE, "pt_autograd_0"), name_of(OTHER, "pt_autograd_1")]
    summary = summarize(
        read(tmp_path, region("ProfilerStep#3", 0, 1000), region("backward", 400, 900), *late, *names)
    )
    assert tree(summary) == [
        ("backward", 1, 500, 50, None),
        ("  A (backward)", 1, 500, 500, None),
        ("  B (backward)", 1, 200, 200, None),
    ]


def test_regions_that_begin_together(tmp_path: Path) -> None:
    """A parent precedes its children in the table: of two regions that start together, the longer one."""
    events = [
        region("step", 0, 900),
        region("backward", 400, 600),
        region("A (backward)", 400, 700, DEVICE),
        *NAME,
    ]
    trace = read(tmp_path, *events)
    assert parents(trace) == {"step": None, "A (backward)": "step", "backward": "step"}
    assert all(trace.regions.parent < np.arange(3))
    assert [row for row, *_ in tree(summarize(trace))] == ["step", "  backward", "  A (backward)"]


def test_work_on_an_autograd_thread_without_regions(tmp_path: Path) -> None:
    """Work launched on an autograd thread without regions belongs to the region that waits."""
    trace = read(
        tmp_path, region("backward", 400, 900), *NODES, *kernel(1, 510, 600, 700), *kernel(2, 950, 960, 970)
    )
    assert trace.gpu.region.tolist() == [0, -1]
    assert projection(trace).ops.tolist() == [1]


def test_threads_without_training(tmp_path: Path) -> None:
    """A region of a thread that does not train never contains a backward pass."""
    loading = [region("gloo:barrier", 0, 2000, OTHER), region("read", 420, 700, OTHER)]
    trace = read(tmp_path, *step(), *NODES, *loading)
    assert parents(trace)["Sequential (backward)"] == "backward"
    assert parents(trace)["read"] == "gloo:barrier"
    assert not trace.unplaced


def test_threads_that_run_their_own_backward(tmp_path: Path) -> None:
    """On a CPU a thread runs the nodes that it created, and no other thread waits."""
    own = [
        region("net", 100, 200, OTHER),
        forward(110, 120, 1, OTHER),
        region("net (backward)", 500, 700, OTHER),
        node("Mm", 510, 600, 1, OTHER),
    ]
    trace = read(tmp_path, region("ProfilerStep#3", 0, 1000), region("evaluation", 0, 1000), *own)
    assert parents(trace) == {"evaluation": None, "net": None, "net (backward)": None}
    assert [thread.autograd for thread in trace.threads] == [False, False]


def two_trainers(first: str, second: str, *numbers: int) -> list[Event]:
    """Return two threads that train at once; an autograd thread runs a node of one of them."""
    return [
        *(forward(100, 110, number, tid) for number, tid in zip(numbers, (MAIN, OTHER), strict=True)),
        region(first, 400, 900),
        region(second, 300, 800, OTHER),
        node("Mm", 450, 700, 7),
        region("net (backward)", 500, 600, DEVICE),
        *kernel(1, 510, 520, 600),
    ]


@pytest.mark.parametrize(
    ("events", "parent"),
    [
        (two_trainers("backward", "forward of the other", 7, 7), "backward"),
        (two_trainers("G.backward", "D.backward", 7, 8), "G.backward"),
        (two_trainers("G.backward", "D.backward", 6, 7), "D.backward"),
        (two_trainers("G", "D", 6, 7), "D"),
    ],
)
def test_several_training_threads(events: list[Event], parent: str, tmp_path: Path) -> None:
    """The caller is the thread in a region named after the backward pass, or the creator of the node."""
    trace = read(tmp_path, *events)
    assert parents(trace)["net (backward)"] == parent
    assert trace.unplaced == 0


def test_ambiguous_callers(tmp_path: Path) -> None:
    """If several threads may have called the backward pass, its regions have no parent; the summary says so."""
    trace = read(tmp_path, *two_trainers("G.backward", "D.backward", 7, 7), *kernel(2, 620, 630, 640))
    assert parents(trace) == {"G.backward": None, "D.backward": None, "net (backward)": None}
    names = [*trace.regions.text("name"), None]
    assert [names[row] for row in trace.gpu.region] == ["net (backward)", None]
    summary = merge([summarize(trace)] * 2)
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, files=[], folder=tmp_path, console=console)
    assert isinstance(console.file, io.StringIO)
    assert "Not in the region of their backward pass: 2 calls" in console.file.getvalue()


def test_too_many_training_threads(tmp_path: Path) -> None:
    """With too many threads, no caller is guessed."""
    events = [region("backward", 400, 900, tid) for tid in range(100, 180)]
    events += [forward(100, 110, 7, tid) for tid in range(100, 180)]
    trace = read(tmp_path, *events, node("Mm", 450, 700, 7), region("net (backward)", 500, 600, DEVICE))
    assert trace.unplaced == 1


# Nsight Systems


@pytest.mark.parametrize("known_by", ["name", "regions", "emit_nvtx"])
def test_nsight_systems_report(known_by: str, tmp_path: Path) -> None:
    """An autograd thread is recognized by its name, or because all its ranges are backward passes."""
    database, main, device = Database(), thread(42, 42), thread(42, 43)
    database.span("forward", 0, 300, main)
    database.span("backward", 400, 900, main)
    if known_by == "name":
        database.add("ThreadNames", nameId=database.string("pt_autograd_0"), globalTid=device)
        database.span("hook of mine", 420, 430, device)
    if known_by == "emit_nvtx":
        database.span("autograd::engine::evaluate_function: MmBackward0, seq = 7", 430, 800, device)
    database.span("net (backward)", 450, 700, device, eventType=60)
    for number, (tid, at) in enumerate([(device, 500), (device, 850), (main, 950)]):
        database.call("cudaLaunchKernel_v7000", at, at + 10, tid, number)
        database.kernel("gemm", at + 100, at + 150, correlationId=number, globalPid=main & ~0xFFFFFF, streamId=7)
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    found = parents(trace)
    assert found["net (backward)"] == ("backward" if known_by != "emit_nvtx" else list(found)[-2])
    assert all(name in ("forward", "backward") or around for name, around in found.items())
    assert [thread.autograd for thread in trace.threads] == [thread.thread == 43 for thread in trace.threads]
    summary = summarize(trace)
    gpu_ns = {row.path[-1]: row.gpu_ns for row in summary.regions}
    assert (gpu_ns["backward"], gpu_ns["net (backward)"], summary.gpu_unattributed_ns) == (100, 50, 50)


@pytest.mark.parametrize("seed", range(20))
def test_projection_matches_its_definition(seed: int, tmp_path: Path) -> None:
    """A region owns work launched in it, and work launched by the backward passes that it waits for."""
    dice = random.Random(seed)
    database, main = Database(), thread(42, 42)
    for name, tid in (("pt_autograd_0", thread(42, 43)), ("pt_autograd_1", thread(42, 44))):
        database.add("ThreadNames", nameId=database.string(name), globalTid=tid)
    tids = [main, thread(42, 43), thread(42, 44)]
    for tid in tids:
        for number in range(dice.randrange(8)):
            start = dice.randrange(60)
            database.span(f"{tid & 15} {number}", start, start + dice.randrange(40), tid)
    for number in range(25):
        start = dice.randrange(90)
        database.call("cudaLaunchKernel_v7000", start, start + dice.randrange(6), dice.choice(tids), number)
        database.kernel(
            "k", start + 10, start + 10 + dice.randrange(30), correlationId=number, globalPid=main & ~0xFFFFFF
        )
    trace = read_nsight(database.write(tmp_path / "made.sqlite"))
    regions, runtime, gpu = trace.regions, trace.runtime, trace.gpu
    here = next((number for number, thread in enumerate(trace.threads) if thread.thread == 42), -1)
    found = projection(trace)
    for row in range(len(regions)):
        work = []
        for op in range(len(gpu)):
            call = gpu.launch[op]
            start, tid = runtime.start_ns[call], runtime.thread[call]
            if tid == regions.thread[row]:
                if regions.start_ns[row] <= start and runtime.end_ns[call] <= regions.end_ns[row]:
                    work.append(op)
            elif regions.thread[row] == here:
                around = [
                    other
                    for other in range(len(regions))
                    if regions.thread[other] == tid and regions.start_ns[other] <= start < regions.end_ns[other]
                ]
                inner = max(around, default=-1)
                while inner >= 0 and regions.parent[inner] >= 0 and regions.thread[regions.parent[inner]] == tid:
                    inner = regions.parent[inner]
                since = start if inner < 0 else regions.start_ns[inner]
                if (inner < 0 or regions.parent[inner] >= 0) and regions.start_ns[row] <= since < regions.end_ns[
                    row
                ]:
                    work.append(op)
        start = min((int(gpu.start_ns[op]) for op in work), default=-1)
        end = max((int(gpu.end_ns[op]) for op in work), default=-1)
        columns = ("start_ns", "duration_ns", "ops", "launches")
        assert tuple(int(found[column][row]) for column in columns) == (start, end - start, len(work), len(work))


# Recordings of this torch


@pytest.mark.skipif(sys.platform != "linux", reason="names its thread as Linux does")
def test_recording_of_two_threads(tmp_path: Path) -> None:
    """Torch records a backward pass on another thread with the thread's name and the nodes."""
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    )

    def backward(loss: torch.Tensor) -> None:
        ctypes.CDLL(None).prctl(15, b"pt_autograd_0", 0, 0, 0)  # PR_SET_NAME
        loss.backward()

    with instrument.annotate_modules(model):
        config = records_all_threads()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], experimental_config=config) as prof:
            with instrument.annotate("forward"):
                loss = model(torch.randn(8, 64)).square().mean()
            with instrument.annotate("backward"):
                runner = threading.Thread(target=backward, args=(loss,))
                runner.start()
                runner.join()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_kineto(tmp_path / "trace.json")
    summary = summarize(trace)
    by_path = {row.path: row for row in summary.regions}
    whole = ("backward", "Sequential (backward)")
    assert whole in by_path
    assert (*whole, "1 (backward)", "1.0 (backward)") in by_path
    assert {path[0] for path in by_path} == {"forward", "backward"}
    outermost = sum(row.cpu_ns for path, row in by_path.items() if len(path) == 1)
    assert outermost <= summary.step_ns
    assert 0 <= by_path["backward",].self_ns <= by_path["backward",].cpu_ns - by_path[whole].self_ns
    (runs,) = [thread for thread in trace.threads if thread.autograd]
    assert runs.name == "" or runs.name.endswith("(pt_autograd_0)")  # Kineto sometimes omits it

    # Without the name, the nodes show the thread.
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "nameless.json").write_text(text.replace("pt_autograd_0", "python"))
    assert [row.path for row in summarize(read_kineto(tmp_path / "nameless.json")).regions] == list(by_path)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("hta_ns_resolution.json.gz", 25), ("hta_nccl_data.json.gz", 15), ("hta_mtia_rank0.json.gz", 1)],
)
def test_collectives_of_real_traces(name: str, calls: int) -> None:
    """Collectives that an autograd thread starts are in the region of the backward pass."""
    trace = read_kineto(Path(shared(name)))
    (autograd,) = [number for number, thread in enumerate(trace.threads) if thread.autograd]
    rows = np.flatnonzero(trace.regions.thread == autograd)
    names = trace.regions.text("name")
    outermost = rows[trace.regions.thread[trace.regions.parent[rows]] != autograd]
    assert [names[row] for row in trace.regions.parent[outermost]] == ["## backward ##"] * calls
    summary = summarize(trace)
    assert sum(row.cpu_ns for row in summary.regions if len(row.path) == 1) <= summary.step_ns
    assert all(row.self_ns >= 0 for row in summary.regions)
