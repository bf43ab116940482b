"""The models that a run calls, and their parameters."""

from __future__ import annotations

import torch
from torch import nn

import instrument


def test_models_of_one_class_are_told_apart() -> None:
    """Each has its own path, in its parameters and the places of its operators; loss functions share one."""

    def step() -> None:
        narrow, wide = nn.Linear(4, 4, bias=False).cuda(), nn.Linear(4, 64, bias=False).cuda()
        x = wide(narrow(torch.ones(2, 4, device="cuda")))
        loss = nn.MSELoss()(x, torch.zeros_like(x)) + nn.MSELoss()(x, torch.ones_like(x))
        loss.backward()

    report = instrument.dry_run(step, fake=True)
    assert report.allocations is not None
    assert report.allocations.models.parameters == {"Linear.weight": 4 * 16, "Linear_2.weight": 4 * 256}
    assert report.counts is not None
    called = {place.module for _, place in report.counts.step.span if place.phase == "forward"}
    assert {each for each in called if each} == {"Linear", "Linear_2", "MSELoss"}


def test_a_model_takes_the_name_of_one_that_is_gone() -> None:
    """A model that is made again in each step has the same path in all of them."""

    def step() -> None:
        for _ in range(3):
            nn.Linear(4, 4, bias=False).cuda()(torch.ones(2, 4, device="cuda"))

    report = instrument.dry_run(step, fake=True)
    assert report.allocations is not None
    assert set(report.allocations.models.parameters) == {"Linear.weight"}
