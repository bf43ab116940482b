"""`instrument run` finds all models before the first window, and each keeps its name in all steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from instrument.read.jobs.read import read_trace
from instrument.read.measures.summary import summarize
from instrument.record.modules.optimizers import outermost_modules
from tests.bootstrap.programs import RUN, write
from tests.bootstrap.programs import run_warm as run

pytestmark = pytest.mark.process

GAN = """
import torch
from torch import nn
generator = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
discriminator = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
d_optimizer = torch.optim.SGD(discriminator.parameters(), 0.1)
for number in range(6):
    if number == {made}:
        g_optimizer = torch.optim.SGD(generator.parameters(), 0.1)
    fake = generator(torch.ones(1, 2))
    discriminator(fake.detach()).sum().backward()
    d_optimizer.step()
    discriminator(fake).sum().backward()
    if number >= {made}:
        g_optimizer.step()
"""
AGENT = """
import torch
from torch import nn
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
agent = Agent()
a_optimizer, c_optimizer = (torch.optim.SGD(part.parameters()) for part in (agent.actor, agent.critic))
for _ in range(4):
    with torch.no_grad():
        agent.actor(torch.ones(1, 2))
    agent.critic(torch.ones(1, 2)).sum().backward()
    c_optimizer.step()
    agent.actor(torch.ones(1, 2)).sum().backward()
    a_optimizer.step()
"""
LBFGS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
"""


def models(folder: Path, program: str, *options: str) -> dict[str, tuple[int, int, bool]]:
    """Return the calls and steps of each model, forward and backward, and whether some are missing."""
    write(folder, program)
    done = run(folder, [*RUN, *options, "--", "train.py"])
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("runs/instrument/window-*/*.json.gz")
    return {
        "/".join(stat.path): (stat.calls, stat.steps, stat.partial)
        for stat in summarize(read_trace(path)).regions
        if stat.path[-1].startswith("Sequential")
    }


def test_model_whose_optimizer_steps_second(tmp_path: Path) -> None:
    """The generator's backward, whose forward runs in the step before, is complete from the first step on."""
    assert models(tmp_path, GAN.format(made=0)) == {
        "Sequential[generator]": (3, 3, False),
        "Sequential[discriminator]": (6, 3, False),
        "backward/Sequential[generator] (backward)": (3, 3, False),
        "backward/Sequential[discriminator] (backward)": (6, 3, False),
    }


def test_model_whose_optimizer_is_created_in_the_window(tmp_path: Path) -> None:
    """A backward whose forward was missed is marked as partial; models keep their names in the window."""
    assert models(tmp_path, GAN.format(made=2), "--steps", "1-5") == {
        "Sequential[generator]": (3, 3, False),
        "Sequential": (10, 5, False),
        "backward/Sequential[generator] (backward)": (2, 2, True),
        "backward/Sequential (backward)": (10, 5, False),
    }


def test_parts_of_a_model_in_step_0(tmp_path: Path) -> None:
    """The part that is called first has its name from the start."""
    assert models(tmp_path, AGENT, "--steps", "0-2") == {
        "Sequential[actor]": (5, 3, False),
        "Sequential[critic]": (3, 3, False),
        "backward/Sequential[critic] (backward)": (3, 3, False),
        "backward/Sequential[actor] (backward)": (2, 2, False),
    }


def test_closure_in_step_0(tmp_path: Path) -> None:
    """The first step begins around the optimizer's step, as later ones do, and is complete."""
    assert models(tmp_path, LBFGS, "--steps", "all") == {
        "Optimizer.step#LBFGS.step/Sequential": (6, 3, False),
        "Optimizer.step#LBFGS.step/backward/Sequential (backward)": (6, 3, False),
    }


def test_outermost_models() -> None:
    """One search finds the models of all optimizers once each, and only a few of a large population."""
    gc.collect()
    agent = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    alone, population = nn.Linear(2, 2), [nn.Linear(1, 1) for _ in range(100)]
    first, second = (torch.optim.SGD(part.parameters()) for part in agent.children())
    assert outermost_modules([first, second]) == [agent]
    assert outermost_modules([first], [agent["critic"], alone]) == [agent, alone]
    many = torch.optim.SGD([parameter for model in population for parameter in model.parameters()])
    assert len(outermost_modules([many, first])) == 17
