"""Training of several ranks is not changed: each has the same kernels in the same order, the same output and end.

Where a rank is missing, the others end as without this library, and the manifest says which windows are whole;
where a rank is slow, the readers name it.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.run_folder import entries_of, files_of
from tests import simgpu
from tests.simgpu.works import read_logs, works
from tests.support import warm
from tests.support.finishing import eventually
from tests.support.programs import ROOT, environment

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

BEGIN = """
import faulthandler, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from tests.simgpu.ways import loop, watch

faulthandler.dump_traceback_later(50, exit=True)  # nobody kills a rank that hangs
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)

def leave(when):
    if rank == 1 and os.environ["LEAVES"] == f"kill {when}":
        os.kill(os.getpid(), 9)
    if rank == 1 and os.environ["LEAVES"] == f"raise {when}":
        raise ValueError("one that the program raises")

leave("at start")
options = {"rank": rank, "world_size": world, "device_id": device}
options["timeout"] = timedelta(seconds=3 if os.environ["LEAVES"] else 30)
dist.init_process_group("nccl", init_method="file://" + os.environ["STORE"], **options)
torch.manual_seed(rank)

def show(*values):
    print(rank, *values)

def batches():
    for step in range(6):
        leave(f"in {step}")
        yield torch.randn(8, 32).cuda()
"""

END = """
torch.cuda.synchronize()
if not isinstance(globals().get("model"), nn.parallel.DistributedDataParallel):  # its peak is another in each run
    show(torch.cuda.max_memory_allocated())
show(int(torch.cuda.get_rng_state().sum()), torch.rand(1).item())
dist.destroy_process_group()
"""

PROGRAMS = {
    "ddp": """
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)).cuda()
model = watch(nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=0.005))
optimizer = torch.optim.Adam(model.parameters())
for batch in loop(batches()):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item())
""",
    "fsdp2": """
from torch.distributed.fsdp import fully_shard

layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)]
model = nn.Sequential(*layers).cuda()
for layer in layers:
    fully_shard(layer)
watch(fully_shard(model))
optimizer = torch.optim.AdamW(model.parameters())
for batch in loop(batches()):
    loss = model(batch[None]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item())
""",
    "pipeline": """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

stage = PipelineStage(part := watch(nn.Sequential(nn.Linear(32, 32), nn.ReLU()).cuda()), rank, world, device)
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean())
optimizer = torch.optim.AdamW(part.parameters())
for batch in loop(batches()):
    losses = []
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    show([loss.item() for loss in losses], part[0].weight.sum().item())
""",
}
WAYS = ("run", "steps", "syncs", "modules", "memory", "black_box")
RANKS = 2
IMPORTS = ("torch.distributed.fsdp", "torch.distributed.pipelining")


@dataclass(frozen=True)
class Outcome:
    """What a job did: `lines` and `works` are those of each rank, of each stream for the latter, in order."""

    lines: list[list[str]]
    works: dict[tuple[int, int], list[str]]
    ends: list[int]
    """How the process of each rank ended, as `subprocess` says it."""
    stderr: str
    seconds: float
    out: Path

    def windows(self) -> list[list[dict[str, Any]]]:
        """Return the lines of the manifest of each rank, also those of windows that a kill left open."""
        lines = list(entries_of(self.out)) if self.out.exists() else []
        return [[line for line in lines if line["rank"] == rank] for rank in range(RANKS)]


def outcome(
    program: str, way: str, folder: Path, leaves: str = "", summary: bool = False, **settings: object
) -> Outcome:
    """Run a program on all ranks in a way, with settings of the simulated GPU; `leaves` says how rank 1 ends."""
    script, out = folder / "train.py", folder / "out"
    script.write_text(BEGIN + PROGRAMS[program] + END)
    settings |= {"devices": RANKS, "log": folder / "log-%p"}
    variables = {f"SIMGPU_{name.upper()}": str(value) for name, value in settings.items()}
    variables |= {"WAY": way, "OUT": str(out), "STORE": str(folder / "store"), "LEAVES": leaves}
    variables |= {
        "INSTRUMENT_SUMMARY": str(int(summary)),
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    }
    variables["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "false"
    env = environment(variables)
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT}"
    options = ["-m", "instrument", "run", "--steps", "2-3", "--out", str(out), "--"] if way == "run" else []
    began = time.monotonic()
    done = warm.run([sys.executable, *options, script], env, timeout=60, ranks=RANKS, imports=IMPORTS)
    seconds = time.monotonic() - began
    ends = dict(re.findall(r"^rank (\d+) ended with (-?\d+)$", done.stderr, re.MULTILINE))
    lines = [[line for line in done.stdout.splitlines() if line.startswith(f"{rank} ")] for rank in range(RANKS)]
    assert sum(map(len, lines)) == len(done.stdout.splitlines()), done.stdout
    codes = [int(ends.get(str(rank), 0)) for rank in range(RANKS)]
    return Outcome(lines, works(read_logs(folder)), codes, done.stderr, seconds, out)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda program: outcome(program, "plain", tmp_path_factory.mktemp(program), numerics=1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_is_the_same(program: str, way: str, plain: Any, tmp_path: Path) -> None:
    expected = plain(program)
    assert expected.ends == [0, 0], expected.stderr
    assert any("ncclDevKernel" in name for names in expected.works.values() for name in names)

    found = outcome(program, way, tmp_path, numerics=1)

    assert (found.ends, found.lines) == ([0, 0], expected.lines), found.stderr
    assert found.works == expected.works
    for windows in found.windows():
        assert all((window["status"], window["reason"]) == ("recorded", None) for window in windows)
        assert len(windows) == (way not in ("syncs", "black_box"))


# How the program leaves on rank 1, what becomes of both processes, and of the window of each rank.
ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL
FAULTS = {
    "killed at its start": ("kill at start", [1, KILLED], [[], []]),
    "killed in a window": ("kill in 3", [ABORTED, KILLED], [["failed"], ["failed"]]),
    "killed after a window": ("kill in 5", [ABORTED, KILLED], [["recorded"], ["recorded"]]),
    "raises in a window": ("raise in 3", [ABORTED, 1], [["failed"], ["partial"]]),
}


@pytest.mark.parametrize("way", ["run", "steps"])
@pytest.mark.parametrize("fault", FAULTS)
def test_without_a_rank_the_other_ends_as_ever(fault: str, way: str, tmp_path: Path) -> None:
    """The watchdog of NCCL aborts it, or it finds no peer; the manifest says which windows are whole."""
    leaves, ends, windows = FAULTS[fault]

    found = outcome("ddp", way, tmp_path, leaves=leaves, nccl_init_ns=2 * 10**9)

    assert found.ends == ends, found.stderr
    assert found.seconds < 30
    assert (ends[0] == ABORTED) == ("Watchdog caught collective operation timeout" in found.stderr)

    def statuses() -> list[list[str]]:
        return [[line["status"] for line in lines] for lines in found.windows()]

    eventually(lambda: statuses() == windows)  # another process finishes windows
    for line in (line for lines in found.windows() for line in lines):
        assert (line["reason"] is None) == (line["status"] == "recorded")
        assert all((found.out / name).is_file() for name in files_of(line))
        assert bool(files_of(line)) == (line["status"] in ("recorded", "partial"))


@pytest.mark.parametrize("program", ["ddp", "fsdp2"])
def test_readers_name_the_slow_rank(program: str, tmp_path: Path) -> None:
    found = outcome(program, "steps", tmp_path, summary=True, slow="1=400")

    assert found.ends == [0, 0], found.stderr
    diagnosis = instrument.diagnose(found.out)
    assert diagnosis.job is not None
    assert diagnosis.job.arrivals.latest == 1
    (late,) = [finding for finding in diagnosis.findings if finding.rule == "late-rank"]
    assert late.where.rank == 1
    assert "Rank 1 arrives last at " in " ".join(found.stderr.split())
