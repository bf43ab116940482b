"""The memory of a dry run: what lives how long, for what, and where it was allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from instrument.syncs.counting.cuda_memory import A100, H100
from instrument.syncs.counting.memory_use import MemoryUse
from instrument.syncs.counting.reductions import shared_bytes
from tests.support.step_memory import largest_batch, memory_of_step

from .programs import run

KIB, MIB = 1 << 10, 1 << 20


def peak(step: Callable[[], object], fake: bool = False) -> int:
    return memory_of_step(step, fake=fake).peak_bytes


def on_gpu(*shape: int, **more: Any) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.uint8, device="cuda", **more)


@pytest.fixture(params=[False, True], ids=["data", "fake"])
def fake(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_tensors_end_with_their_last_reference(fake: bool) -> None:
    """Views share memory, a dropped tensor gives it back, and what is on the CPU does not count."""

    def step() -> None:
        x = on_gpu(3 * MIB)
        view = x[:10].view(2, 5)
        del x
        other = on_gpu(2 * MIB)  # 5 MiB
        del view
        last = on_gpu(4 * MIB)  # 6 MiB
        torch.ones(100 * MIB, dtype=torch.uint8)
        del other, last

    assert peak(step, fake) == 6 * MIB


def test_moves(fake: bool) -> None:
    """A copy to the GPU takes memory there, one from it none; `resize_` and `set_` take and give back."""

    def step() -> None:
        x = torch.ones(MIB, dtype=torch.uint8).cuda()
        x.cpu().cuda()
        x.resize_(3 * MIB)  # 4 MiB while the old memory is there
        x.untyped_storage().resize_(0)
        on_gpu(3 * MIB)

    assert peak(step, fake) == 4 * MIB


def test_in_place(fake: bool) -> None:
    """Operators in place take nothing."""

    def step() -> None:
        x = torch.ones(MIB, device="cuda")
        x.add_(1).mul_(2).relu_()

    assert peak(step, fake) == 4 * MIB


def test_gradients_are_added_in_place(fake: bool) -> None:
    """Autograd adds the gradients of several uses in the memory of one of them."""

    def step() -> None:
        x = torch.ones(MIB, device="cuda", requires_grad=True)
        y = x * 2
        (y * 2 + y * 3 + y * 4).backward(torch.ones(MIB, device="cuda").expand(MIB))

    uses = memory_of_step(step, fake=fake)
    # x, y, the sum, the gradient that comes in, and two gradients of y at a time
    assert uses.peak_bytes == 4 * 6 * MIB


def test_backward_ends_what_norms_saved(fake: bool) -> None:
    """An RMSNorm keeps its input and statistics for the backward pass, and nothing after it."""

    def step() -> None:
        x = torch.ones(MIB, 4, device="cuda", requires_grad=True)  # 16 MiB
        loss = functional.rms_norm(x * 2, (4,)).sum()  # 32 MiB for the time being, then 20 MiB
        on_gpu(44 * MIB)
        loss.backward()
        x.grad = None
        on_gpu(64 * MIB)
        del loss

    assert peak(step, fake) == pytest.approx(80 * MIB, abs=4 * KIB)


MODEL = """
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    x = torch.ones(4096, 512).cuda()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_categories(fake: bool) -> None:
    """Parameters, gradients and state have the bytes of the tensors, activations what the backward pass needs."""
    uses = memory_of_step(lambda: exec(compile(MODEL, "model.py", "exec"), {"torch": torch, "nn": nn}), fake=fake)
    parts, parameters = uses.by_category(), 4 * (2 * 512 * 1024 + 1024 + 512)
    assert parts["parameters"] == parameters
    assert parts["optimizer_state"] == 2 * parameters
    assert parts["workspace"] == 2 * A100.workspace_bytes
    assert sum(parts.values()) == uses.peak_bytes


def test_places(fake: bool) -> None:
    """Each part of the peak has the line, the module and the pass that allocated it."""

    def step() -> None:
        model = nn.Sequential(nn.Linear(8, 1024, device="cuda"), nn.Tanh())
        x = torch.ones(MIB // 1024, 8).cuda()
        out = model(x)
        kept = out * 2
        kept.sum().backward()

    uses = memory_of_step(step, fake=fake)
    line = step.__code__.co_firstlineno
    modules = {(use.place.module, use.place.phase): use.bytes for use in uses.uses}
    assert modules["Sequential.1", "forward"] == 4 * MIB
    lines = {(use.place.site.line, use.place.phase): use.bytes for use in uses.uses if use.place.site}
    assert lines[line + 3, "forward"] >= 4 * MIB  # the result of tanh, which its backward needs
    assert lines[line + 4, "forward"] == 4 * MIB
    assert [size for name, size in uses.by_line().items() if name.endswith(f"memory.py:{line + 2}")] == [32 * KIB]


def test_the_peak_of_each_step() -> None:
    """The first step has no state of the optimizer yet when the activations are there."""
    uses = memory_of_step(lambda: exec(compile(MODEL, "model.py", "exec"), {"torch": torch, "nn": nn}))
    assert uses.step_peaks[0] < max(uses.step_peaks.values()) == uses.peak_bytes


@pytest.mark.parametrize("program", ["adam", "gpt with dropout", "gpt, autocast", "cnn", "gpt, checkpointing"])
def test_without_data(program: str) -> None:
    """Tensors without data have the memory that they have with data."""
    assert peak(partial(run, program), fake=True) == pytest.approx(peak(partial(run, program)), rel=0.001)


def test_a_limit() -> None:
    """Memory that does not suffice says so; what is cached is given back before."""

    def step() -> None:
        for size in (60, 70, 80):
            on_gpu(size * MIB)

    use: Callable[[int | None], MemoryUse] = lambda limit: memory_of_step(step, limit_bytes=limit)  # noqa: E731
    assert (use(None).fits, use(None).reserved_bytes) == (True, 210 * MIB)
    assert (use(90 * MIB).fits, use(90 * MIB).reserved_bytes) == (True, 80 * MIB)
    assert not use(79 * MIB).fits


def test_the_largest_batch() -> None:
    """It fits, and one more does not; few batches are tried."""
    tried = []

    def step(batch: int) -> None:
        tried.append(batch)
        on_gpu(batch * MIB)

    assert largest_batch(step, 1001 * MIB, fake=True) == 1000
    assert len(tried) <= 8
    assert largest_batch(step, MIB, fake=True) == 0
    with pytest.raises(ValueError, match='"start" must be at least 1: 0'):
        largest_batch(step, MIB, start=0)


@pytest.mark.parametrize("in_what", ["late", "order"])
def test_the_largest_batch_of_steps_that_differ(in_what: str) -> None:
    """What is freed after a run costs no tries; another order of allocations costs few."""
    tried, late = [], []

    def step(batch: int) -> None:
        tried.append(batch)
        x = on_gpu(batch * MIB)
        if in_what == "order" and len(tried) % 2:
            del x
            x = on_gpu(batch * MIB)
        elif in_what == "late":
            late[:] = [x]  # as a cycle that is collected in a later run

    assert largest_batch(step, 20_001 * MIB, fake=True) == 20_000
    assert len(tried) <= 8


def test_the_largest_batch_of_a_failing_step() -> None:
    """An error of the step is not mistaken for a lack of memory."""

    def step(batch: int) -> None:
        raise KeyError(batch)

    with pytest.raises(KeyError):
        largest_batch(step, MIB)


# By shape, strides, reduced dimensions and bytes of a partial result: what torch takes on an H100
REDUCTIONS = {
    ((10,), (1,), (0,), 4): (),
    ((512, 10000), (1, 512), (1,), 16): (164626432, 16),
    ((512, 10000), (1, 512), (1,), 4): (41156608, 16),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_buffers_of_reductions(case: Any) -> None:
    """They are those that recorded snapshots have."""
    shape, strides, dims, partial_bytes = case
    assert (
        shared_bytes(shape, strides, dims, 0, partial_bytes, H100.multiprocessors, H100.threads)
        == REDUCTIONS[case]
    )
