"""Checks of the profilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from instrument.record.regions import tool_emitters
from instrument.start.doctor import profilers
from instrument.start.doctor.machine import Machine
from instrument.start.doctor.trials import NsysTrial, TorchTrial
from tests.launch.doctor.support import CPU, CUDA, ROCM, install, put, summary
from tests.support import native

pytestmark = pytest.mark.vendor


@pytest.mark.parametrize(
    "trial, holder, expected",
    [
        (CUDA, "", ("ok", "the GPU work in them (proved)")),
        (TorchTrial(version="2.13.0", cuda="13.0", gpus=("H100",), region=True), "", ("problem", "does not")),
        (
            TorchTrial(version="2.13.0", cuda="13.0", gpus=("H100",), region=True),
            "lib.so",
            ("note", "CPU only"),
        ),
        (TorchTrial(version="2.13.0"), "", ("problem", "regions are lost")),
        (
            TorchTrial(version="2.13.0", failure="recording a region was killed by SIGSEGV"),
            "",
            ("problem", "SIGSEGV"),
        ),
    ],
)
def test_torch_profiler(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, trial: TorchTrial, holder: str, expected: tuple[str, str]
) -> None:
    """Lost regions and GPU work are reported, and so is another tool that uses the GPU's tracing interface."""
    machine.torch = trial
    if holder:
        monkeypatch.setenv("CUDA_INJECTION64_PATH", holder)
        assert "holds the GPU's only tracing interface" in profilers.active_profiler(machine).sentence
    check = profilers.torch_profiler(machine)
    assert expected[0] == check.status
    assert expected[1] in check.sentence


@pytest.mark.parametrize(
    "version, nvtx, trial, expected",
    [
        ("2024.2.3", "0.2.12", NsysTrial(region=True), "note"),
        ("2024.2.3", "0.2.11", NsysTrial(region=True, plain=True), "ok"),
        ("2024.6.1", "0.2.17", NsysTrial(region=True, plain=True), "ok"),
        ("2024.2.3", "0.2.12", NsysTrial(failure="x"), "note"),
        ("2024.6.1", "0.2.12", NsysTrial(failure="x"), "ok"),
        ("2024.2.3", "0.2.11", NsysTrial(failure="x"), "ok"),
        ("none", "0.2.17", NsysTrial(failure="x"), "ok"),
        ("2024.6.1", "", NsysTrial(), "problem"),
    ],
)
def test_pairs_of_nsys_and_nvtx(
    machine: Machine, tools: Callable[..., Path], version: str, nvtx: str, trial: NsysTrial, expected: str
) -> None:
    """The trial decides; without a trial, the versions decide."""
    tools("nsys", version=version)
    machine.nsys = trial
    if nvtx:
        install(machine, "nvtx", nvtx)
    check = profilers.nvtx(machine)
    assert expected == check.status
    assert bool(check.fix) == (expected != "ok")


def test_ncu(machine: Machine, tools: Callable[..., Path]) -> None:
    """Without an NVIDIA GPU, Nsight Compute records nothing."""
    tools("ncu", version="Version 2025.1.0.0 (build 35237751)")
    assert ("note", "2025.1.0.0: records nothing, as there is no NVIDIA GPU", "") == summary(
        profilers.ncu(machine)
    )
    put(machine, "dev/nvidiactl")
    assert "ok" == profilers.ncu(machine).status


@pytest.fixture(scope="module")
def roctx_library() -> str:
    """Build the library before a test removes the compiler from PATH."""
    return str(native.build("roctxlog", 'LIBRARY_NAME="libroctx64.so"'))


@pytest.mark.native
def test_rocprof(
    roctx_library: str, machine: Machine, tools: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rocTX library loads; without it rocprofv3 loses regions."""
    monkeypatch.setattr(tool_emitters, "ROCTX_LIBRARIES", (roctx_library,))
    assert ("absent", True) == (profilers.rocprof(machine).status, profilers.rocprof(machine).facts["roctx"])
    tools("rocprofv3", version="version: 1.0.0")
    machine = Machine(root=machine.root)
    machine.torch = CPU
    assert "1.0.0: the rocTX library loads; no GPU work" in profilers.rocprof(machine).sentence
    machine.torch = ROCM
    assert ("ok", "1.0.0: the rocTX library loads; HIP calls and kernels; ranges are not proved", "") == summary(
        profilers.rocprof(machine)
    )
    monkeypatch.setattr(tool_emitters, "ROCTX_LIBRARIES", ("libroctx-of-nobody.so",))
    check = profilers.rocprof(machine)
    assert "problem" == check.status
    assert "regions are lost, as no rocTX library is found" in check.sentence
    assert "rocprofiler-sdk-roctx" in check.fix


def test_vtune(machine: Machine, tools: Callable[..., Path]) -> None:
    """VTune without ittapi loses regions."""
    assert ("absent", "not installed; ittapi is missing", "") == summary(profilers.vtune(machine))
    tools("vtune", version="Intel(R) VTune(TM) Profiler 2025.0.1 (build 629235)")
    machine = Machine(root=machine.root, temp=machine.temp, packages=[])
    assert ("problem", "2025.0.1: regions are lost, as ittapi is missing", "pip install ittapi") == summary(
        profilers.vtune(machine)
    )
    install(machine, "ittapi", "1.2.2")
    assert ("ok", "2025.0.1: regions as ITT tasks, ittapi 1.2.2 is installed; not proved", "") == summary(
        profilers.vtune(machine)
    )
