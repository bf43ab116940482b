"""Dry runs of mixed precision, data loading, optimizers and compiled functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from instrument.syncs.dryrun.run import dry_run

from .reports import gpu, listed, only, ran, waits

pytestmark = [pytest.mark.corpus, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]


# ------------------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Autocast is enabled for the GPU and does not synchronize."""
    seen = []

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        with torch.autocast("cuda", dtype=dtype):
            out = model(gpu(3, 4))
            seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            loss = F.mse_loss(out.float(), gpu(3, 2))
        loss.backward()

    assert [] == waits(step)
    assert [(True, dtype)] == seen
    assert not torch.is_autocast_enabled("cuda")


def test_autocast_of_a_cache_in_half_precision() -> None:
    """A step that relies on autocast's dtypes runs."""

    def step() -> None:
        model, cache = nn.Linear(4, 2, device="cuda"), gpu(5, 2).bfloat16()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            cache[torch.arange(3, device="cuda")] = model(gpu(3, 4)).detach()

    report = dry_run(step)
    assert (report.error, report.not_covered) == (None, [])


@pytest.mark.parametrize("clipped", [False, True])
def test_grad_scaler(clipped: bool) -> None:
    """The scaler synchronizes once for each optimizer, to check for infinities."""

    def step() -> None:
        models = [nn.Linear(4, 2, device="cuda") for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = sum(model(gpu(3, 4)).float().pow(2).sum() for model in models)
            scaler.scale(loss).backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                if clipped:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()

    report = ran(step)
    assert [("item", 6, "scaler.step(optimizer)")] == listed(report)
    assert (3, 2.0) == (report.steps, report.per_step(only(report)))
    assert only(report).via is not None
    assert only(report).via.file.endswith("grad_scaler.py")


def test_an_infinity_makes_the_scaler_skip_the_step() -> None:
    """Values are real: the scaler finds an infinity, and halves its scale."""
    scales = []

    def step() -> None:
        weight = torch.ones(2, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        scaler.scale((weight * torch.tensor(float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), weight.tolist()))

    lines = [("item", 1, "scaler.step(optimizer)")]
    after = "scales.append((scaler.get_scale(), weight.tolist()))"
    assert [*lines, ("item", 1, after), ("tolist", 1, after)] == waits(step)
    assert [(4.0, [1.0, 1.0])] == scales


# ------------------------------------------------------------------------------------------------------ data


class Samples(Dataset[torch.Tensor]):
    """Samples whose creation reads values, as augmentations do."""

    size = 9_000  # two are more than the 64 KiB that CUDA copies at once

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((self.size,), float(index))
        if sample.mean().item() > 100:
            raise ValueError("unlikely")
        return sample[sample >= 0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_data_loader(workers: int, pinned: bool) -> None:
    """Batches in pinned memory are copied without synchronizing; workers run on the CPU alone."""
    seen = []

    def step() -> None:
        model = nn.Linear(Samples.size, 1, device="cuda")
        for batch in DataLoader(Samples(), batch_size=2, num_workers=workers, pin_memory=pinned):
            seen.append(batch.is_pinned())
            batch = batch.to("cuda", non_blocking=True)
            model(batch).sum().backward()

    report = ran(step)
    assert [] == report.not_covered
    assert [pinned] * 4 == seen
    if pinned:
        assert [] == report.syncs
    else:
        found = only(report)
        assert ("to", 4, "H2D", 4 * 2 * Samples.size * 4) == (found.op, found.count, found.direction, found.bytes)
        assert 'batch = batch.to("cuda", non_blocking=True)' == found.site.code
        assert "not pinned" in found.cause


def test_blocking_copy_from_pinned_memory() -> None:
    """Without non_blocking, a copy from pinned memory synchronizes too."""

    def step() -> None:
        for (batch,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True):
            batch.cuda()

    assert [("cuda", 2, "batch.cuda()")] == waits(step)


# ------------------------------------------------------------------------------------------------ optimizers


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (kind, {**flags, **more})
    for kind, more in (
        (torch.optim.Adam, {"amsgrad": True}), (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    )
    for flags in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True})
    if "capturable" not in flags or kind is not torch.optim.SGD
]  # fmt: skip


@pytest.mark.parametrize(("kind", "flags"), KINDS)
def test_optimizers(kind: Any, flags: dict[str, Any]) -> None:
    """Optimizers do not synchronize, with any implementation."""

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        optimizer = kind(model.parameters(), lr=0.1, **flags)
        before = model.weight.detach().clone()
        for _ in range(3):
            model(gpu(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for state in optimizer.state.values():
            for name, held in state.items():
                if name != "step" and held is not None:
                    assert held.is_cuda
        assert before.data_ptr() != model.weight.data_ptr()

    report = ran(step)
    assert ([], [], 3) == (listed(report), report.not_covered, report.steps)


def test_optimizers_change_the_parameters() -> None:
    """The step updates the parameters."""
    weights = []

    def step() -> None:
        weight = torch.ones(2, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
        weights.append(weight.tolist())

    assert [("tolist", 1, "weights.append(weight.tolist())")] == waits(step)
    assert [[0.5, 0.5]] == weights


def test_capturable_optimizers_keep_their_count_on_the_gpu() -> None:
    """Reading a step count on the GPU synchronizes; reading one on the host does not."""

    def step() -> None:
        for capturable in (False, True):
            weight = torch.ones(2, device="cuda", requires_grad=True)
            optimizer = torch.optim.Adam([weight], capturable=capturable)
            weight.sum().backward()
            optimizer.step()
            assert capturable == optimizer.state[weight]["step"].is_cuda
            optimizer.state[weight]["step"].item()

    assert [("item", 1, 'optimizer.state[weight]["step"].item()')] == waits(step)


def test_lbfgs() -> None:
    """L-BFGS reads the loss, the size of the gradient, the step length and the slope."""

    def step() -> None:
        weight = torch.full((2,), 0.1, device="cuda", requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    line = "optimizer.step(closure)"
    assert [("bool", 3, line), ("float", 1, line)] == waits(step)


def test_clipping() -> None:
    """Clipping synchronizes only if it may raise an error."""

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        model(gpu(3, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    line = "nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"
    assert [("bool", 1, line)] == waits(step)


# --------------------------------------------------------------------------------------------- torch.compile


def test_compiled_function() -> None:
    """A synchronization in a compiled function is found, and that it breaks the graph."""

    def double(value: torch.Tensor) -> torch.Tensor:
        if value.sum().item() > 0:
            return value * 2
        return value

    def step() -> None:
        compiled = torch.compile(double)
        for _ in range(3):
            compiled(torch.ones(2, device="cuda"))

    report = ran(step)
    assert [("item", 3, "if value.sum().item() > 0:")] == listed(report)
    assert not report.not_covered
    assert report.syncs[0].cause.endswith("; breaks a graph of torch.compile")
    report.assert_max(3)
    with pytest.raises(AssertionError, match="waits for the GPU 3 times; allowed: 2"):
        report.assert_max(2)


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_module(how: str) -> None:
    """A compiled module without a synchronization has none."""

    def step() -> None:
        model: Any = nn.Linear(4, 2, device="cuda")
        if how == "method":
            model.compile()
        else:
            model = torch.compile(model)
        model(gpu(3, 4)).sum().backward()

    report = ran(step)
    assert ([], []) == (listed(report), report.not_covered)
    report.assert_max(0)


def test_earlier_compiled_function() -> None:
    """A function compiled before the run is traced in it without its backend, which compiles again after it."""
    calls = []

    def backend(module: Any, inputs: Any) -> Any:
        calls.append(1)
        return module.forward

    compiled = torch.compile(lambda value: value + 1, backend=backend)
    report = ran(lambda: compiled(gpu(2)).tolist())
    assert ([], [], ["tolist"]) == (calls, report.not_covered, [found.op for found in report.syncs])
    compiled(torch.ones(2))
    assert [1] == calls
