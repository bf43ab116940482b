"""The backward pass in a dry run: what its formulas create lies where the gradients lie."""

from __future__ import annotations

import pytest
import torch

import instrument

FORMULAS = {
    "clamp": lambda x: x.clamp(min=-1, max=1),
    "clamp_min": lambda x: x.clamp_min(0.5),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "index": lambda x: x[:, 1:],
    "max": lambda x: x.max(1).values,
    "norm": lambda x: x.norm(dim=1),
    "huber": lambda x: torch.nn.functional.huber_loss(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_formulas_of_backward(formula: object, device: str) -> None:
    """A step that is correct on both devices also runs on a GPU machine, with no tensors on different devices."""

    def step() -> None:
        model = torch.nn.Linear(4, 4, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        formula(model(torch.ones(2, 4, device=device))).sum().backward()  # type: ignore[operator]
        optimizer.step()

    assert [] == instrument.dry_run(step).not_covered
