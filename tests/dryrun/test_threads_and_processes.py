"""Dry runs with threads, DataLoader workers and processes."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from .reports import alone, both, finished, gpu, notes, ops

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


@both
def test_earlier_pool(fake: bool) -> None:
    """A thread pool that worked before is watched during the run."""
    with ThreadPoolExecutor(1, "own") as pool:  # a compiler that earlier tests used has threads as well
        assert "0" == pool.submit(str, 0).result()

        def step() -> None:
            value = gpu(3)
            pool.submit(lambda: value.sum().item()).result()
            pool.submit(lambda: torch.ones(3, device="cuda").tolist()).result()

        report = finished(step, fake=fake)
        assert {"item": 1, "tolist": 1} == ops(report)
        assert not any("own_0" in sentence for sentence in report.coverage)
        assert not pool.submit(torch.cuda.is_available).result()


def test_earlier_threads() -> None:
    """Threads that cannot be watched are named, except for one that only draws progress bars."""
    progress = pytest.importorskip("tqdm").tqdm(total=1, file=io.StringIO())
    assert progress.monitor is None or progress.monitor.is_alive()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(30,), name="prefetcher")
    thread.start()
    try:
        report = finished(lambda: gpu(2))
    finally:
        go.set()
        thread.join()
        progress.close()
    assert "threads that were running before were not watched: prefetcher" in report.coverage


def test_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    """The report says that a process which the step starts is not watched."""
    import multiprocessing

    def step() -> None:
        gpu(2)
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        assert 0 == process.exitcode

    assert ["the work of another process was not checked"] == notes(finished(step))


@both
def test_workers_of_a_dataloader(fake: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """DataLoader workers run on the CPU, as always, and are not a gap in the coverage."""

    def step() -> None:
        gpu(1)
        batches = list(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=1))
        assert [(2,)] * 3 == [tuple(batch.shape) for (batch,) in batches]
        assert not batches[0][0].is_cuda

    report = finished(step, fake=fake)
    assert ([], []) == (report.syncs, report.not_covered)
    assert "Error" not in capfd.readouterr().err


DISTRIBUTED = """
import json, warnings
import torch, torch.distributed as dist
from torch import nn
import instrument

warnings.simplefilter("ignore")

def step():
    dist.init_process_group(*backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        body()
    finally:
        dist.destroy_process_group()

def ddp():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2, device="cuda"), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        loss.item()

def dtensor():
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = dist.init_device_mesh("cuda", (1,))
    value = distribute_tensor(torch.ones(4, 4, device="cuda"), mesh, [Shard(0)])
    assert (value * 2).device.type == "cuda"
    (value * 2).sum().full_tensor().item()
    value.to_local().sum().tolist()

told = []
for body, backend in ((ddp, ["nccl"]), (ddp, []), (dtensor, ["nccl"]), (dtensor, [])):
    report = instrument.dry_run(step)
    found = sorted([one.op, one.count] for one in report.syncs if one.via is None)
    told.append([repr(report.error), found, sorted({one.cause for one in report.not_covered})])
print(json.dumps(told))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without it")
def test_distributed() -> None:
    """DDP and DTensor run on gloo, whether nccl is named or not, and reading their tensors synchronizes."""
    outcomes = alone(DISTRIBUTED)
    gloo = "collectives ran on gloo instead of nccl"
    assert [["None", [["item", 3]], [gloo]]] * 2 == outcomes[:2]
    assert [["None", [["item", 1], ["tolist", 1]]]] * 2 == [dtensor[:2] for dtensor in outcomes[2:]]
    assert all(gloo in dtensor[2] for dtensor in outcomes[2:])
