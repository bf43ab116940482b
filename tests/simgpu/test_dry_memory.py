"""The memory that a dry run reports against torch's own allocator on the simulated GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from instrument.syncs.counting.cuda_memory import H100
from tests import simgpu
from tests.counting.programs import PROGRAMS, run
from tests.counting.test_allocator import CONTEXT, MIB
from tests.simgpu import programs
from tests.support.step_memory import largest_batch, memory_of_step

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


@pytest.fixture(autouse=True)
def cudnn_as_before() -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    yield
    torch.backends.cudnn.enabled = before


def peaks(program: str) -> tuple[int, int]:
    """Run a program on the GPU; return the most that it had in use and reserved."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run(program)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - used, torch.cuda.max_memory_reserved() - reserved


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_peak_of_a_program(program: str) -> None:
    """It is that of the allocator, within 3 % (but for LSTMs, of what is not workspace)."""
    used, reserved = peaks(program)
    memory = memory_of_step(partial(run, program), gpu=H100)
    workspace = 0 if program == "lstm" else memory.by_category().get("workspace", 0)
    assert memory.peak_bytes == pytest.approx(used, abs=0.03 * (used - workspace))
    assert memory.reserved_bytes == pytest.approx(reserved, rel=0.1)


STEP = """
import torch
import torch.nn.functional as F
from torch import nn

def step(batch):
    model = nn.Sequential(nn.Linear(300, 900), nn.GELU(), nn.LayerNorm(900), nn.Linear(900, 100)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x, y = torch.randn(batch, 300, device="cuda"), torch.randint(100, (batch,), device="cuda")
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_the_largest_batch_that_fits() -> None:
    """It fits into the memory of the GPU, and one sample more does not."""
    limit, names = 100 * MIB, dict[str, object]()
    exec(STEP, names)
    batch = largest_batch(names["step"], limit, gpu=H100, start=64)  # type: ignore[arg-type]
    ends = [
        programs.run(f"{STEP}\nstep({number})", memory=limit + CONTEXT).stderr for number in (batch, batch + 1)
    ]
    assert ["OutOfMemoryError" in end for end in ends] == [False, True]
