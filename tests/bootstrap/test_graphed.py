"""Training with CUDA graphs, under `instrument run`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from ..windows.training import recorded
from .programs import RUN, entries_in, write
from .programs import run_warm as run

TRAIN = """
import sys
sys.path.insert(0, {root!r})
import pytest
from tests.support.cuda_graphs import Training, emulate

patch = pytest.MonkeyPatch()
device = emulate(patch)
training = Training({warmups})
training.run(100)
print(device.violations, device.replays)
"""
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build has real CUDA graphs"),
]
ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("warmups", [3, 4])
@pytest.mark.parametrize("steps", ["3-5", "50-52", "102-104"])
def test_whole_step_in_a_graph(tmp_path: Path, warmups: int, steps: str) -> None:
    """Replays are steps, and the capture is part of the first; a window ends at the latest with the program."""
    write(tmp_path, TRAIN.format(root=ROOT, warmups=warmups))
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    assert done.stdout.splitlines()[0] == "[] 100", done.stderr
    (entry,) = entries_in(tmp_path / "runs/instrument")
    first, last = map(int, steps.split("-"))
    count = warmups + 100
    assert entry["steps"] == [first, min(last, count - 1)]
    assert entry["status"] == ("recorded" if last < count else "partial")
    assert recorded(tmp_path / "runs/instrument") == [
        list(range(first, min(last, count) + 1))
    ]  # another step has begun


CALLABLES = """
import sys
sys.path.insert(0, {root!r})
import pytest
import torch
from torch.cuda import make_graphed_callables
from tests.support.cuda_graphs import Training, emulate

device = emulate(pytest.MonkeyPatch())
training = Training()
training.half()
training.model = make_graphed_callables(training.model, (torch.ones(1, 2),))
for _ in range(9):
    training.half()
print(device.violations, device.replays)
"""


@pytest.mark.parametrize("step_on", ["forward", "backward"])
def test_graphed_model(tmp_path: Path, step_on: str) -> None:
    """Each call or backward pass of a graphed model is a step, and the model has no hook during capture."""
    write(tmp_path, CALLABLES.format(root=ROOT))
    done = run(tmp_path, [*RUN, "--step-on", step_on, "--steps", "4-5,8-20", "--", "train.py"])
    assert done.stdout.splitlines()[0] == "[] 18", done.stderr
    first, second = entries_in(tmp_path / "runs/instrument")
    assert (first["steps"], first["status"]) == ([4, 5], "recorded")
    assert (second["steps"], second["status"]) == ([8, 9], "partial")


def test_sigterm_during_capture(tmp_path: Path) -> None:
    """SIGTERM saves the window after the capture."""
    end = """
import signal

class Shown(list):
    def append(self, name):
        print(name, flush=True)

device.violations = Shown()
for _ in range(3):
    training.step()
training.capture(lambda: signal.raise_signal(signal.SIGTERM))
while True:
    training.graph.replay()
"""
    write(tmp_path, TRAIN.format(root=ROOT, warmups=3).partition("training.run")[0] + end)
    done = run(tmp_path, [*RUN, "--steps", "2-1000000000", "--", "train.py"])
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert (entry["status"], entry["steps"][0]) == ("partial", 2)
