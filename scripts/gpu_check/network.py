"""The network that the checks train, with the regions that README names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument


class Block(nn.Module):
    """A linear layer and an activation, optionally recomputed in backward."""

    def __init__(self, width: int, recomputed: bool) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), nn.GELU()
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor with the shape of ``x``."""
        if self.recomputed:
            output: Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return output
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        output: Tensor = self.activation(self.linear(x))
        return output


class Training:
    """A network of blocks with its optimizer, and a step without a synchronization."""

    def __init__(self, device: str, blocks: int = 2, width: int = 256, *, recomputed: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(width, recomputed) for _ in range(blocks))).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch = torch.randn(64, width, device=device)

    def step(self) -> Tensor:
        """Train one step; return the loss without reading it."""
        with instrument.annotate("forward"):
            loss = self.model(self.batch).square().mean()
        with instrument.annotate("backward"):
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
