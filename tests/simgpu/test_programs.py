"""Programs that train: with each allocator, on two devices, and in a child of a process that used the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from tests import simgpu
from tests.simgpu.programs import output

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


@pytest.mark.parametrize(
    ("call", "library"),
    [(torch.fft.fft, "cuFFT"), (torch.linalg.inv, "cusolver"), (torch.linalg.eigh, "cusolver")],
)
def test_the_error_names_a_library_that_is_not_simulated(
    call: Callable[[torch.Tensor], object], library: str
) -> None:
    with pytest.raises(RuntimeError, match=library):
        call(torch.eye(4, device="cuda"))


TRAINS = """
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {allocator!r}
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    model(torch.randn(1600, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
held = torch.cuda.memory_allocated()
blocks = []
try:
    while True:
        blocks.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print(len(blocks))
blocks.clear()
torch.cuda.empty_cache()
print(torch.cuda.memory_allocated() == held, torch.cuda.mem_get_info()[0] > 7 << 30)
"""


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_each_allocator_trains_runs_out_of_memory_and_frees(allocator: str) -> None:
    printed = output(TRAINS.format(allocator=allocator), memory=8 << 30)

    assert printed.splitlines() == ["7", "True True"]


def test_devices_have_their_own_clock_memory_and_context() -> None:
    printed = output(
        """
        import ctypes, torch
        from tests import simgpu

        def contexts() -> list[int]:
            driver, flags, active = ctypes.CDLL(None), ctypes.c_uint(), ctypes.c_int()
            found = []
            for device in range(3):
                driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
                found.append(active.value)
            return found

        print(contexts())
        with simgpu.log() as entries:
            x = torch.ones(1 << 20, device="cuda:1") + 1
            torch.cuda.synchronize(1)
        print(contexts(), torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1) > 0)
        print({entry.device for entry in entries if entry.kind == "kernel"}, torch.cuda.device_count())
        """,
        devices=3,
    )

    assert printed.splitlines() == ["[0, 0, 0]", "[0, 1, 0] 0 True", "{1} 3"]


@pytest.mark.parametrize("visible", ["2,0", "GPU-53,GPU-51", "2,0,9,1"])
def test_a_process_sees_the_devices_that_it_may(visible: str) -> None:
    printed = output(
        f"""
        import os

        os.environ["CUDA_VISIBLE_DEVICES"] = {visible!r}
        import torch

        torch.ones(1, device="cuda")
        print(torch.cuda.device_count(), [str(torch.cuda.get_device_properties(i).uuid) for i in range(2)])
        """,
        devices=4,
    )

    assert printed.startswith("2 ")
    assert printed.index("53545556-") < printed.index("51525354-")


def test_nvml_and_cuda_name_the_same_architecture() -> None:
    major, minor = ctypes.c_int(), ctypes.c_int()

    assert (
        ctypes.CDLL(None).nvmlDeviceGetCudaComputeCapability(None, ctypes.byref(major), ctypes.byref(minor)) == 0
    )
    assert (major.value, minor.value) == torch.cuda.get_device_capability()


def test_a_child_cannot_use_the_gpu_after_its_parent_did() -> None:
    printed = output(
        """
        import os, torch

        torch.ones(1, device="cuda")
        child = os.fork()
        if not child:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(str(error).splitlines()[0], flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        """
    )

    assert "Cannot re-initialize CUDA in forked subprocess" in printed


def test_a_program_that_asks_for_torch_before_it_imports_it() -> None:
    """As transformers does: cuDNN is off all the same, and kernels have values."""
    asks = """
        import importlib.util

        assert importlib.util.find_spec("torch")
        import torch
        print(torch.backends.cudnn.enabled, torch.ones(3, device="cuda").sum().item())
    """
    assert output(asks, numerics=1) == "False 3.0\n"
