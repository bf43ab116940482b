"""A training whose whole step is a CUDA graph, on a GPU: windows do not change the losses."""

from __future__ import annotations

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .support import programs
from .support.simulated_gpu import VALUES

PROGRAM = """
import json
import sys

import torch

warmups, how, at, out = int(sys.argv[1]), *sys.argv[2:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = [torch.randn(32, 64).cuda() for _ in range(warmups + 100)]
static_x, static_y = data[0].clone(), torch.zeros(32, 8, device="cuda")
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
losses = []


def train_step():
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.mse_loss(model(static_x), static_y)
    loss.backward()
    optimizer.step()
    return loss


def train(items, step=lambda: None):
    for number in items:
        static_x.copy_(data[number])
        if number < warmups:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                losses.append(train_step().detach().clone())
            torch.cuda.current_stream().wait_stream(side)
        else:
            if number == warmups:
                optimizer.zero_grad(set_to_none=True)
                with torch.cuda.graph(graph):
                    loss = train_step()
                    if how == "inside":
                        step()
            graph.replay()
            losses.append(loss.detach().clone())
        step()


if how in ("plain", "run"):
    train(range(len(data)))
else:
    import instrument

    if how == "steps":
        train(instrument.steps(range(len(data)), out, at=at))
    else:
        with instrument.profile(out, schedule=instrument.schedule(at)) as prof:
            train(range(len(data)), prof.step)
print(json.dumps([loss.hex() for loss in torch.stack(losses).tolist()]))
"""


def losses_of(folder: Path, warmups: int, how: str, at: str = "") -> list[str]:
    """Run the program and return its losses, exact to the last bit."""
    script = programs.program(PROGRAM, folder)
    out = folder / "out"
    command = programs.python(script, [str(warmups), how, at, str(out)])
    if how == "run":
        run = [sys.executable, "-m", "instrument", "run", "--profiler", "torch", "--steps", at, "--out", out, "--"]
        command = [*run, *command[1:]]
    done = programs.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}))
    losses: list[str] = json.loads(done.stdout.splitlines()[-1])
    return losses


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns the losses of ``warmups`` steps and 100 replays without the library."""
    return cache(lambda warmups: losses_of(tmp_path_factory.mktemp("plain"), warmups, "plain"))


@pytest.mark.gpu
@pytest.mark.parametrize("warmups", [3, 4])
@pytest.mark.parametrize(
    ("how", "at"), [("hand", "3-5"), ("inside", "4-6"), ("inside", "2-3"), ("steps", "3-5"), ("run", "3-5")]
)
def test_a_whole_step_in_a_graph(tmp_path: Path, plain: Any, warmups: int, how: str, at: str) -> None:
    """A window around the capture and one in the replays are recorded; training does not change."""
    assert plain(warmups) == losses_of(tmp_path, warmups, how, f"{at},50-52")
    first, second = (json.loads(line) for line in (tmp_path / "out/manifest.jsonl").read_text().splitlines())
    late = how == "inside" and at == "4-6" and warmups == 3  # the step before the window ends in the capture
    assert (first["status"], first["reason"] is None) == (("partial", False) if late else ("recorded", True))
    begin, end = map(int, at.split("-"))
    assert first["steps"] == [begin + late, end]
    assert (second["status"], second["steps"]) == ("recorded", [50, 52])
    path = tmp_path / "out" / second["files"][0]["path"]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    launches = [event["name"] for event in events if event.get("cat") == "cuda_runtime"]
    assert sum("GraphLaunch" in name for name in launches) == 3
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) >= 3 * 5  # forward, backward and update of each step


STOP_IN_CAPTURE = """
import json
import sys
import threading

import torch

import instrument
from instrument.record import cuda_graphs

cuda_graphs._CAPTURE_WAIT_S = 0
x = torch.zeros(1000, device="cuda")
side, another, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
prof = instrument.profile(sys.argv[2], schedule="1-100")
prof.start()
for _ in range(3):
    x.add_(1)
    prof.step()
x.zero_()
torch.cuda.synchronize()
begun, stopped = threading.Event(), threading.Event()


def capture(inside):
    with torch.cuda.stream(side):
        graph.capture_begin()
        x.add_(1)
        inside()
        torch.cuda.CUDAGraph.__mro__[1].capture_end(graph)  # bypasses the patched method


def wait():
    begun.set()
    stopped.wait(60)


def stop_under_another_stream():
    prof.stop()
    with torch.cuda.stream(another):
        prof.step()


if sys.argv[1] != "on another thread":
    capture(prof.stop if sys.argv[1] == "here" else stop_under_another_stream)
    assert torch.autograd._profiler_enabled()
    prof.step()
else:
    thread = threading.Thread(target=capture, args=(wait,))
    thread.start()
    begun.wait(60)
    prof.stop()
    stopped.set()
    thread.join()
assert not torch.autograd._profiler_enabled()
for _ in range(5):
    graph.replay()
print(json.dumps([x.sum().item(), prof.windows]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["here", "under another stream", "on another thread"])
def test_a_stop_in_a_capture(tmp_path: Path, where: str) -> None:
    """A capture on this thread delays the stop to a later step; a capture on another thread survives the stop."""
    command = programs.python(programs.program(STOP_IN_CAPTURE, tmp_path), [where, str(tmp_path / "out")])
    done = programs.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0", **VALUES}))
    total, (window,) = json.loads(done.stdout.splitlines()[-1])
    assert total == 5 * 1000
    assert window["status"] == "partial"
    during_capture = "a CUDA graph was captured when the window ended" in window["reason"]
    assert during_capture == (where == "on another thread")
