"""`audit_syncs` finds the synchronizations in a trace, their names and their durations."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from instrument.findings import Finding
from instrument.syncs.audit import audit_syncs, unexplained
from instrument.syncs.events import SyncEvent
from instrument.syncs.recorder import Recorder
from instrument.syncs.report import SyncReport
from instrument.traces.read import read_trace
from instrument.traces.synchronizations import find_synchronizations
from instrument.traces.trace import Trace
from tests.diagnosis.small_traces import Row, kernel, memcpy, on_cpu, row, trace_of
from tests.support.shared_traces import shared
from tests.traces.nsys_report import MEMCPY, RUNTIME, SYNC, Database, thread

HTOD, DTOH = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"
PINNED = "Memcpy DtoH (Device -> Pinned)"


def audit(**tables: list[Row]) -> SyncReport:
    """Return the report of a trace with other work of the program before and after."""
    around = [on_cpu("aten::mm", -20, -10), on_cpu("aten::mm", 1_000_000, 1_000_010)]
    return audit_syncs(trace_of(**{**tables, "operators": [*tables.get("operators", []), *around]}))


def only_finding(report: SyncReport) -> Finding:
    (found,) = report.findings
    return found


def launch(start: int, end: int, correlation: int, **columns: Any) -> Row:
    return on_cpu("cudaLaunchKernel", start, end, correlation=correlation, **columns)


def item(at: int, correlation: int = 1, **columns: Any) -> dict[str, list[Row]]:
    """Return the events of one `.item()`: 100 ns in `cudaStreamSynchronize`."""
    return {
        "operators": [
            on_cpu("aten::item", at, at + 200, **columns),
            on_cpu("aten::_local_scalar_dense", at + 1, at + 199, **columns),
        ],
        "runtime": [
            on_cpu("cudaMemcpyAsync", at + 10, at + 20, correlation=correlation, **columns),
            on_cpu("cudaStreamSynchronize", at + 30, at + 130, correlation=correlation + 1, **columns),
        ],
        "gpu": [memcpy(PINNED, at + 110, at + 120, bytes=4, correlation=correlation)],
    }


def merged(*parts: dict[str, list[Row]]) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = defaultdict(list)
    for part in parts:
        for name, rows in part.items():
            tables[name] += rows
    return tables


# Names


def test_item_counts_once() -> None:
    """The memcpy and the synchronization of one `.item()` count once, under the name of the outermost operator."""
    found = only_finding(audit(**item(1000)))
    assert found.op == "item"
    assert found.count == 1
    assert found.blocked_ns == 100
    assert found.direction == "D2H"
    assert found.bytes == 4
    assert found.cause == f"cudaStreamSynchronize: {PINNED}"


def test_calls_of_one_operator_share_a_finding() -> None:
    """Two calls of one operator are one finding with a count of two."""
    found = only_finding(audit(**merged(item(1000, 1), item(2000, 3))))
    assert found.count == 2
    assert found.blocked_ns == 200
    assert found.bytes == 8


@pytest.mark.parametrize(
    ("operators", "op"),
    [
        (["aten::_local_scalar_dense"], "item"),
        (["aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"], "bool"),
        (["aten::to", "aten::_to_copy", "aten::copy_"], "to"),
        (["aten::copy_"], "copy_"),
        (["aten::index", "aten::nonzero"], "getitem"),
        (["aten::index_put_", "aten::_index_put_impl_", "aten::nonzero"], "setitem"),
        (["aten::_unique2"], "unique"),
        (["aten::linalg_inv"], "inv"),
        (["aten::__and__"], "and"),
        (["aten::sparse_mask"], "sparse_mask"),
        (["fbgemm::permute", "aten::item"], "permute"),
        (["Optimizer.step#SGD.step", "aten::item"], "item"),
        (["enumerate(DataLoader)#_Iter.__next__", "aten::to"], "to"),
        (["c10d::barrier"], "barrier"),
        (["torch::autograd::AccumulateGrad"], "synchronize"),
        ([], "synchronize"),
    ],
)
def test_named_after_outermost_public_operator(operators: list[str], op: str) -> None:
    """A finding is named after the outermost public operator; torch's wrapper ranges are skipped."""
    nested = [on_cpu(name, 10 + depth, 500 - depth) for depth, name in enumerate(operators)]
    calls = [launch(0, 5, 1), on_cpu("cudaStreamSynchronize", 100, 200), launch(600, 610, 2)]
    work = [kernel("k", 50, 190, correlation=1), kernel("k", 620, 630, correlation=2)]
    assert op == only_finding(audit(operators=nested, runtime=calls, gpu=work)).op


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize_ptsz",
        "hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize",
        "cuStreamSynchronize", "cuCtxSynchronize", "cuCtxSynchronize_v2", "cuEventSynchronize",
    ],
)  # fmt: skip
def test_explicit_synchronizations(name: str) -> None:
    """Stream, device and event synchronizations are found, in the runtime and driver APIs of CUDA and HIP."""
    calls = [launch(0, 5, 1), on_cpu(name, 100, 200), launch(300, 310, 2)]
    found = only_finding(
        audit(runtime=calls, gpu=[kernel("k", 50, 190, correlation=1), kernel("k", 320, 330, correlation=2)])
    )
    assert (found.op, found.cause, found.blocked_ns, found.direction) == ("synchronize", name, 100, None)


@pytest.mark.parametrize(
    "name", ["cudaEventQuery", "cudaStreamQuery", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaMalloc"]
)
def test_nonblocking_calls(name: str) -> None:
    """Queries, asynchronous memcpys and one stream waiting for another are not synchronizations."""
    calls = [on_cpu(name, 100, 200, correlation=1), launch(300, 310, 2)]
    assert not audit(runtime=calls, gpu=[kernel("k", 320, 330, correlation=2)]).findings


def test_backward_node() -> None:
    """A finding in the backward pass has its autograd node and the regions of the main thread."""
    tables = merged(
        item(1000, thread=1),
        {
            "operators": [
                on_cpu("autograd::engine::evaluate_function: MulBackward0", 900, 1300, thread=1),
                on_cpu("MulBackward0", 910, 1290, thread=1),
            ],
            "regions": [
                on_cpu("ProfilerStep#4", 0, 3000),
                on_cpu("train", 10, 2000),
                on_cpu("backward", 20, 1900),
            ],
        },
    )
    found = only_finding(audit(**tables))
    assert (found.op, found.backward) == ("item", "MulBackward0")
    assert (found.region, found.step) == (("train", "backward"), 4)


# Copies


@pytest.mark.parametrize(
    ("name", "copied", "direction"),
    [
        ("cudaMemcpy", HTOD, "H2D"),
        ("cudaMemcpy2D", DTOH, "D2H"),
        ("cudaMemcpyFromSymbol", DTOH, "D2H"),
        ("hipMemcpy", "Memcpy DtoH (Device -> Host)", "D2H"),
        ("hipMemcpyWithStream", "Memcpy DtoD (Device -> Device)", None),
        ("cuMemcpyHtoD_v2", HTOD, "H2D"),
        ("cuMemcpyDtoH_v2", DTOH, "D2H"),
    ],
)
def test_blocking_copies(name: str, copied: str, direction: str | None) -> None:
    """A copy that is not asynchronous synchronizes."""
    work = [memcpy(copied, 150, 190, bytes=64, correlation=1)]
    found = only_finding(audit(runtime=[on_cpu(name, 100, 200, correlation=1)], gpu=work))
    assert (found.op, found.direction, found.bytes, found.blocked_ns) == ("copy_", direction, 64, 100)
    assert found.cause == f"{name}: {copied}"


@pytest.mark.parametrize("name", ["cudaMemcpy", "cuMemcpyDtoD_v2", "cudaMemcpyPeer"])
def test_copy_within_gpu(name: str) -> None:
    """Copies within one GPU do not synchronize."""
    work = [memcpy("Memcpy DtoD (Device -> Device)", 110, 120, correlation=1)]
    assert not audit(runtime=[on_cpu(name, 100, 200, correlation=1)], gpu=work).findings


@pytest.mark.parametrize(
    ("copied", "start", "end", "blocks"),
    [
        (DTOH, 150, 190, True),
        (HTOD, 150, 190, True),
        (HTOD, 120, 250, True),  # its last piece is still under way when the call returns
        (HTOD, 190, 290, False),
        (HTOD, 210, 220, False),  # a small copy is staged
        (PINNED, 150, 190, False),
        ("Memcpy DtoD (Device -> Device)", 150, 190, False),
    ],
)
def test_pageable_memory_blocks_asynchronous_copy(copied: str, start: int, end: int, blocks: bool) -> None:
    """`cudaMemcpyAsync` synchronizes if the memory is pageable and the call lasts for most of its copy."""
    calls, work = [on_cpu("cudaMemcpyAsync", 100, 200, correlation=1)], [memcpy(copied, start, end, correlation=1)]
    assert blocks == bool(audit(runtime=calls, gpu=work).findings)


def test_blocking_copy_and_its_synchronization_add_up() -> None:
    """Both runtime calls of `.to("cuda")` from pageable memory block, and count once."""
    tables = {
        "operators": [on_cpu("aten::to", 50, 400), on_cpu("aten::copy_", 60, 390)],
        "runtime": [
            on_cpu("cudaMemcpyAsync", 100, 200, correlation=1),
            on_cpu("cudaStreamSynchronize", 210, 260, correlation=2),
        ],
        "gpu": [memcpy(HTOD, 110, 195, bytes=16, correlation=1)],
    }
    found = only_finding(audit(**tables))
    assert (found.op, found.count, found.blocked_ns, found.bytes) == ("to", 1, 150, 16)


def test_copy_outside_operators_counts_once() -> None:
    """Without operators, a synchronization right after a copy belongs to the copy."""
    calls = [on_cpu("cudaMemcpyAsync", 100, 110, correlation=1), on_cpu("cudaStreamSynchronize", 120, 200)]
    found = only_finding(
        audit(runtime=[*calls, launch(300, 301, 2)], gpu=[memcpy(PINNED, 150, 190, bytes=4, correlation=1)])
    )
    assert (found.op, found.direction, found.bytes, found.blocked_ns) == ("copy_", "D2H", 4, 80)


def test_synchronization_after_operator_is_separate() -> None:
    """`x.to("cuda", non_blocking=True)` followed by `stream.synchronize()` is a synchronization, not a copy."""
    tables = {
        "operators": [on_cpu("aten::to", 90, 115), on_cpu("aten::mul", 290, 310)],
        "runtime": [
            on_cpu("cudaMemcpyAsync", 100, 110, correlation=1),
            on_cpu("cudaStreamSynchronize", 120, 200),
            launch(300, 301, 2),
        ],
        "gpu": [memcpy("Memcpy HtoD (Pinned -> Device)", 150, 190, bytes=4, correlation=1)],
    }
    found = only_finding(audit(**tables))
    assert (found.op, found.direction, found.bytes) == ("synchronize", None, None)


def test_synchronization_after_other_work_is_separate() -> None:
    """With a launch in between, a synchronization does not belong to the copy before it."""
    calls = [
        on_cpu("cudaMemcpyAsync", 100, 110, correlation=1),
        launch(112, 115, 2),
        on_cpu("cudaStreamSynchronize", 120, 200),
    ]
    work = [memcpy(PINNED, 150, 160, bytes=4, correlation=1), kernel("k", 170, 190, correlation=2)]
    found = only_finding(audit(runtime=calls, gpu=work))
    assert (found.op, found.direction, found.bytes) == ("synchronize", None, None)


def test_copy_of_earlier_operator_is_ignored() -> None:
    """The synchronization of an operator without a copy has no direction."""
    tables = {
        "operators": [on_cpu("aten::to", 90, 115), on_cpu("aten::_linalg_check_errors", 118, 210)],
        "runtime": [on_cpu("cudaMemcpyAsync", 100, 110, correlation=1), on_cpu("cudaStreamSynchronize", 120, 200)],
        "gpu": [memcpy("Memcpy HtoD (Pinned -> Device)", 150, 190, bytes=4, correlation=1)],
    }
    found = only_finding(audit(**tables))
    assert (found.op, found.direction, found.bytes) == ("check_errors", None, None)


# What must not count twice


def test_driver_call_inside_runtime_call_counts_once() -> None:
    """`cudaStreamSynchronize` and the `cuStreamSynchronize` inside count once, with the outer duration."""
    calls = [
        on_cpu("cudaStreamSynchronize", 100, 200),
        on_cpu("cuStreamSynchronize", 110, 190),
        launch(300, 301, 1),
    ]
    found = only_finding(audit(runtime=calls, gpu=[kernel("k", 320, 330, correlation=1)]))
    assert (found.count, found.cause, found.blocked_ns) == (1, "cudaStreamSynchronize", 100)


def test_cupti_synchronization_events_count_once() -> None:
    """CUPTI's `cuda_sync` events do not count when their call is in the trace; those of queries never do."""
    calls = [
        on_cpu("cudaStreamSynchronize", 100, 200, correlation=5),
        on_cpu("cudaEventQuery", 210, 220, correlation=6),
        launch(300, 301, 7),
    ]
    events = [
        row("Stream Sync", 101, 199, correlation=5, device=0),
        row("Event Sync", 211, 219, correlation=6, device=0),
        row("Stream Wait Event", 230, 240, correlation=9, device=0),
        row("Stream Sync", 120, 180, device=0),
    ]
    found = only_finding(audit(runtime=calls, gpu=[kernel("k", 320, 330, correlation=7)], syncs=events))
    assert (found.count, found.blocked_ns) == (1, 100)


def test_cupti_synchronization_without_a_call() -> None:
    """A synchronization whose call is not in the trace counts, on an unknown thread."""
    events = [row("Context Sync", 100, 150, correlation=5, device=0)]
    report = audit(gpu=[kernel("k", 10, 140)], syncs=events)
    found = only_finding(report)
    assert (found.op, found.cause, found.blocked_ns, found.thread) == ("synchronize", "Context Sync", 50, "")
    assert any("Unattributed: 1 of 1" in sentence for sentence in report.coverage)


def test_unknown_call_with_cupti_synchronization_event() -> None:
    """A call with an unknown name counts if it has a CUPTI synchronization event."""
    calls = [on_cpu("cudaGraphUpload", 100, 200, correlation=5), launch(300, 301, 7)]
    events = [row("Stream Sync", 101, 199, correlation=5, device=0)]
    assert (
        only_finding(audit(runtime=calls, gpu=[kernel("k", 320, 330, correlation=7)], syncs=events)).cause
        == "cudaGraphUpload"
    )


# Freed memory


@pytest.mark.parametrize("name", ["cudaFree", "hipFree", "cudaHostUnregister", "cuMemFree_v2", "cudaFreeHost"])
def test_free_blocks_until_earlier_work_ends(name: str) -> None:
    """Freeing memory blocks until the GPU finishes earlier work; the rest of the call does not count."""
    calls = [launch(0, 10, 1), on_cpu(name, 100, 500), launch(600, 610, 2)]
    work = [kernel("k", 50, 220, correlation=1), kernel("k", 620, 630, correlation=2)]
    found = only_finding(audit(runtime=calls, gpu=work))
    assert (found.op, found.blocked_ns, found.cause) == ("free", 120, f"{name} while the GPU worked")


@pytest.mark.parametrize(("start", "end"), [(50, 90), (50, 700), (300, 400)])
def test_free_without_earlier_work(start: int, end: int) -> None:
    """Freeing does not block for work that ended before, ends afterwards or was launched later."""
    calls = [launch(0, 10, 1) if start < 100 else launch(250, 260, 1), on_cpu("cudaFree", 100, 500)]
    assert not audit(runtime=calls, gpu=[kernel("k", start, end, correlation=1)]).findings


# The profiler itself


def test_synchronizations_of_the_profiler_are_left_out() -> None:
    """Synchronizations before all work and after the last step are the profiler's; those between steps are not."""
    tables = {
        "regions": [on_cpu("ProfilerStep#1", 100, 200), on_cpu("ProfilerStep#2", 300, 400)],
        "operators": [on_cpu("aten::mm", 110, 120), on_cpu("aten::mm", 310, 320)],
        "runtime": [
            on_cpu("cudaDeviceSynchronize", 10, 20),
            launch(111, 112, 1),
            on_cpu("cudaDeviceSynchronize", 190, 195),
            on_cpu("cudaDeviceSynchronize", 210, 220),
            launch(311, 312, 2),
            on_cpu("cudaStreamSynchronize", 410, 430),
            on_cpu("cudaDeviceSynchronize", 440, 470),
        ],
        "gpu": [kernel("k", 150, 160, correlation=1), kernel("k", 350, 420, correlation=2)],
    }
    report = audit_syncs(trace_of(**tables))
    found = only_finding(report)
    assert (found.count, found.blocked_ns, found.steps) == (2, 15, {1: 1, None: 1})
    assert report.steps == 2
    assert "Left out: 3 synchronizations of the profiler itself." in report.coverage


def test_only_the_last_is_left_out_without_steps() -> None:
    """Without steps only the last synchronization is the profiler's."""
    calls = [launch(0, 10, 1), on_cpu("cudaDeviceSynchronize", 20, 90), on_cpu("cudaDeviceSynchronize", 95, 97)]
    work = [kernel("k", 15, 88, correlation=1)]
    report = audit_syncs(trace_of(operators=[on_cpu("aten::mm", 0, 15)], runtime=calls, gpu=work))
    assert only_finding(report).blocked_ns == 70
    assert "Left out: 1 synchronization of the profiler itself." in report.coverage


def test_the_time_of_all_steps_is_the_span() -> None:
    """Shares of the time are of all steps together; without steps, of the recording."""
    steps = [on_cpu("ProfilerStep#1", 0, 300), on_cpu("ProfilerStep#2", 400, 500)]
    assert audit(**merged(item(10), {"regions": steps})).span_ns == 400
    assert audit(**item(10)).span_ns == 1_000_030


def test_stack_identifies_synchronizations_of_the_profiler() -> None:
    """With Python stacks, the program's synchronization at the end is reported and the profiler's is not."""
    calls = [launch(0, 10, 1), on_cpu("cudaDeviceSynchronize", 20, 90), on_cpu("cudaDeviceSynchronize", 105, 110)]
    frames = [
        on_cpu("mine/train.py(3): main", 0, 200),
        on_cpu("torch/cuda/__init__.py(9): synchronize", 18, 92),
        on_cpu("torch/profiler/profiler.py(5): stop_trace", 100, 120),
        on_cpu("torch/cuda/__init__.py(9): synchronize", 104, 112),
    ]
    found = only_finding(
        audit_syncs(trace_of(runtime=calls, gpu=[kernel("k", 15, 88, correlation=1)], frames=frames))
    )
    assert found.blocked_ns == 70
    assert found.site and (found.site.file, found.site.line, found.site.function) == ("mine/train.py", 0, "main")
    assert found.via is None


# Idle


@pytest.mark.parametrize(
    ("later", "idle"),
    [
        ([kernel("k", 300, 400)], 100),
        ([kernel("k", 250, 400)], 60),
        ([kernel("k", 195, 400)], 0),
        ([kernel("k", 150, 400)], 0),
        ([], None),
    ],
)
def test_idle_time_until_next_work(later: list[Row], idle: int | None) -> None:
    """The GPU is idle from the end of its work to the next, at most for the blocked time; 0 if work was queued."""
    calls = [launch(0, 10, 1), on_cpu("cudaStreamSynchronize", 100, 200, thread=1), launch(205, 206, 5)]
    found = only_finding(audit(runtime=calls, gpu=[kernel("k", 50, 190, correlation=1), *later]))
    assert idle == found.idle_ns


def test_idle_gap_counts_once() -> None:
    """Two synchronizations with no work between them share the idle time."""
    calls = [launch(0, 10, 1), on_cpu("cudaStreamSynchronize", 100, 200), on_cpu("cudaEventSynchronize", 210, 220)]
    work = [kernel("k", 50, 190, correlation=1), kernel("k", 300, 310, correlation=2)]
    found = only_finding(audit(runtime=[*calls, launch(290, 295, 2)], gpu=work))
    assert (found.count, found.idle_ns) == (2, 110)


def test_long_gap_after_short_synchronization() -> None:
    """Later host work, such as loading data, does not add to the idle time."""
    calls = [
        launch(0, 10, 1),
        on_cpu("cudaDeviceSynchronize", 100_000, 112_500),
        launch(128_200_000, 128_200_010, 2),
        on_cpu("cudaMemcpyAsync", 128_300_000, 129_300_000, correlation=3),
        launch(129_400_000, 129_400_010, 4),
    ]
    work = [
        kernel("k", 50, 100_100, correlation=1),
        kernel("k", 128_200_100, 128_250_000, correlation=2),
        memcpy(DTOH, 128_300_100, 129_299_000, bytes=4, correlation=3),
        kernel("k", 129_500_000, 129_600_000, correlation=4),
    ]
    report = audit(runtime=calls, gpu=work, operators=[on_cpu("DataLoader.__next__", 113_000, 128_000_000)])
    found = {one.op: one for one in report.findings}
    assert (12_500, 12_500) == (found["synchronize"].blocked_ns, found["synchronize"].idle_ns)
    assert ("low", "high") == (report.severity(found["synchronize"]), report.severity(report.findings[0]))
    text = str(report)
    assert "waited 12.5 us, which left the GPU without work for 12.5 us; less than 0.1 % of the time" in " ".join(
        text.split()
    )
    assert "128 ms" not in text


def test_idle_time_per_gpu() -> None:
    """The idle time belongs to the GPU on which the thread launched work."""
    calls = [
        launch(0, 10, 1),
        launch(0, 10, 2, thread=1),
        on_cpu("cudaStreamSynchronize", 100, 200),
        launch(250, 260, 3),
    ]
    work = [
        kernel("k", 50, 190, correlation=1, device=0),
        kernel("k", 50, 1000, correlation=2, device=1),
        kernel("k", 270, 280, correlation=3, device=0),
    ]
    assert only_finding(audit(runtime=calls, gpu=work)).idle_ns == 80


# Call sites


def test_functions_of_user_and_library() -> None:
    """A finding has the innermost function of the user and the innermost function of a library."""
    frames = [
        on_cpu("mine/train.py(3): main", 0, 5000),
        on_cpu("mine/model.py(7): forward", 900, 1900),
        on_cpu("transformers/unheard/of.py(70): mask", 950, 1800),
        on_cpu("torch/nn/modules/module.py(17): _call_impl", 960, 1700),
        on_cpu("<built-in method item of Tensor object at 0x7f>", 990, 1300),
    ]
    report = audit(**merged(item(1000), {"frames": frames}))
    found = only_finding(report)
    assert found.site and (found.site.file, found.site.function) == ("mine/model.py", "forward")
    assert found.via and (found.via.file, found.via.function) == ("transformers/unheard/of.py", "mask")
    assert not any("with_stack" in sentence or "Unattributed" in sentence for sentence in report.coverage)


def test_functions_with_one_name_stay_separate() -> None:
    """Several functions named `forward` in one file have separate findings."""
    frames = [on_cpu("mine/model.py(7): forward", 900, 1300), on_cpu("mine/model.py(90): forward", 1900, 2300)]
    report = audit(**merged(item(1000, 1), item(2000, 3), {"frames": frames}))
    functions = {found.site.function for found in report.findings if found.site}
    assert functions == {"forward (line 7)", "forward (line 90)"}


SOURCE = """
class Net:
    @decorated
    def forward(self, x):
        def inner():
            return x.item()

        return inner(), [
            y.item()  # instrument: allow-sync a test
            for y in x
        ], (x
            .tolist()), (
            x.tolist())

    def backward(self, x):
        return x.item()


def forward(x):
    return (x
        .sum()
        .item())

forward(1).item()
"""


@pytest.mark.parametrize(
    ("frame", "inner", "function", "line"),
    [
        ("(3): forward", "<built-in method item of Tensor object at 0x7f>", "Net.forward", 9),
        ("(4): forward", "<built-in method item of Tensor object at 0x7f>", "Net.forward", 9),
        ("(3): forward", "<built-in method tolist of Tensor object at 0x7f>", "Net.forward", 0),
        ("(3): forward", "torch/cuda/__init__.py(3): synchronize", "Net.forward", 0),
        ("(3): forward", "", "Net.forward", 0),
        ("(5): inner", "<built-in method item of Tensor object at 0x7f>", "Net.forward.<locals>.inner", 6),
        ("(15): backward", "<built-in method item of Tensor object at 0x7f>", "Net.backward", 16),
        ("(19): forward", "<built-in method item of Tensor object at 0x7f>", "forward", 22),
        ("(24): <module>", "<built-in method item of Tensor object at 0x7f>", "<module>", 24),
        ("(21): forward", "<built-in method item of Tensor object at 0x7f>", "forward", 0),  # which of the two?
        ("(40): backward", "<built-in method item of Tensor object at 0x7f>", "backward", 0),  # another version
        ("(3): gone", "<built-in method item of Tensor object at 0x7f>", "gone", 0),
    ],
)
def test_line_from_source(tmp_path: Path, frame: str, inner: str, function: str, line: int) -> None:
    """The line is known if the function has only one matching call and has not changed."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    frames = [on_cpu(f"{path}{frame}", 900, 1300), *([on_cpu(inner, 990, 1250)] if inner else [])]
    found = only_finding(audit(**merged(item(1000), {"frames": frames})))
    assert found.site and (found.site.file, found.site.function) == (str(path), function)
    assert line == found.site.line
    assert found.allowed == ("a test" if line == 9 else None)


def test_regions_stay_separate_without_functions() -> None:
    """Without functions, findings are separated by region."""
    regions = [on_cpu("data", 900, 1300), on_cpu("loss", 1900, 2300)]
    report = audit(**merged(item(1000, 1), item(2000, 3), {"regions": regions}))
    assert {found.region for found in report.findings} == {("data",), ("loss",)}
    assert any("with_stack=True" in sentence for sentence in report.coverage)


def total_of(value: torch.Tensor) -> float:
    total = value.sum()

    return total.item()


def test_line_in_a_real_recording(tmp_path: Path) -> None:
    """Torch records the first line of a function; the line of the call follows from the callee."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        total_of(torch.ones(2))
        torch.ones(2).mul(2)
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    first = total_of.__code__.co_firstlineno
    assert any(f"({first}): total_of" in event["name"] for event in events if "name" in event)
    (read,) = [event for event in events if event.get("name") == "aten::_local_scalar_dense"]
    call = {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "args": {"correlation": 5}}
    events.append({**read, **call, "ts": read["ts"] + read["dur"] / 4, "dur": read["dur"] / 2})
    path.write_text(json.dumps(content))
    found = only_finding(audit_syncs(path))
    assert found.site
    assert (found.op, found.site.function, found.site.line) == ("item", "total_of", first + 3)
    assert Path(__file__) == Path(found.site.file)


@pytest.mark.parametrize("file", ["/dev/zero", "a" * 5000, "/dev/null\0", "<string>", "x(((((", "C:\\\\train.py"])
def test_stack_frames_without_source(file: str) -> None:
    """Stack frames without readable source keep the name from the trace."""
    found = only_finding(audit(**merged(item(1000), {"frames": [on_cpu(f"{file}(3): main", 900, 1300)]})))
    assert found.op == "item"
    assert found.site is None or (found.site.line, found.site.function) == (0, "main")


# Other sources


def test_nsight_systems_report(tmp_path: Path) -> None:
    """Call names with version suffixes, operators as NVTX ranges and the table of synchronizations are read."""
    database, tid = Database(), thread(7, 1)
    where = {"globalPid": tid & ~0xFFFFFF}
    database.span("train", 0, 5000, tid)
    database.span("aten::item, seq = 0, op_id = 3", 900, 1400, tid)
    database.call("cudaLaunchKernel_v7000", 100, 110, tid, 1)
    database.kernel("k", 120, 1100, correlationId=1, **where)
    database.call("cudaMemcpyAsync_v3020", 1000, 1010, tid, 2)
    database.add(MEMCPY, 1110, 1120, bytes=4, copyKind=2, srcKind=2, dstKind=1, correlationId=2, **where)
    database.call("cudaStreamSynchronize_v3020", 1020, 1130, tid, 3)
    database.add(SYNC, 1021, 1129, syncType=3, correlationId=3, **where)
    database.call("cuCtxSynchronize", 2000, 2050, tid, 4)
    database.call("cudaLaunchKernel_v7000", 2100, 2110, tid, 5)
    database.kernel("k", 2120, 2130, correlationId=5, **where)
    assert RUNTIME
    found = {each.op: each for each in audit_syncs(database.write(tmp_path / "report.sqlite")).findings}
    assert found.keys() == {"item", "synchronize"}
    assert (found["item"].blocked_ns, found["item"].direction, found["item"].bytes) == (110, "D2H", 4)
    assert found["item"].region == ("train",)
    assert (found["item"].idle_ns, found["synchronize"].idle_ns, found["synchronize"].blocked_ns) == (110, 50, 50)


@pytest.mark.parametrize(
    ("tables", "expected"), [({}, "no calls of the CUDA"), ({}, "no work on a GPU"), ({}, "No steps")]
)
def test_coverage_names_what_the_trace_lacks(tables: dict[str, list[Row]], expected: str) -> None:
    """A trace without a GPU has no findings, and the report says that nothing could be checked."""
    report = audit(operators=[on_cpu("aten::mm", 0, 10)], **tables)
    assert not report.findings
    assert any(expected in sentence for sentence in report.coverage)


def test_wrong_trace_argument(tmp_path: Path) -> None:
    """A wrong argument raises an error that names it; a missing file raises FileNotFoundError."""
    with pytest.raises(TypeError, match='"trace" must be one trace'):
        audit_syncs(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        audit_syncs(tmp_path / "none.json")


# Live detection


def live_report(*events: SyncEvent) -> SyncReport:
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return SyncReport("live", recorder.findings)


def test_synchronizations_missed_live_are_listed() -> None:
    """Findings are compared by operation and step; `float` in live detection is `item` in a trace."""
    steps = {"regions": [on_cpu("ProfilerStep#1", 900, 1500), on_cpu("ProfilerStep#2", 1900, 2500)]}
    trace = trace_of(**merged(item(1000, 1), item(2000, 3), steps))
    report = audit_syncs(trace)
    once = live_report(SyncEvent("float", "read", step=1))
    (missed,) = unexplained(report, once)
    assert (missed.op, missed.count, missed.steps, missed.blocked_ns) == ("item", 1, {2: 1}, None)
    assert only_finding(report).count == 2
    twice = live_report(SyncEvent("float", "read", step=1), SyncEvent("item", "read", step=2))
    assert not unexplained(report, twice)
    other = live_report(SyncEvent("item", "read", step=70), SyncEvent("item", "read", step=71))
    assert not unexplained(report, other)
    assert unexplained(report, live_report())[0].blocked_ns == 200
    sentence = audit_syncs(trace, live=once).coverage[-1]
    assert sentence == "Unattributed: in the trace, but not reported by live detection: item (1)."
    assert (
        audit_syncs(trace, live=twice).coverage[-1]
        == "Live detection explains every synchronization in the trace."
    )


def test_live_synchronization_explains_one_in_the_trace() -> None:
    """One live synchronization explains one in the trace, whichever finding it belongs to."""
    regions = [on_cpu("data", 900, 1300), on_cpu("loss", 1900, 2300)]
    report = audit(**merged(item(1000, 1), item(2000, 3), {"regions": regions}))
    (missed,) = unexplained(report, live_report(SyncEvent("item", "read")))
    assert missed.count == 1


# Real traces


_WAITS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^hipMemcpyWithStream$")


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode()
    events = json.loads(text, parse_float=Decimal)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def ns(value: Decimal | int) -> int:
    return int((Decimal(value) * 1000).to_integral_value())


def expected_synchronizations(path: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the durations of all synchronizations and the starts of device synchronizations, from the JSON."""
    events = events_of(path)
    copies = {
        event["args"].get("correlation"): event
        for event in events
        if str(event.get("cat")).lower() in ("gpu_memcpy", "memcpy") and "Pageable" in event["name"]
    }
    durations, devices = [], []
    for event in events:
        if str(event.get("cat")).lower() not in ("cuda_runtime", "runtime"):
            continue
        copied = copies.get(event["args"].get("correlation"))
        begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event.get("dur", 0))
        if _WAITS.match(event["name"]):
            durations.append(end - begin)
            if "Device" in event["name"]:
                devices.append((begin, end - begin))
        elif copied is not None and event["name"] == "cudaMemcpyAsync":
            first, last = ns(copied["ts"]), ns(copied["ts"]) + ns(copied.get("dur", 0))
            shared_ns = min(end, last) - max(begin, first)
            if shared_ns >= 0 and 2 * shared_ns >= last - first:
                durations.append(end - begin)
    return durations, devices


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("tl_h100_owlv2", 1), ("tl_h100_bert_small", 1), ("tl_h100_qwen05b", 1), ("tl_mi300_bert_small", 1),
        ("tl_mi300_resnet_actckpt", 1), ("tl_torch_compile_triton", 1), ("tl_vllm_decode_full_cudagraph", 0),
        ("hta_alexnet_cudasync", 1), ("hta_event_sync_multistream", 1), ("hta_gpu_user_annotation", 0),
        ("hta_nccl_data", 1), ("hta_ns_resolution", 1), ("hta_tracediff_control", 1), ("deepseek_train_h800", 1),
        ("kineto_tb_resnet50_nw0_v100", 1), ("param_resnet_kineto", 1), ("param_dlrm_8rank_r1", 1),
    ],
)  # fmt: skip
def test_total_blocked_time_of_real_traces(name: str, own: int) -> None:
    """The findings cover the whole time in blocking calls, except the profiler's own last synchronization."""
    path = shared(f"{name}.json.gz")
    durations, devices = expected_synchronizations(path)
    trace = read_trace(path)
    assert isinstance(trace, Trace)
    assert sorted(wait.blocked_ns for wait in find_synchronizations(trace)) == sorted(durations)
    report = audit_syncs(trace)
    left_out = max(devices)[1] if own else 0
    assert sum(found.blocked_ns or 0 for found in report.findings) == sum(durations) - left_out
    assert own == sum("Left out: 1 " in sentence for sentence in report.coverage)
    assert report.steps == len(trace.steps)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "tl_h100_owlv2",
            {("to", "H2D"): (25, 30_897_080), ("to", "D2H"): (55, 146_418_600), ("synchronize", None): (1, None)},
        ),
        ("tl_h100_bert_small", {("bool", "D2H"): (1, 1), ("synchronize", None): (1, None)}),
        ("tl_mi300_bert_small", {("bool", "D2H"): (1, 1), ("synchronize", None): (1, None)}),
        ("hta_nccl_data", {("synchronize", None): (24, None)}),
        ("kineto_tb_resnet50_nw0_v100", {("to", "H2D"): (12, 115_607_040)}),
    ],
)
def test_real_traces_by_operation(name: str, expected: dict[Any, Any]) -> None:
    """Counts and bytes by operation match known values for NVIDIA and AMD traces from 2021 until today."""
    found = {
        (each.op, each.direction): (each.count, each.bytes)
        for each in audit_syncs(shared(f"{name}.json.gz")).findings
    }
    assert expected == found


def test_functions_of_a_real_trace() -> None:
    """Python stacks give the functions of the user and the library, even for files that do not exist."""
    report = audit_syncs(shared("tl_h100_bert_small.json.gz"))
    (found,) = [each for each in report.findings if each.op == "bool"]
    assert found.site and found.site.file.startswith("moca/")
    assert found.via and found.via.file == "transformers/modeling_attn_mask_utils.py"
    assert (found.via.function, found.via.line) == ("_prepare_4d_attention_mask_for_sdpa", 0)
    assert (found.blocked_ns, found.steps) == (7640, {6: 1})


def test_backward_of_a_real_trace() -> None:
    """A synchronization on the autograd thread has its node and the region of the backward pass."""
    report = audit_syncs(shared("param_dlrm_8rank_r1.json.gz"))
    (found,) = [each for each in report.findings if each.backward]
    assert (found.op, found.backward, found.region) == ("setitem", "IndexBackward0", ("## backward ##",))
    assert (found.count, found.blocked_ns, found.bytes) == (1, 15_000, 5616)


@pytest.mark.gpu
def test_known_synchronizations_on_a_gpu(tmp_path: Path) -> None:
    """Each synchronizing idiom is found under its name, once per step."""
    x = torch.randn(256, 256, device="cuda")

    def train() -> None:
        with record_function("train"):
            float((x @ x).sum().item())
            (x > 0).nonzero()
            x.cpu()
            torch.cuda.synchronize()

    train()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=True) as recorded:
        for _ in range(3):
            train()
            recorded.step()
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    found = {each.op: each.count for each in audit_syncs(path).findings if each.region == ("train",)}
    assert {"item": 3, "nonzero": 3, "to": 3, "synchronize": 3} == found
