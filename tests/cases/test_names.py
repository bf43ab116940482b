"""Names of optimizers and data loaders: each object has one, wherever a window begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instrument import read_trace
from tests.bootstrap.programs import RUN, run_warm, write

GAN = """
import torch
from torch.utils.data import DataLoader

def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def evaluate(loader):
    for batch in loader:
        pass

def main():
    generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    opt_g, opt_c = (torch.optim.Adam(model.parameters()) for model in (generator, critic))
    train, val = (DataLoader(torch.ones(4, 2), batch_size=2) for _ in range(2))
    for epoch in range(2):
        for batch in train:
            update(opt_c, critic(generator(batch).detach()).sum())
            update(opt_g, -critic(generator(batch)).sum())
        evaluate(val)

main()
"""
LATE = """
import torch

def update(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

def main():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    opt_a = torch.optim.Adam(first.parameters())
    for step in range(6):
        update(first, opt_a)
        if step == 1:
            opt_b = torch.optim.Adam(second.parameters())
        if step > 1:
            update(second, opt_b)

main()
"""


def _names(folder: Path, program: str, *options: str) -> list[set[str]]:
    """Return the labels of the optimizers' and data loaders' ranges in each window."""
    write(folder, program)
    assert run_warm(folder, [*RUN, *options, "--", "train.py"]).returncode == 0
    found = []
    for path in sorted(folder.glob("runs/instrument/window-*/*.json.gz")):
        names = set(read_trace(path).regions.text("name"))
        found.append({re.sub(r"#[\w.]*", "", name) for name in names if "#" in name})
    return found


@pytest.mark.parametrize("steps", ["0-3", "1-3"])
def test_names_wherever_a_window_begins(tmp_path: Path, steps: str) -> None:
    """The variable of the caller names an object, not the argument of the function in which a window begins."""
    (names,) = _names(tmp_path, GAN, "--steps", steps)
    optimizers = {f"Optimizer.{method}[{name}]" for method in ("step", "zero_grad") for name in ("opt_g", "opt_c")}
    assert names == optimizers | {f"enumerate(DataLoader)[{name}]" for name in ("train", "val")}


def test_names_in_all_windows(tmp_path: Path) -> None:
    """An optimizer that was recorded alone keeps its name when there are several."""
    first, *others = _names(tmp_path, LATE, "--steps", "0,3,5")
    assert first == {"Optimizer.zero_grad", "Optimizer.step"}
    for names in others:
        assert names == first | {"Optimizer.zero_grad[opt_b]", "Optimizer.step[opt_b]"}
