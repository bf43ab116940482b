"""A training step with all its parts, for tests of `annotate_step`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PATCHED = {
    torch.autograd.profiler.record_function: ["__enter__", "__exit__"],
    torch.no_grad: ["__enter__", "__exit__"],
    torch.autograd: ["backward"],
    torch.Tensor: ["to", "cuda", "copy_"],
    dist.ProcessGroup: [name for name in vars(dist.ProcessGroup) if not name.startswith("__")],
}


BEFORE = {owner: {name: vars(owner).get(name) for name in names} for owner, names in PATCHED.items()}


def patched() -> set[str]:
    """Return the names whose objects differ from those at the import of this file."""
    return {
        f"{owner.__name__}.{name}"
        for owner, names in BEFORE.items()
        for name, original in names.items()
        if vars(owner).get(name) is not original
    }


class Job:
    """A small training job with a scheduler, with the usual steps."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, workers: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 1)), 2, num_workers=workers)
        self.losses: list[float] = []

    def train(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.scheduler.step()
            x.to("meta")
            self.losses.append(loss.item())

    def state(self) -> list[Any]:
        return [*self.losses, *(parameter.tolist() for parameter in self.model.parameters())]
