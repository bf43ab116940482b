"""Train a small transformer to repeat its input, on a GPU if there is one."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        return norm(x + y)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.add_norm(x, self.attention(x), self.norm1)
        return self.add_norm(x, self.mlp(x), self.norm2)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(0)
layers = [nn.Embedding(256, 128), Block(128, 4), Block(128, 4), nn.Linear(128, 256)]
model = nn.Sequential(*layers).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(256, (16 * args.steps, 64))), batch_size=16)

for (batch,) in loader:
    tokens = batch.to(args.device)
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
