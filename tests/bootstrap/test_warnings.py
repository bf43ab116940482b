"""Warnings of a program have the same file and line under `instrument run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .programs import RUN, entries_in, run_warm, write

pytestmark = pytest.mark.process

WARN = """
import logging, pathlib, warnings
import torch

places = []
warnings.showwarning = lambda message, category, file, line, *_: places.append((str(message), file, line))
warnings.simplefilter("always")

def warn(what, level):
    for stacklevel in range(1, level + 1):
        warnings.warn(f"{what} {stacklevel}", stacklevel=stacklevel)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return 2 * x

    @staticmethod
    def backward(context, gradient):
        warn("backward", 7)
        return 2 * gradient

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.linear.register_full_backward_hook(lambda *_: None)  # warns, as no input requires a gradient

    def forward(self, x):
        warn("forward", 6)
        return Twice.apply(self.linear(x))

class Optimizer(torch.optim.SGD):
    def __init__(self, *args):
        super().__init__(*args)
        warn("optimizer made", 3)

    def step(self):
        warn("optimizer", 4)
        super().step()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        warn("data", 6)
        return torch.ones(2)

model = Model()
model.register_forward_hook(lambda *_: None)  # puts a frame around each call
optimizer = Optimizer(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
for batch in torch.utils.data.DataLoader(Data()):
    loss = model(batch).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.autograd.backward(model(batch).sum())
    optimizer.zero_grad()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
print(*places, sep="\\n")
"""


def test_locations_of_warnings(tmp_path: Path) -> None:
    """Warnings with a ``stacklevel`` keep their locations, inside and outside a window."""
    write(tmp_path, WARN)
    expected = run_warm(tmp_path, [sys.executable, "train.py"]).stdout
    assert "optimizer made 3" in expected
    assert "Full backward hook" in expected
    assert run_warm(tmp_path, [*RUN, "--steps", "1-3", "--", "train.py"]).stdout == expected
    assert [entry["status"] for entry in entries_in(tmp_path / "runs/instrument")] == ["recorded"]
