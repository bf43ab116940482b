"""The report on GPU time, and on CUDA graphs, whose kernels belong to no operator."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from instrument.base.units import counted
from instrument.explain.metrics import metrics as metrics_module
from instrument.explain.rules import trace_facts
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.read.measures import summary
from instrument.read.measures.step_lengths import StepLengths, step_lengths
from instrument.read.tables.trace import Trace
from instrument.read.tables.work_classes import Collectives
from instrument.show.terminal.console import show
from instrument.show.terminal.trace_report import (
    Graphs,
    count_graph_launches,
    gpu_time,
    graph_launches,
    print_windows,
)
from tests.diagnosis.small_traces import Row, kernel, on_cpu, trace_of


def graph_trace(call: str = "cudaGraphLaunch", format: str = "kineto") -> Trace:
    """Return two launches of three kernels each, one of them inside an operator, and a separate kernel."""
    kernels = [
        kernel("gemm", 100 * n + at, 100 * n + at + 5, correlation=n) for n in (1, 2) for at in (10, 20, 30)
    ]
    trace = trace_of(
        operators=[on_cpu("inductor::graph", 195, 215)],
        runtime=[on_cpu(call, 100 * n, 100 * n + 5, correlation=n) for n in (1, 2)]
        + [on_cpu("cudaLaunchKernel", 300, 305, correlation=3)],
        gpu=[*kernels, kernel("CUDA graph 7", 310, 320, correlation=3)],
    )
    trace.format = format
    return trace


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (graph_trace(), Graphs(0, 1, 3)),
        (graph_trace("hipGraphLaunch"), Graphs(0, 1, 3)),
        (graph_trace("cudaLaunchKernel"), Graphs()),
        (graph_trace(format="nsight systems"), Graphs(whole=1)),
    ],
)
def test_graph_launches(trace: Trace, expected: Graphs) -> None:
    """Graph launches outside operators are counted; reports of nsys may lack their kernels."""
    assert count_graph_launches(trace) == expected


def printed(graphs: Graphs) -> str:
    out = StringIO()
    show(Console(file=out, width=80), graph_launches(graphs))
    return " ".join(out.getvalue().split())


def test_text_on_graphs() -> None:
    """The text says why kernels have no operator and how to see their operators; it is empty without graphs."""
    text = printed(Graphs(0, 1, 421))
    assert text.startswith("421 kernels from 1 graph launch belong to no operator, because a graph runs its")
    assert text.endswith("To see their operators, record a run without CUDA graphs.")
    assert "--cuda-graph-trace=node" in printed(Graphs(whole=2))
    assert printed(Graphs()) == ""
    assert Graphs(1, 2, 3) + Graphs(4, 5, 6) == Graphs(5, 7, 9)


def test_gpu_time_fits_the_console() -> None:
    """The sentence on GPU time names its span and fits the console."""
    out = StringIO()
    show(Console(file=out, width=80), gpu_time(TraceFacts(graph_trace())))
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("GPU, 210 ns from the first start to the last end of its work: compute")
    assert max(map(len, lines)) <= 80


def test_step_lengths_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU report reuses the step lengths of the window's summary."""
    measured: list[Trace] = []

    def count_calls(trace: Trace, collectives: Collectives) -> StepLengths | None:
        measured.append(trace)
        return step_lengths(trace, collectives)

    for module in (summary, metrics_module, trace_facts):
        monkeypatch.setattr(module, "step_lengths", count_calls)
    windows = [graph_trace(), graph_trace()]
    print_windows([(trace, None) for trace in windows], "auto", console=Console(file=StringIO()))
    assert [id(trace) for trace in windows] == [id(trace) for trace in measured]


@pytest.mark.parametrize(
    ("number", "expected"), [(1, "1 launch"), (0, "0 launches"), (1.5, "1.5 launches"), (1200, "1,200 launches")]
)
def test_counted(number: float, expected: str) -> None:
    """The noun is singular after exactly 1."""
    assert counted(number, "launch", "launches") == expected
    assert counted(number, "step") == expected.replace("launches", "steps").replace("launch", "step")


def gpu_text(*gpu: Row) -> str:
    out = StringIO()
    show(Console(file=out, width=80), gpu_time(TraceFacts(trace_of(gpu=list(gpu)))))
    return out.getvalue()


def test_several_gpus() -> None:
    """Each GPU has its own shares of the time; the kernel table covers all of them."""
    text = gpu_text(kernel("gemm", 0, 400), kernel("gemm", 400, 500, device=3))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "2 GPUs, 500 ns from the first start to the last end of their work:" in lines
    assert "GPU work compute % exposed memcpys % idle %" in lines
    assert [line for line in lines if line[:2] in ("0 ", "3 ")] == [
        "0 400 ns 80.0 0.0 20.0",
        "3 100 ns 20.0 0.0 80.0",
    ]
    assert "kernel (all 2 GPUs) calls GPU % kernels" in lines
    assert "gemm 2 500 ns 100.0" in lines


def test_exposed_communication() -> None:
    """The share of exposed communication is printed, even if 0, if any kernel communicates."""
    hidden = gpu_text(kernel("gemm", 0, 400), kernel("ncclDevKernel_AllReduce", 100, 200, stream=9))
    assert "exposed communication 0.0 %" in hidden
    assert "communication" not in gpu_text(kernel("gemm", 0, 400))
