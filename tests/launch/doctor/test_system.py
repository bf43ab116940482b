"""Checks of permissions, disk space and the environment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from instrument.start.doctor import system
from instrument.start.doctor.machine import ADMIN, PTRACE, Machine
from tests.launch.doctor.support import capabilities, install, put, summary

pytestmark = pytest.mark.vendor


@pytest.mark.parametrize(
    "level, bits, container, seccomp, expected",
    [
        (2, (), False, 0, "ok"),
        (-1, (), False, 0, "ok"),
        (3, (), False, 0, "note"),
        (4, (ADMIN,), True, 2, "ok"),
        (2, (), True, 2, "note"),
        (2, (), True, 0, "ok"),
    ],
)
def test_cpu_sampling(
    machine: Machine,
    tools: Callable[..., Path],
    level: int,
    bits: tuple[int, ...],
    container: bool,
    seccomp: int,
    expected: str,
) -> None:
    """The kernel's level, the user's capabilities and a container's filter decide."""
    put(machine, "proc/sys/kernel/perf_event_paranoid", f"{level}\n")
    capabilities(machine, *bits, seccomp=seccomp)
    if container:
        put(machine, ".dockerenv")
    assert system.cpu_sampling(machine) is None  # no tool that samples
    tools("nsys")
    check = system.cpu_sampling(Machine(root=machine.root))
    assert check is not None
    assert expected == check.status
    assert bool(check.fix) == (expected == "note")


@pytest.mark.parametrize(
    "text, bits, ncu, expected",
    [
        ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n", (), True, "problem"),
        ("RmProfilingAdminOnly: 1\n", (), False, "note"),
        ("RmProfilingAdminOnly: 1\n", (ADMIN,), True, "ok"),
        ("RmProfilingAdminOnly: 0\n", (), True, "ok"),
    ],
)
def test_gpu_counters(
    machine: Machine, tools: Callable[..., Path], text: str, bits: tuple[int, ...], ncu: bool, expected: str
) -> None:
    """Counters that only administrators may read are a problem for ncu."""
    assert system.gpu_counters(machine) is None
    put(machine, "proc/driver/nvidia/params", text)
    capabilities(machine, *bits)
    if ncu:
        tools("ncu")
    check = system.gpu_counters(machine)
    assert check is not None
    assert expected == check.status
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in check.fix) == (expected != "ok")


@pytest.mark.parametrize(
    "scope, bits, expected",
    [(0, (), "ok"), (1, (), "problem"), (1, (PTRACE,), "ok"), (3, (PTRACE,), "problem")],
)
def test_ptrace(
    machine: Machine, tools: Callable[..., Path], scope: int, bits: tuple[int, ...], expected: str
) -> None:
    """VTune needs to attach to the programs that it samples."""
    put(machine, "proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    capabilities(machine, *bits)
    tools("vtune")
    check = system.ptrace(machine)
    assert check is not None
    assert expected == check.status


@pytest.mark.parametrize("free, expected", [(20 << 30, "ok"), (1 << 30, "note"), (50 << 20, "problem")])
def test_free_space(machine: Machine, monkeypatch: pytest.MonkeyPatch, free: int, expected: str) -> None:
    """Little free space is reported before it runs out."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, free))
    for check in (system.temp_folder(machine), system.out_folder(machine)):
        assert (expected, free) == (check.status, check.facts["free_bytes"])
        assert bool(check.fix) == (expected != "ok")


def test_the_folder_for_traces(machine: Machine, tmp_path: Path) -> None:
    """For a missing folder its parent is checked; a file in its place is a problem."""
    machine.out = tmp_path / "not" / "there"
    check = system.out_folder(machine)
    assert check.sentence.startswith(f"{machine.out}, ")
    assert not machine.out.parent.exists()
    (tmp_path / "file").touch()
    machine.out = tmp_path / "file" / "runs"
    assert "problem" == system.out_folder(machine).status


def test_shared_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's default size is too small."""
    assert system.shared_memory(machine) is None
    (machine.root / "dev/shm").mkdir(parents=True)
    put(machine, ".dockerenv")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, 64 << 20))
    status, sentence, fix = summary(system.shared_memory(machine))
    assert ("note", "docker run --shm-size=8g") == (status, fix)
    assert "64 MiB free: little for the workers of a DataLoader" in sentence


@pytest.mark.parametrize(
    "value, expected",
    [({}, "ok"), ({"INSTRUMENT": "0"}, "problem"), ({"INSTRUMENT": "off"}, "problem"), ({"INSTRUMENT": "1"}, "ok"),
     ({"INSTRUMENT_EMITTERS": "nsys"}, "problem"), ({"INSTRUMENT_EMITTERS": "torch"}, "note"),
     ({"INSTRUMENT_EMITTERS": "auto"}, "ok"), ({"INSTRUMENT_EMITTERS": ""}, "ok")],
)  # fmt: skip
def test_settings(machine: Machine, monkeypatch: pytest.MonkeyPatch, value: dict[str, str], expected: str) -> None:
    """A setting that turns regions off is a problem; one that selects emitters is a note."""
    for name, text in value.items():
        monkeypatch.setenv(name, text)
    check = system.settings(machine)
    assert expected == check.status
    assert ("unset" in check.fix) == (expected != "ok")


def test_injected_libraries(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library, and an ITT collector without ittapi, lose regions."""
    assert system.injected_libraries(machine) is None
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "./.")
    assert system.injected_libraries(machine) is None
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(tmp_path / "gone.so"))
    status, sentence, fix = summary(system.injected_libraries(machine))
    assert ("problem", "unset NVTX_INJECTION64_PATH") == (status, fix)
    assert str(tmp_path / "gone.so") in sentence
    monkeypatch.delenv("NVTX_INJECTION64_PATH")
    monkeypatch.setenv("INTEL_LIBITTNOTIFY64", "libittnotify_collector.so")
    assert "pip install ittapi" == summary(system.injected_libraries(machine))[2]
    install(machine, "ittapi", "1.2.2")
    assert "ok" == summary(system.injected_libraries(machine))[0]


def test_interfering_settings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other profilers in the environment are named, with how to remove them."""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert system.interfering_settings(machine) is None
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2:/opt/rocm/lib/librocprofiler-sdk-tool.so")
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    status, sentence, fix = summary(system.interfering_settings(machine))
    assert ("note", "unset KINETO_USE_DAEMON LD_PRELOAD") == (status, fix)
    assert "loads librocprofiler-sdk-tool.so into every program" in sentence
    assert "jemalloc" not in sentence
    monkeypatch.setenv("ROCP_TOOL_LIBRARIES", "librocprofiler-sdk-tool.so")
    assert "unset KINETO_USE_DAEMON" == summary(system.interfering_settings(machine))[2]
