"""Diagnoses of loops that are recorded here, on a GPU: each is slow for one known reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import instrument
from instrument.explain.diagnosis.diagnose import Diagnosis

pytestmark = pytest.mark.gpu


class Slow(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches that take 20 ms each."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(8):
            time.sleep(0.02)
            yield torch.ones(64, 64)


def recorded(out: Path, batches: object, work: object) -> Diagnosis:
    """Return the diagnosis of three recorded steps that call ``work`` with each batch."""
    for batch in instrument.steps(batches, out, wait=3, warmup=1, active=3):  # type: ignore[arg-type]
        work(batch)  # type: ignore[operator]
    return instrument.diagnose(out)


def test_a_slow_loader(tmp_path: Path) -> None:
    """A loader that sleeps is what bounds the loop."""
    loader = torch.utils.data.DataLoader(Slow(), batch_size=None)
    found = recorded(tmp_path, loader, lambda batch: (batch.cuda() @ batch.cuda()).sum())
    assert (found.bound, found.findings[0].rule) == ("input", "input-wait")


def test_launch_overhead(tmp_path: Path) -> None:
    """Thousands of tiny kernels are bound by overhead, where each is launched after the end of the one before."""
    x = torch.ones(8, device="cuda")

    def work(batch: object) -> None:
        for _ in range(2000):
            x.view(2, 4).t().contiguous().view(8)[1:].unsqueeze(0).add(1)

    found = recorded(tmp_path, range(8), work)
    assert (found.bound, found.findings[0].rule) == ("overhead", "launch-overhead")


def test_compute(tmp_path: Path) -> None:
    """Large matmuls in 16 bits are bound by compute, and reach a good part of the peak if that is known."""
    x = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work(_: object) -> None:
        for _ in range(10):
            x @ x
        torch.cuda.synchronize()

    found = recorded(tmp_path, range(8), work)
    assert found.bound == "compute"
    assert "fp32-matmuls" not in {each.rule for each in found.findings}


def test_an_allocator_that_retries(tmp_path: Path) -> None:
    """Steps in which no room is left until the cache is given back are slow, as the trace of one says."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room, taken = total // 100, torch.cuda.memory_allocated()  # such as workspaces of cuBLAS, one for each stream
    torch.cuda.set_per_process_memory_fraction((room + taken) / total)
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        with instrument.profile(tmp_path, schedule=instrument.schedule("11-13")) as prof:
            for number in range(30):
                share = 0.3
                if number and number % 6 == 0:
                    torch.cuda._sleep(400_000_000)  # the driver waits for it before it frees
                    share = 0.5 + number / 300  # more than any block in the cache
                torch.empty(int(share * room), dtype=torch.uint8, device="cuda")
                torch.cuda.synchronize()
                time.sleep(0.02)
                prof.step()
        assert torch.cuda.memory_stats()["num_alloc_retries"] - before >= 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    (title,) = (
        each.title for each in instrument.diagnose(tmp_path).findings if each.rule == "recurring-slow-steps"
    )
    assert title.startswith("Every 6th step takes ")
    assert ", as torch's allocator is short of memory and gives its cache back:" in title
