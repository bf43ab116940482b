"""Runs a program as the ranks of a job, a process with a simulated GPU for each."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from tests.simgpu.programs import environment

BEFORE = """
import os, torch, torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)

def start(**options):
    store = "file://" + os.environ["STORE"]
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world, **options)

"""


@dataclass(frozen=True)
class Rank:
    """What came of the process of a rank."""

    returncode: int
    stdout: str
    stderr: str


def run_ranks(source: str, count: int, **settings: object) -> list[Rank]:
    """Run a program as ranks, and kill those that take over 60 s; `start()` in it makes the process group."""
    command = [sys.executable, "-W", "ignore", "-c", BEFORE + textwrap.dedent(source)]
    return run_command(command, count, environment(devices=count, **settings))


def run_command(command: list[str], count: int, variables: dict[str, str], seconds: float = 60) -> list[Rank]:
    """Run a command line as ranks, with the variables that torchrun sets, and kill those that take too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="simgpu-ranks-") as folder:
        variables = variables | {
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "STORE": f"{folder}/store",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # a watchdog waits 4 times as long before it ends
        }  # fmt: skip
        processes = [
            start_rank(command, variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, Path(folder, str(rank)))
            for rank in range(count)
        ]
        last = time.monotonic() + seconds
        for process in processes:
            try:
                process.wait(max(last - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [
            Rank(
                process.returncode,
                Path(folder, f"{rank}.out").read_text(),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(processes)
        ]


def start_rank(command: list[str], variables: dict[str, str], path: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes into files, as one that nobody reads would block."""
    with path.with_suffix(".out").open("w") as out, path.with_suffix(".err").open("w") as err:
        return subprocess.Popen(command, env=variables, stdout=out, stderr=err)


def outputs(source: str, count: int, **settings: object) -> list[str]:
    """Return what each rank writes to stdout; AssertionError with all stderr if one fails."""
    done = run_ranks(source, count, **settings)
    assert all(rank.returncode == 0 for rank in done), "\n".join(rank.stderr for rank in done)
    return [rank.stdout for rank in done]
