"""Dry runs of device selection, threads and calls that synchronize once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from instrument.syncs.dryrun.run import dry_run

from .reports import gpu, listed, only, ran, waits

pytestmark = [pytest.mark.corpus, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]


# --------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("how", ["default", "context"])
def test_default_device(how: str) -> None:
    """A default device counts like a named one, and is restored after the run."""

    def made() -> None:
        assert torch.zeros(2).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
        torch.tensor([1.0])
        torch.zeros(2, device="cpu").sum().item()
        torch.ones(2).sum().item()

    def step() -> None:
        if how == "default":
            torch.set_default_device("cuda")
            made()
        else:
            with torch.device("cuda"):
                made()
            assert torch.zeros(2).is_cpu

    assert [("tensor", 1, "torch.tensor([1.0])"), ("item", 1, "torch.ones(2).sum().item()")] == waits(step)
    assert torch.zeros(2).device.type == "cpu"
    assert torch.get_default_device() == torch.device("cpu")


def test_earlier_default_device() -> None:
    """A default device set before the run is restored after it, whatever the step sets."""
    torch.set_default_device("meta")
    try:
        dry_run(lambda: torch.set_default_device("cuda"))
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


def test_moves() -> None:
    """Each way to move a tensor synchronizes under its own name and direction; a tensor that stays does not."""

    def step() -> None:
        host, there = torch.ones(2), gpu(2)
        host.to("cuda")
        host.to(device="cuda", dtype=torch.float16)
        host.to(there)
        host.cuda()
        host.type_as(there)
        there.cpu()
        there.to("cpu")
        there.to(host)
        there.to(there), there.to(torch.float16), there.to("cuda"), host.to("cpu"), there.float()
        torch.empty(0).to("cuda")

    report = ran(step)
    expected = ["to", "to", "to", "cuda", "type_as", "cpu", "to", "to"]
    found = sorted(report.syncs, key=lambda found: found.site.line)
    assert expected == [each.op for each in found]
    assert ["H2D"] * 5 + ["D2H"] * 3 == [each.direction for each in found]
    assert [1] * 8 == [each.count for each in found]


def test_threads() -> None:
    """Threads that the step starts are watched and named."""

    def read(value: torch.Tensor) -> None:
        value.sum().item()

    def step() -> None:
        value = gpu(3)
        threads = [threading.Thread(target=read, args=(value,), name="reader") for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    report = ran(step)
    assert [("item", 2, "value.sum().item()")] == listed(report)
    assert "reader" == only(report).thread


def test_threads_of_a_pool() -> None:
    """Threads of a pool are watched too."""
    from concurrent.futures import ThreadPoolExecutor

    def step() -> None:
        with ThreadPoolExecutor(2) as pool:
            assert [2.0] * 3 == list(
                pool.map(lambda value: value.sum().item(), [torch.ones(2, device="cuda")] * 3)
            )

    assert [3] == [count for _, count, _ in waits(step)]


def test_on_gpu() -> None:
    """Objects from before the run can be declared to be on the GPU; afterwards they are where they were."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(3, 4)
    model(batch).sum().backward()
    optimizer.step()

    def step() -> None:
        assert batch.is_cuda
        assert model[1].running_mean.is_cuda
        assert model[0].weight.grad.is_cuda
        assert optimizer.state[model[0].weight]["exp_avg"].is_cuda
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        loss.item()

    for _ in range(2):
        assert [("item", 1, "loss.item()")] == waits(step, on_gpu=[model, optimizer, batch])
        assert not batch.is_cuda
        assert model[0].weight.device == torch.device("cpu")


def test_on_gpu_takes_modules_optimizers_and_tensors() -> None:
    """`on_gpu` accepts lists of modules, optimizers and tensors, and refuses anything else."""
    held = {"a": [torch.ones(2)]}
    assert ["tolist"] == [op for op, _, _ in waits(lambda: held["a"][0].tolist(), on_gpu=[held])]
    with pytest.raises(TypeError, match='"on_gpu" must hold modules, optimizers and tensors: 3'):
        dry_run(lambda: None, on_gpu=[3])


def test_nothing_on_a_gpu() -> None:
    """The report says when a step uses no GPU."""
    report = ran(lambda: torch.ones(2).sum().item())
    assert [] == report.findings
    assert report.unavailable_reason.startswith("nothing was on a GPU")
    with pytest.raises(AssertionError, match="nothing could be checked"):
        report.assert_max(10)
    assert "" == ran(lambda: gpu(2)).unavailable_reason


def test_data_parallel_over_one_gpu() -> None:
    """`DataParallel` over the one GPU calls the module directly."""

    def step() -> None:
        model = nn.DataParallel(nn.Linear(4, 2, device="cuda"))
        model(gpu(3, 4)).sum().backward()

    assert [] == waits(step)


# -------------------------------------------------------------------------------------------- outermost call


class Wrapped:
    """Iterates over the items it holds, like loaders that move batches."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        self._held = held

    def __iter__(self) -> Iterator[torch.Tensor]:
        for each in self._held:
            yield each.to("cuda", non_blocking=True)


def test_generators() -> None:
    """A synchronization inside a generator is at its line."""

    def step() -> None:
        for batch in Wrapped([torch.ones(20_000), torch.ones(20_000).pin_memory()]):
            batch.sum()

    assert [("to", 1, 'yield each.to("cuda", non_blocking=True)')] == waits(step)


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda value: value.unique(), "unique"),
        (lambda value: torch.allclose(value, value), "allclose"),
        (lambda value: value[value > 0], "getitem"),
        (lambda value: torch.where(value > 0), "where"),
        (lambda value: str(value), "print"),
        (lambda value: f"{value.sum():.3f}", "format"),
        (lambda value: 1.0 in value, "contains"),
        (lambda value: value.tolist(), "tolist"),
        (lambda value: bool(value.sum() > 0), "bool"),
        (lambda value: int(value.sum()), "int"),
        (lambda value: [1, 2][value.sum().long() * 0], "int"),
        (lambda value: torch.cuda.synchronize(), "synchronize"),
        (lambda value: torch.cuda.current_stream().synchronize(), "synchronize"),
    ],
)  # fmt: skip
def test_one_call_is_one_synchronization(call: Callable[[Any], Any], op: str) -> None:
    """A call is one synchronization, named after the call, whatever it reads inside."""

    def step() -> None:
        call(torch.ones(4, device="cuda"))

    assert [(op, 1)] == [(name, count) for name, count, _ in waits(step)]
