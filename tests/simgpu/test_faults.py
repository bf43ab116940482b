"""Faults on demand: what a program and a profiler meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from tests import simgpu
from tests.simgpu.programs import output, run

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

FOUR_RECORDINGS = """
import json, torch
from torch.profiler import profile

x = torch.ones(8, device="cuda")
found = []
for _ in range(4):
    with profile() as recording:
        for _ in range(9):
            x + 1
        torch.cuda.synchronize()
    names = [event.name for event in recording.events()]
    found.append([sum("elementwise" in name for name in names), names.count("cudaLaunchKernel")])
print(json.dumps(found))
"""


def four_recordings(**settings: object) -> list[list[int]]:
    """Return the numbers of kernels and launches that each recording has."""
    return cast("list[list[int]]", json.loads(output(FOUR_RECORDINGS, **settings).splitlines()[-1]))


def test_recording_k_of_a_process_loses_k_kernels() -> None:
    assert four_recordings(lost_records=1) == [[8, 9], [7, 9], [6, 9], [5, 9]]


@pytest.mark.parametrize("late", [1, 2])
def test_records_that_come_late_are_in_no_recording(late: int) -> None:
    assert four_recordings(late_records=late) == [[0, 0]] * 4


def test_records_without_times_are_dropped_by_kineto() -> None:
    assert four_recordings(zero_stamps=1) == [[0, 9]] * 4


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("refused", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"),
        ("busy", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"),
    ],
)
def test_without_cupti_a_recording_has_the_cpu_alone(condition: str, said: str) -> None:
    done = run(FOUR_RECORDINGS, cupti=condition)

    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0]] * 4
    assert said in done.stderr + done.stdout


def test_memory_ends_at_its_size_and_at_the_largest_allocation() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()

    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + (2 << 20), dtype=torch.uint8, device="cuda")
    with simgpu.configured(largest_bytes=64 << 20), pytest.raises(torch.OutOfMemoryError):
        torch.empty(65 << 20, dtype=torch.uint8, device="cuda")
    block = torch.empty(65 << 20, dtype=torch.uint8, device="cuda")

    assert total == int(simgpu.value_of("memory"))
    assert torch.cuda.mem_get_info() == (free - block.nbytes - (1 << 20), total)  # torch rounds to 2 MB
    del block
    torch.cuda.empty_cache()


def test_processes_share_the_memory(tmp_path: Path) -> None:
    printed = output(
        """
        import subprocess, sys, torch

        ask = "import torch; print(torch.cuda.mem_get_info()[0] >> 20)"
        def free() -> int:
            return int(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout)

        before = free()
        block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        print(before - free(), free() == before - 1524)
        """,
        shared=tmp_path / "memory",
    )

    assert (
        printed == "1524 True\n"
    )  # MiB: the block and this process's context, and nothing of the processes before


LAUNCHES = """
import torch

x = torch.ones(8, device="cuda")
for _ in range(10):
    x.add_(1)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"error_at_launch": 5}, "an illegal memory access was encountered"),
        ({"assert": "elementwise"}, "device-side assert triggered"),
        ({"device": "full"}, "out of memory"),
        ({"device": "exclusive"}, "CUDA-capable device(s) is/are busy or unavailable"),
    ],
)
def test_a_program_gets_the_error(settings: dict[str, object], said: str) -> None:
    done = run(LAUNCHES, **settings)

    assert done.returncode == 1
    assert said in done.stderr


def test_a_kernel_that_never_ends_keeps_who_waits() -> None:
    printed = output(
        """
        import os, threading, torch

        x = torch.ones(8, device="cuda")
        x.add_(1)
        event = torch.cuda.current_stream().record_event()
        waiting = threading.Thread(target=event.synchronize)
        waiting.start()
        waiting.join(1)
        print(event.query(), waiting.is_alive(), flush=True)
        os._exit(0)
        """,
        hang="elementwise",
    )

    assert printed == "False True\n"


def test_a_slow_device_takes_longer_by_its_factor() -> None:
    printed = output(
        """
        import torch
        from tests import simgpu

        x = [torch.ones(8, device=f"cuda:{i}") for i in range(2)]
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        with simgpu.log() as entries:
            x[0] + 1, x[1] + 1
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        print(*sorted((e.device, e.duration) for e in entries if e.kind == "kernel"))
        """,
        devices=2,
        slow="1=2.5",
        durations="elementwise=4000",
    )

    assert printed.splitlines()[-1] == "(0, 4000) (1, 10000)"
