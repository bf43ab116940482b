"""Jobs of several ranks: rank 0 says which rank is slow, and in which phase, though all wait in backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.record.slow_steps.step_numbers import StepNumbers

from ..support import programs, warm

JOB = """
import json, sys, time
import torch, torch.distributed as dist
import instrument
from torch.nn.parallel import DistributedDataParallel

mode, out = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
INTERVAL = 3
work_ms = 0

class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        end = time.thread_time() + work_ms / 1e3
        while time.thread_time() < end:
            pass
        return grad

told, numbers = [], []
function = instrument.slow_ranks(lambda slow: told.append(slow.as_dict()))

def train(intervals, slow, phase):
    global work_ms
    model = DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64)
    functions = [instrument.every(INTERVAL, each) for each in (function, numbers.append)]
    with instrument.black_box(on_steps=functions) as box:
        for step in range(intervals * INTERVAL):
            is_slow = rank == slow and step >= 12 * INTERVAL
            work_ms = 30 if is_slow and phase == "backward" else 0
            with instrument.annotate("data"):
                time.sleep(0.04 if is_slow and phase == "data" else 0)
            with instrument.annotate("forward"):
                loss = Work.apply(model(x)).sum()
            with instrument.annotate("backward"):
                loss.backward()
            with instrument.annotate("optimizer"):
                optimizer.step()
            box.step()

if mode == "restart":
    train(3, None, None)
    dist.destroy_process_group()
    if rank < size - 1:
        store = dist.FileStore(out + ".store", size - 1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size - 1)
        train(22, 1, "backward")
else:
    train(22, 1, mode)
if rank == 0:
    json.dump({"told": told, "last": numbers[-1]}, open(out, "w"))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


def run_job(folder: Path, mode: str, ranks: int) -> tuple[dict[str, Any], str]:
    """Run a job; return what rank 0 wrote, and what the ranks printed."""
    script = folder / "job.py"
    script.write_text(JOB)
    environment = programs.environment({"OMP_NUM_THREADS": "1", "INSTRUMENT_SUMMARY": "0"})
    done = warm.run(programs.python(script, [mode, str(folder / "out")]), environment, check=True, ranks=ranks)
    return json.loads((folder / "out").read_text()), done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "ranks", "phase", "signal"),
    [("backward", 3, "backward", "cpu"), ("data", 3, "data", "wall"), ("restart", 4, "backward", "cpu")],
)
def test_the_slow_rank_is_named(tmp_path: Path, mode: str, ranks: int, phase: str, signal: str) -> None:
    """By the callback, the log and the numbers; also in a smaller job after a restart in the same processes."""
    result, stderr = run_job(tmp_path, mode, ranks)
    assert [(1, phase, signal)] == [(slow["rank"], slow["phase"], slow["signal"]) for slow in result["told"]]
    assert 0.02e9 < result["told"][0]["excess_ns"] < 0.2e9
    last = {name.removeprefix("instrument/"): value for name, value in result["last"].items()}
    assert (1, 1) == (last["slow_ranks"], last[f"slow_rank_{phase}"])
    assert last["ranks"] == (ranks - 1 if mode == "restart" else ranks)
    assert last[f"slow_rank_{phase}_excess_s"] > 0.02
    assert 1 == stderr.count("slow rank: rank 1")


def test_a_job_of_one_rank_compares_nothing() -> None:
    """Nothing is started, and nothing is added to the numbers."""
    function = instrument.slow_ranks()
    function(StepNumbers({"instrument/step": 99, "instrument/step_time_mean_s": 0.01}))
    assert {} == function.numbers
    function.close()


@pytest.mark.parametrize(
    "wrong", [{"on_slow": 1}, {"alone": "data"}, {"alone": [1]}, {"patience": 0}, {"patience": "3"}]
)
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    """They fail at the call, with their name."""
    with pytest.raises((TypeError, ValueError), match=f'"{next(iter(wrong))}" must'):
        instrument.slow_ranks(**wrong)
