"""Programs with torch.compile, each a function of the device that returns its results, and what Dynamo says.

Run as a script, prints that for each program on the CPU, in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from instrument.base.compat.tracing import break_reason


def user_line(stack: Any) -> int:
    """Return the innermost line of this file in a stack."""
    return next(line.lineno for line in reversed(stack) if line.filename == __file__)


Program = Callable[[str], list[float]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Branching(Model):
    def forward(self, x: Any) -> Any:
        x = self.blocks[0](x)
        if x.sum() > 0:
            x = x * 2
        return self.blocks[1](x)


class Reading(Model):
    def forward(self, x: Any) -> Any:
        x = self.blocks[0](x)
        scale = x.abs().max().item()
        return self.blocks[1](x / scale)


def train(model: Any, call: Any, device: str, sizes: tuple[int, ...] = (4, 4)) -> list[float]:
    """Train a model on batches of these sizes; return its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for size in sizes:
        loss = call(torch.randn(size, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_place(device: str) -> list[float]:
    model = Model().to(device)
    model.compile()
    return train(model, model, device)


def data_dependent(device: str) -> list[float]:
    model = Branching().to(device)
    return train(model, torch.compile(model), device, (4, 4, 6))


def reading(device: str) -> list[float]:
    model = Reading().to(device)
    return train(model, torch.compile(model), device)


def shapes(device: str) -> list[float]:
    model = Model().to(device)
    return train(model, torch.compile(model), device, (2, 3, 4, 1))


def made_inside(device: str) -> list[float]:
    @torch.compile
    def run(x: Any) -> Any:
        on_gpu = x.device.type == device.partition(":")[0]
        mask = torch.ones(8, device=x.device) if on_gpu else torch.zeros(8)
        return x * mask + torch.arange(8, device=device) + torch.zeros_like(x) + x.new_ones(8)

    return [run(torch.ones(4, 8, device=device)).sum().item() for _ in range(2)]


def moved_inside(device: str) -> list[float]:
    @torch.compile
    def run(x: Any, bias: Any) -> Any:
        return x + bias.to(x.device) * 2

    return [run(torch.ones(4, 8, device=device), torch.ones(8)).sum().item() for _ in range(2)]


def random(device: str) -> list[float]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).to(device)
    return train(model, torch.compile(model), device)


def recomputed(device: str) -> list[float]:
    from torch.utils.checkpoint import checkpoint

    model = Model().to(device)

    @torch.compile
    def run(x: Any) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    return train(model, run, device)


def masked(device: str) -> list[float]:
    @torch.compile
    def run(x: Any) -> Any:
        return x[x > 0].sum() + len(x.nonzero())

    return [run(torch.tensor([1.0, -1.0, 2.0]).to(device)).item() for _ in range(2)]


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        in_place,
        data_dependent,
        reading,
        shapes,
        made_inside,
        moved_inside,
        random,
        recomputed,
        masked,
    )
}


def found(program: Program) -> dict[str, Any]:
    """Run a program with the backend "eager" on the CPU; return its results and what Dynamo says."""
    from torch._dynamo import utils

    torch.compiler.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    compiling: Any = torch.compile

    def compile_eagerly(model: Any = None, **options: Any) -> Any:
        return compiling(model, **{**options, "backend": "eager"})

    torch.compile = compile_eagerly
    module: Any = nn.Module
    before = module.compile
    module.compile = lambda module: before(module, backend="eager")
    torch.manual_seed(0)
    try:
        results = program("cpu")
    finally:
        torch.compile, module.compile = compiling, before
    metrics = utils.get_compilation_metrics()
    return {
        "results": results,
        "graphs": utils.counters["stats"]["unique_graphs"],
        "graph_breaks": sorted(
            (user_line(each.user_stack), break_reason(each)) for each in utils.graph_break_reasons
        ),
        "counted_breaks": sum(utils.counters["graph_break"].values()),
        "recompilations": sum(bool(each.recompile_reason) for each in metrics),
    }


if __name__ == "__main__":
    print(json.dumps({name: found(program) for name, program in PROGRAMS.items()}))
