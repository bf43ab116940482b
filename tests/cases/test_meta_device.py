"""Tensors on the meta device are on no GPU and have no data, in a dry run as without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from instrument import dry_run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


def created() -> list[torch.device]:
    """Return the devices of tensors that are created on the meta device."""
    with torch.device("meta"):
        by_context = [torch.tensor([1.0]).device, torch.empty(1).device, torch.get_default_device()]
    return [
        torch.tensor([1.0, 2.0], device="meta").device,
        torch.as_tensor([1.0, 2.0], device="meta").device,
        torch.empty(2, device="meta").new_tensor([1.0]).device,
        *by_context,
    ]


def moved() -> list[torch.device]:
    """Return the devices of GPU tensors that move to the meta device."""
    value = torch.ones(2, 4, device="cuda" if torch.cuda.is_available() else "cpu")
    return [
        value.to("meta").device,
        value.to(device="meta").device,
        nn.Linear(2, 2, device=value.device).to("meta").weight.device,
        torch.empty_like(value, device="meta").device,
        torch.zeros_like(value, device="meta").device,
    ]


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("program", [created, moved])
def test_the_meta_device(program: Callable[[], list[torch.device]], fake: bool) -> None:
    """What is created on the meta device, or moved there from the GPU, is there.

    Only `torch.get_default_device` ignored contexts in torch 2.6, and says what it says without a dry run.
    """
    seen: list[torch.device] = []
    report = dry_run(lambda: seen.extend(program()), fake=fake)
    assert (None, []) == (report.error, report.findings)
    assert [torch.device("meta")] * 5 == seen[:5]
    assert program() == seen
