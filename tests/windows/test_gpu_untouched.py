"""No part of the library touches the GPU before the program does, in any process and any way to record."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import counted_gpu, warm
from tests.support.programs import environment, program, python, run
from tests.support.simulated_gpu import VALUES
from tests.support.torch_versions import names_activities

from .training import manifest, statuses

pytestmark = pytest.mark.process

TRAIN = """
import os
import torch
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
from torch.utils.data import DataLoader

def train(batches, step=lambda: None):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
        step()

def batches(start="fork"):
    return DataLoader(torch.ones(8, 1, 4), num_workers=1, multiprocessing_context=start)
"""
RUN = """
if __name__ == "__main__":
    train(batches())
    train(batches("spawn"))
    child = os.fork()
    if not child:
        train(torch.ones(4, 1, 4))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
API = """
import sys
import instrument
from instrument.integrations.loop import Loop
from instrument.integrations.server import Server
out = sys.argv[1]
if __name__ == "__main__":
    with instrument.profile(out, schedule=instrument.schedule(wait=1, warmup=1, active=2, repeat=1)) as prof:
        child = os.fork()
        if not child:
            with instrument.profile(out + "/child") as own:
                train(torch.ones(4, 1, 4), own.step)
            prof.step()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(batches(), prof.step)
    train(instrument.steps(batches(), out + "/steps"))
    with instrument.annotate_modules(torch.nn.Linear(1, 1)), instrument.profile(out + "/all"):
        train(batches())
    loop = Loop(out + "/loop", schedule="1-2")
    loop.start()
    train(batches(), loop.step)
    loop.stop()
    server = Server(out + "/server", active=2)
    server.attach()
    server.start_profile()
    train(batches(), server.step)
    server.detach()
    instrument.profile(out + "/shapes", record_shapes=True, with_stack=True)
    activity = torch.profiler.ProfilerActivity
    if sys.argv[2] == "True":
        instrument.profile(out + "/named", activities=[activity.CPU, {activity.CUDA: ["GPU_MEMCPY"]}])
"""


def count_gpu_calls(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Install the counting of GPU calls; return the folder of its notes and the environment for it."""
    site = counted_gpu.install(tmp_path)
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(site), env["PYTHONPATH"]])
    env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # frameworks that other tests import set it
    return site, env


def test_calls_below_the_library_are_noted(tmp_path: Path) -> None:
    """A call made from a frame of the library is noted."""
    site, env = count_gpu_calls(tmp_path)
    script = program("import torch\nfrom instrument.base import guard\nguard.torch = torch\n"
                     "exec(compile('torch.cuda.is_available()', guard.__file__, 'exec'))", tmp_path)  # fmt: skip
    run(python(script), env)
    assert ["is_available", "_cuda_getDeviceCount"] == [line.split()[0] for line in counted_gpu.noted(site)]


def test_a_program_under_run_keeps_its_choice_of_gpu(tmp_path: Path) -> None:
    """The import of torch, windows, workers of both kinds and a forked child leave the GPU untouched."""
    site, env = count_gpu_calls(tmp_path)
    script = program(TRAIN + RUN, tmp_path)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "instrument", "run", "--steps", "1-2", "--out", str(out), "--"]
    run([*command, script], env)
    assert [] == counted_gpu.noted(site)
    assert "recorded" in {entry["status"] for entry in manifest(out)}


def test_each_way_to_record_leaves_the_gpu_untouched(tmp_path: Path) -> None:
    """`profile`, `steps`, `Loop` and `Server` leave the GPU untouched, from their creation to the summary."""
    site, env = count_gpu_calls(tmp_path)
    out = tmp_path / "out"
    warm.run(python(program(TRAIN + API, tmp_path), [str(out), str(names_activities())]), env, check=True)
    assert [] == counted_gpu.noted(site)
    for folder in (out, *(out / name for name in ("child", "steps", "all", "loop", "server"))):
        assert [(1, "recorded")] == statuses(manifest(folder)), folder


# Tests on a GPU, each in its own process that has not used the GPU before.

CHOSEN = """
import os
import torch
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
try:
    print(torch.ones(1, device="cuda").device)
except RuntimeError:
    print("none")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
FORKED = """
import os, sys
import torch
import instrument
with instrument.profile(sys.argv[1], schedule=instrument.schedule("3")) as prof:
    child = os.fork()
    if not child:
        print(torch.ones(3, device="cuda").sum().item(), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
UNUSED = """
import ctypes, sys
import torch
import instrument
activity = torch.profiler.ProfilerActivity
options = {"activities": [activity.CPU, activity.CUDA]} if sys.argv[2] == "named" else {}
for _ in instrument.steps(range(6), sys.argv[1], wait=1, warmup=1, active=2, **options):
    torch.ones(8).sum()
print(torch.cuda.is_initialized())
active = ctypes.c_int(0)
if torch.version.cuda:
    ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(ctypes.c_uint()), ctypes.byref(active))
print(active.value)
"""
LATE = """
import json, sys
import torch
import instrument
plan = instrument.schedule(wait=1, active=2, repeat=3)
with instrument.profile(sys.argv[1], schedule=plan) as prof:
    for number in range(9):
        for _ in range(20):  # the first kernels of a recording may be missing
            torch.ones(8, device="cuda" if number > 1 else "cpu").sum()
        prof.step()
def kernels(entry):
    trace = instrument.read_trace(f"{sys.argv[1]}/{entry['files'][0]['path']}")
    return len(trace.kernels)
print(json.dumps([(entry["status"], entry["reason"], kernels(entry)) for entry in prof.windows]))
"""


@pytest.mark.gpu
def test_the_environment_chooses_the_gpu_after_torch_is_imported(tmp_path: Path) -> None:
    """With no visible GPU none is used, under ``instrument run`` as without it."""
    script = program(CHOSEN, tmp_path)
    command = [sys.executable, "-m", "instrument", "run", "--steps", "1-2", "--out", str(tmp_path / "out"), "--"]
    plain = run(python(script), environment())
    assert plain.stdout == "none\n" == run([*command, script], environment()).stdout


@pytest.mark.gpu
def test_a_child_forked_under_a_profile_can_use_the_gpu(tmp_path: Path) -> None:
    """A profile that is entered but has opened no window leaves the driver uninitialized, so a fork can use it."""
    done = run(python(program(FORKED, tmp_path), [str(tmp_path / "out")]), environment(VALUES))
    assert done.stdout == "3.0\n0\n"


@pytest.mark.gpu
@pytest.mark.parametrize("activities", ["default", "named"])
def test_a_window_of_a_loop_on_the_cpu_creates_no_context(tmp_path: Path, activities: str) -> None:
    """CUDA stays uninitialized and no GPU memory is taken, also where GPU activities are requested."""
    out = tmp_path / "out"
    done = run(python(program(UNUSED, tmp_path), [str(out), activities]), environment())
    assert done.stdout == "False\n0\n"
    assert [(1, "recorded")] == statuses(manifest(out))


@pytest.mark.gpu
def test_a_window_before_the_first_use_of_the_gpu_has_a_reason(tmp_path: Path) -> None:
    """A window without GPU work has a reason; a window without a reason has its kernels."""
    done = run(python(program(LATE, tmp_path), [str(tmp_path / "out")]), environment())
    windows = json.loads(done.stdout.splitlines()[-1])
    assert "first used inside the window" in windows[0][1]
    assert windows[0][2] == 0
    for status, reason, kernels in windows:
        assert (status == "recorded") == (reason is None) == (kernels > 0)
