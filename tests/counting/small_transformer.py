"""A transformer as those of the recorded snapshots of it are: 32 layers, 3.4 billion parameters, context 128.

Written after the lines and operators that the stacks of the snapshots name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

BATCH, CONTEXT, VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 4, 128, 10_000, 2560, 10_240, 32, 32


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Any) -> Any:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        root = torch.sqrt(norm**2 / WIDTH + 1e-5)
        normed = x / root
        return torch.einsum("...d,d->...d", normed, self.weight)


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.ones(CONTEXT, WIDTH // HEADS // 2), persistent=False)
        self.register_buffer("sin", torch.ones(CONTEXT, WIDTH // HEADS // 2), persistent=False)

    def forward(self, x: Any, positions: Any) -> Any:
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = torch.zeros_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out


def softmax(x: Any) -> Any:
    most, _ = torch.max(x, dim=-1, keepdim=True)
    powers = torch.exp(x - most)
    return powers / powers.sum(dim=-1, keepdim=True)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotation = Rotation()

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        positions = torch.arange(length, device=x.device).expand(batch, length)
        q, k = self.rotation(q, positions), self.rotation(k, positions)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        mask = ~mask
        out = attend(q, k, v, mask.expand(batch, HEADS, length, length))
        out = out.transpose(1, 2).reshape(batch, length, WIDTH)
        return self.o(out)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, x: Any) -> Any:
        gate, up = self.w1(x), self.w3(x)
        active = gate * torch.sigmoid(gate)
        return self.w2(active * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.feed = Norm(), Attention(), Norm(), FeedForward()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.table[tokens]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits: Any, targets: Any) -> Any:
    logits = logits.view(-1, VOCABULARY)
    targets = targets.view(-1)
    most, _ = torch.max(logits, dim=-1, keepdim=True)
    shifted = logits - most
    sums = torch.exp(shifted).sum(dim=-1)
    chosen = shifted[torch.arange(len(targets)), targets]
    return (torch.log(sums) - chosen).mean()


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                parameter.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-1e-3)
                parameter.mul_(0.999)


def forward() -> None:
    model, tokens = Transformer().cuda(), torch.randint(VOCABULARY, (BATCH, CONTEXT), device="cuda")
    model(tokens)


def forward_mixed() -> None:
    model, tokens = Transformer().cuda(), torch.randint(VOCABULARY, (BATCH, CONTEXT), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(tokens)


def full_step() -> None:
    model, tokens = Transformer().cuda(), torch.randint(VOCABULARY, (BATCH, CONTEXT), device="cuda")
    optimizer = AdamW(model.parameters())
    cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
