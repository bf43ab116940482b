"""Trains a small model under DDP, in which a rank can be slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import instrument


class Work(torch.autograd.Function):
    """Computes in backward for as long as it is told."""

    ms = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Compute, then return the gradient."""
        end = time.thread_time() + Work.ms / 1e3
        while time.thread_time() < end:
            pass
        return grad


def train(steps: int, on_steps: Any, more_ms: Callable[[int, str], float]) -> None:
    """Train.

    Args:
        steps: how many steps.
        on_steps: of the black box around the loop.
        more_ms: returns for a step how long this rank sleeps in "data", and computes in "backward".
    """
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64)
    with instrument.black_box(on_steps=on_steps) as box:
        for step in range(steps):
            Work.ms = more_ms(step, "backward")
            with instrument.annotate("data"):
                if sleep_ms := more_ms(step, "data"):  # a sleep of 0 would let others have the core
                    time.sleep(sleep_ms / 1e3)
            with instrument.annotate("forward"):
                loss = Work.apply(model(x)).sum()
            with instrument.annotate("backward"):
                loss.backward()
            with instrument.annotate("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            box.step()
