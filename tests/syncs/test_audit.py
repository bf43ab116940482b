"""`audit_syncs` finds the synchronizations in a trace, their names and their durations."""

from __future__ import annotations

import pytest

from instrument.explain.waits.audit import audit_syncs
from tests.diagnosis.small_traces import kernel, memcpy, on_cpu, row, trace_of
from tests.syncs.audits import DTOH, HTOD, PINNED, audit, item, launch, merged, only_finding


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
