"""The clock is exact: when works start, and how long they take."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

LATENCY, GAP = 5000, 1000


def work(entries: list[simgpu.Entry]) -> list[simgpu.Entry]:
    return [entry for entry in entries if not entry.kind.startswith("wait")]


def test_works_start_after_their_latency_and_the_gap_to_the_one_before() -> None:
    x = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()

    with simgpu.configured(durations={"gemm": 30_000, "elementwise": 3_000}), simgpu.log() as entries:
        for i in range(60):
            x = (x @ x) + 1
            if i % 20 == 19:
                time.sleep(0.01)  # the stream is idle, and the next work waits for its latency alone
        torch.cuda.synchronize()

    done = work(entries)
    assert [entry.duration for entry in done] == [30_000, 3_000] * 60
    for before, after in itertools.pairwise(done):
        assert after.start == max(after.enqueued + LATENCY, before.end + GAP)
    idle = [after for before, after in itertools.pairwise(done) if after.enqueued > before.end]
    assert [entry.start - entry.enqueued for entry in idle] == [LATENCY] * len(idle)
    assert len(idle) >= 2


def test_a_kernel_takes_its_base_and_its_blocks() -> None:
    vectors = [torch.ones(1024 * blocks, device="cuda") for blocks in (1, 2, 3)]  # a block adds 1024 elements
    torch.cuda.synchronize()

    with simgpu.configured(kernel_ns=2_000, block_ps=8_000_000), simgpu.log() as entries:
        for vector in vectors:
            vector + 1
        torch.cuda.synchronize()

    assert [entry.duration for entry in work(entries)] == [10_000, 18_000, 26_000]


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 100), (torch.float16, 1000)])
def test_a_matmul_takes_its_operations_by_the_rate_of_its_type(dtype: torch.dtype, rate: int) -> None:
    x, y = torch.ones(128, 512, device="cuda", dtype=dtype), torch.ones(512, 256, device="cuda", dtype=dtype)
    torch.cuda.synchronize()

    with (
        simgpu.configured(kernel_ns=0, gflops=100, half_gflops=1000, gemm_shapes=True),
        simgpu.log() as entries,
    ):
        x @ y
        torch.cuda.synchronize()

    (entry,) = work(entries)
    assert entry.duration == 2 * 128 * 512 * 256 // rate
    assert "256x128x512" in entry.name  # column-major, as cuBLAS is


@pytest.mark.parametrize(("pinned", "rate"), [(True, 20), (False, 5)])
def test_a_copy_takes_its_bytes_by_the_rate_of_its_memory(pinned: bool, rate: int) -> None:
    host = torch.empty(1_000_000, dtype=torch.uint8, pin_memory=pinned)
    torch.cuda.synchronize()

    with simgpu.configured(copy_ns=700, pinned_gbs=20, pageable_gbs=5), simgpu.log() as entries:
        device = host.to("cuda")
        device.cpu()

    there, back = work(entries)
    assert (there.kind, there.bytes, there.duration) == ("memcpy", 1_000_000, 700 + 1_000_000 // rate)
    assert back.duration == 700 + 1_000_000 // 5


def test_sleep_takes_its_cycles_and_events_measure_the_clock() -> None:
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()

    with simgpu.log() as entries:
        torch.cuda._sleep(990_000_000)  # half a second, in which the CPU records and launches what follows
        first.record()
        torch.cuda._sleep(1_980_000)
        second.record()
        second.synchronize()

    _, sleep = work(entries)
    assert sleep.duration == 1_000_000  # cycles of 1.98 GHz
    assert first.elapsed_time(second) * 1e6 == pytest.approx(sleep.duration + GAP)


def test_a_launch_keeps_the_cpu_busy_and_a_full_queue_blocks_it() -> None:
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()

    with simgpu.configured(launch_ns=300_000):
        start = time.perf_counter_ns()
        for _ in range(10):
            x.add_(1)
        busy = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    with simgpu.configured(durations={"elementwise": 20_000_000}, queue=4), simgpu.log() as entries:
        for _ in range(10):
            x.add_(1)
        torch.cuda.synchronize()

    assert busy >= 3_000_000
    waits = [entry for entry in entries if entry.kind == "wait_queue"]
    assert len(waits) == 6
    assert all(wait.returned >= wait.end for wait in waits)
