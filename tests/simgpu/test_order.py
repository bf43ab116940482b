"""Order within and across streams, and the calls that wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

MS = 1_000_000
CYCLES = 1_980_000  # of torch.cuda._sleep in 1 ms


def kernels(entries: list[simgpu.Entry]) -> list[simgpu.Entry]:
    return [entry for entry in entries if entry.kind == "kernel"]


def wait_for(entries: list[simgpu.Entry], kind: str) -> simgpu.Entry:
    (wait,) = [entry for entry in entries if entry.kind == kind]
    return wait


def test_streams_overlap() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()

    with simgpu.log() as entries:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20 * CYCLES)
        torch.cuda.synchronize()

    first, second = kernels(entries)
    assert first.stream != second.stream
    assert second.start == second.enqueued + 5000 < first.end


def test_a_stream_waits_for_an_event_of_another() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    with simgpu.log() as entries:
        with torch.cuda.stream(one):
            torch.cuda._sleep(10 * CYCLES)
            event = one.record_event()
            torch.cuda._sleep(10 * CYCLES)
        with torch.cuda.stream(other):
            other.wait_event(event)
            torch.cuda._sleep(CYCLES)
        torch.cuda.synchronize()

    before, waiting, beside = sorted(kernels(entries), key=lambda entry: entry.end)
    assert waiting.start == before.end + 1000
    assert beside.end > waiting.end


WAITS: dict[str, Callable[[torch.cuda.Event], None]] = {
    "wait_device": lambda event: torch.cuda.synchronize(),
    "wait_stream": lambda event: torch.cuda.current_stream().synchronize(),
    "wait_event": lambda event: event.synchronize(),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_synchronization_returns_when_its_work_has_ended(kind: str) -> None:
    event = torch.cuda.Event()
    torch.cuda.synchronize()

    with simgpu.log() as entries:
        torch.cuda._sleep(5 * CYCLES)
        event.record()
        assert not event.query()
        start = time.perf_counter_ns()
        WAITS[kind](event)
        blocked = time.perf_counter_ns() - start
        assert event.query()

    (kernel,), wait = kernels(entries), wait_for(entries, kind)
    assert wait.start < wait.end == kernel.end <= wait.returned
    assert wait.returned - wait.start <= blocked


def test_item_waits_for_its_copy() -> None:
    x = torch.ones((), device="cuda")
    torch.cuda.synchronize()

    with simgpu.log() as entries:
        torch.cuda._sleep(5 * CYCLES)
        x.item()

    copy = next(entry for entry in entries if entry.kind == "memcpy")
    wait = next(entry for entry in entries if entry.kind.startswith("wait"))
    assert copy.start == kernels(entries)[0].end + 1000
    assert wait.returned >= wait.end == copy.end


def test_what_does_not_wait_returns_at_once() -> None:
    pinned, small = torch.empty(1 << 20, pin_memory=True), torch.empty(1 << 10)
    target = torch.empty(1 << 20, device="cuda")
    torch.cuda.synchronize()

    with simgpu.log() as entries:
        torch.cuda._sleep(50 * CYCLES)
        start = time.perf_counter_ns()
        target.copy_(pinned, non_blocking=True)
        target[: 1 << 10].copy_(small, non_blocking=True)
        pinned.copy_(target, non_blocking=True)
        target.add_(1)
        passed = time.perf_counter_ns() - start
        torch.cuda.synchronize()

    assert passed < 40 * MS
    assert [entry.kind for entry in entries if entry.kind.startswith("wait")] == ["wait_device"]


def test_a_graph_runs_its_kernels_in_order_with_one_correlation() -> None:
    x = torch.ones(64, 64, device="cuda")
    x @ x
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x @ x).relu()
        y.sum()

    with simgpu.log() as entries:
        graph.replay()
        torch.cuda.synchronize()

    replayed = kernels(entries)
    assert ["gemm" in entry.name for entry in replayed] == [True, False, False]
    assert len({(entry.correlation, entry.graph) for entry in replayed}) == 1
    assert all(before.end < after.start for before, after in itertools.pairwise(replayed))
