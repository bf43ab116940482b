"""What tensors without data read as: correct programs take the branch that they would take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from instrument import dry_run

from .reports import finished


def gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def normalize() -> None:
    """Normalize as torchvision does."""
    image = torch.rand(2, 3, 8, 8, device="cuda")
    std = torch.as_tensor([0.229, 0.224, 0.225], dtype=image.dtype, device=image.device)
    if (std == 0).any():
        raise ValueError("std evaluated to zero")
    image.sub_(0.5).div_(std[:, None, None])
    assert torch.tensor([0.229, 0.224, 0.225]).tolist() == std.tolist()


def computed() -> None:
    """Compute values from known ones, also in place and through views."""
    total = torch.zeros(3, device="cuda")
    total[1:] += gpu(1, 2)
    assert [0, 1, 2] == total.tolist()
    assert 3 == total.sum().item()
    assert 2 == torch.arange(3, device="cuda").max()
    assert 0 == torch.ones(4, 4, device="cuda").tril()[0, 1]
    assert [1, 3] == total.new_ones(2).cumsum(0).mul(gpu(1, 1.5)).tolist()
    steps = torch.zeros((), device="cuda")
    steps.add_(1)
    assert 1 == steps.cpu() == int(steps)
    assert total.to(torch.int64).tolist() == [0, 1, 2]


def unknown_again() -> None:
    """Overwrite known values with unknown ones."""
    total = gpu(5.0, 5.0)
    total.add_(torch.rand(2, device="cuda"))
    assert total[0].item() != 5
    noise = gpu(7.0, 7.0)
    noise.normal_()
    assert 7 not in noise.tolist()
    both = gpu(1.0, 2.0)
    both.copy_(torch.randn(2, device="cuda"))
    assert [1, 2] != both.tolist()


def checks() -> None:
    """Check unknown values in every way; all checks pass."""
    x = torch.randn(50, device="cuda")
    labels = torch.randint(0, 10, (8,), device="cuda")
    if (x < -9).any() or not (x.abs() >= 0).all():
        raise ValueError("out of bounds")
    if len(x) and not (x.square() >= 0).all():
        raise ValueError("negative")
    assert (x * 2 > x - 9).all(), "smaller"
    assert not (x > 9).any()
    if not torch.allclose(x / x, torch.ones_like(x)):
        raise ValueError("not close")
    if (labels < 0).any() | (labels >= 10).any():
        raise ValueError("no class")
    if x.min() > x.max():
        raise ValueError("order")
    assert bool((x > 100).any()) is False
    if (x > 100).any().item() == True or bool((x < 100).all()) is not True:  # noqa: E712
        raise ValueError("large")
    if (x > 100).any() or not (
        (x < 100).all()
        and (x > -100).all()
    ):  # fmt: skip
        raise ValueError("nested")


def equality() -> None:
    """Compare unknown values: a float equals no other, and a class index is a valid one."""
    x = torch.randn(50, device="cuda")
    assert not bool((x == 0.5).any())
    found = bool((x == 0).any()), bool((x != 0).all()), bool((torch.randint(9, (4,), device="cuda") != -100).all())
    assert (False, True, True) == found


@pytest.mark.parametrize("step", [normalize, computed, unknown_again, checks, equality])
def test_values(step: Callable[[], None]) -> None:
    """Without data, the step runs to its end, as with data."""
    report = dry_run(step, fake=True)
    assert report.error is None, report
    if step is not unknown_again:
        assert dry_run(step).error is None


def test_earlier_model() -> None:
    """Small buffers that existed before the run keep their values; large ones have random values."""
    mean, large = torch.tensor([1.0, 2.0]), torch.full((200, 200), 5.0)

    def step() -> None:
        assert 3 == (mean.sum() + torch.zeros((), device="cuda")).item()
        assert 5 != (large * 1)[0, 0].item()

    assert dry_run(step, fake=True, on_gpu=[mean, large]).error is None


def test_a_condition_that_decides_nothing() -> None:
    """A branch that does not raise is not mistaken for a check."""
    seen = set()

    def step() -> None:
        for _ in range(40):
            greater = (torch.rand(1, device="cuda") > 0.5).any()
            if greater:
                seen.add(True)
            else:
                seen.add(False)

    assert dry_run(step, fake=True).error is None
    assert {True, False} == seen


def test_random_places_in_data() -> None:
    """Random integers are numbers to compute with, so that a batch that is cut out of data has its length."""
    lengths = []

    def step() -> None:
        data = torch.arange(1000)
        starts = torch.randint(len(data) - 64, (4,))
        batch = torch.stack([data[start : start + 64] for start in starts]).cuda()
        order = torch.randperm(10)
        lengths.extend([batch.shape, order.sort().values.tolist(), starts.tolist()])

    before = torch.get_rng_state()
    finished(step, fake=True)
    finished(step, fake=True)
    assert lengths[0] == (4, 64)
    assert lengths[1] == [*range(10)]
    assert lengths[:3] == lengths[3:]
    assert len({*lengths[2]}) > 1
    assert torch.equal(before, torch.get_rng_state())
