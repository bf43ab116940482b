"""The history of torch's own allocator, and what is read from it; memory that the GPU and the host see."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from instrument.read.memory.read import read_memory
from tests import simgpu
from tests.simgpu.programs import output

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


TRAINING = """
import sys, torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)).cuda()
optimizer = torch.optim.Adam(model.parameters())

def step():
    model(torch.ones(16, 128, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
torch.cuda.memory._record_memory_history()
step()
step()
torch.cuda.memory._dump_snapshot(sys.argv[1])
print(sum(parameter.numel() * 4 for parameter in model.parameters()))
"""


def test_categories_of_a_training(tmp_path: Path) -> None:
    """Parameters, gradients and state have the bytes of the tensors; what cuBLAS computes in is told apart."""
    expected = int(output(TRAINING, str(tmp_path / "memory.pickle")))
    parts = read_memory(tmp_path / "memory.pickle").break_down().by_category()
    blocks = {name: sum(number) for name, number in parts.items()}
    assert abs(blocks["parameters"] - expected) < 4096  # blocks of 512 bytes
    assert abs(blocks["gradients"] - expected) < 4096
    assert abs(blocks["optimizer_state"] - 2 * expected) < 8192
    assert blocks["workspace"] == 2 * 2**25


INFERENCE = """
import sys, torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
with torch.no_grad():
    model(torch.ones(64, 512, device="cuda"))
    torch.cuda.memory._record_memory_history()
    model(torch.ones(64, 512, device="cuda"))
torch.cuda.memory._dump_snapshot(sys.argv[1])
print(sum(parameter.numel() * 4 for parameter in model.parameters()))
"""


def test_categories_of_an_inference(tmp_path: Path) -> None:
    """Without gradients to compare with, what cuBLAS computes in is told from the parameters by its size."""
    expected = int(output(INFERENCE, str(tmp_path / "memory.pickle")))
    parts = read_memory(tmp_path / "memory.pickle").break_down().by_category()
    assert abs(sum(parts["parameters"]) - expected) < 4096
    assert sum(parts["workspace"]) == 2**25


def test_the_gpu_sees_pinned_memory_of_the_host() -> None:
    """Kernels of vLLM read and write it without a copy."""
    pinned, other = torch.ones(8).pin_memory(), torch.ones(8)
    of_device = ctypes.c_void_p()

    def ask(tensor: torch.Tensor) -> int:
        place = ctypes.c_void_p(tensor.data_ptr())
        return int(ctypes.CDLL(None).cudaHostGetDevicePointer(ctypes.byref(of_device), place, 0))

    assert (ask(pinned), of_device.value) == (0, pinned.data_ptr())
    assert (ask(other), of_device.value) == (1, None)  # cudaErrorInvalidValue
    assert ctypes.CDLL(None).cudaGetLastError() == 1  # else torch finds it after its next launch
