"""The smallest model with nested layers, one of which works in place."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.lin(x))


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a = Block(width)
        self.b = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))
