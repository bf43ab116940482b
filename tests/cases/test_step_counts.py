"""Trainings with several optimizers: `instrument run` and `instrument syncs` count the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instrument import read_trace
from instrument.syncs.dryrun.run import dry_run_file
from tests.bootstrap.programs import RUN, entries_in, run_warm, write

pytestmark = pytest.mark.corpus

START = """
import copy, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.ones(2, 4, device=device)
kept = []

def linear():
    return torch.nn.Linear(4, 1).to(device)

def train(model, optimizer, updates):
    for _ in range(updates):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""
FOLDS = """
for fold in range(3):
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, {updates})
    {keep}
"""
REPTILE = """
model = linear()
outer = torch.optim.Adam(model.parameters())
for _ in range(10):
    task = copy.deepcopy(model)
    train(task, torch.optim.SGD(task.parameters(), lr=0.01), 5)
    for own, other in zip(model.parameters(), task.parameters()):
        own.grad = own.data - other.data
    outer.step()
"""
GAN_TRIALS = """
for trial in range(3):
    generator, critic = linear(), linear()
    of_generator, of_critic = (torch.optim.Adam(each.parameters()) for each in (generator, critic))
    for _ in range(4):
        train(critic, of_critic, 1)
        train(generator, of_generator, 1)
"""
FINE_TUNING = """
body, head = torch.nn.Linear(4, 4).to(device), linear()
model = torch.nn.Sequential(body, head)
train(model, torch.optim.Adam(head.parameters()), 3)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
"""
TWO = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(device)
optimizers = [torch.optim.SGD(model[0].parameters()), torch.optim.AdamW(model[1].parameters())]
for _ in range(6):
    model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
"""
LATE = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(device).eval()
for _ in range(3):
    with torch.no_grad():
        model(x)
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2):
    optimizer.zero_grad()
    model(batch.to(device)).sum().backward()
    optimizer.step()
"""
COUNTS = {
    "folds": (FOLDS.format(updates=4, keep=""), 12),
    "folds that are kept": (FOLDS.format(updates=4, keep="kept.append((model, optimizer))"), 12),
    "folds of one update": (FOLDS.format(updates=1, keep="kept.append(model)"), 3),
    "inner and outer updates": (REPTILE, 50),
    "trials of a GAN": (GAN_TRIALS, 12),
    "phases of fine-tuning": (FINE_TUNING, 7),
    "an optimizer for each part": (TWO, 6),
    "a test of the model before its optimizer": (LATE, 4),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
@pytest.mark.parametrize("name", COUNTS)
def test_steps_of_run_and_syncs(tmp_path: Path, name: str) -> None:
    """Both count the updates of the optimizer that steps first, and of each that takes its place."""
    program, steps = COUNTS[name]
    path = write(tmp_path, START + program)
    done = run_warm(tmp_path, [*RUN, "--steps", "all", "--", "train.py"])
    entry = entries_in(tmp_path / "runs/instrument")[-1]
    assert (done.returncode, entry["steps"]) == (0, [0, steps - 1])
    report = dry_run_file(path, None)
    assert (report.error, report.steps) == (None, steps)


def test_step_0_of_a_late_optimizer(tmp_path: Path) -> None:
    """Calls of a model before its optimizer exists cost no step: step 0 begins with the first batch."""
    write(tmp_path, START + LATE)
    done = run_warm(tmp_path, [*RUN, "--steps", "0", "--", "train.py"])
    assert "step 0 is not recorded" not in done.stderr
    recorded = entries_in(tmp_path / "runs/instrument")[-1]  # the one before is of a call
    assert [recorded["status"], recorded["steps"]] == ["recorded", [0, 0]]
    (file,) = recorded["files"]
    regions = read_trace(tmp_path / "runs/instrument" / file["path"]).regions.text("name")
    assert {"Sequential", "Linear (backward)", "Optimizer.zero_grad#SGD.zero_grad"} <= set(regions)
    assert any(name.startswith("enumerate(DataLoader)") for name in regions)
