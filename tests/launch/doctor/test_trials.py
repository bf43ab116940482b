"""Trials of real tools, and tools that misbehave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from instrument.read.jobs.read import read_file
from instrument.start.doctor import profilers, software, system, trials
from instrument.start.doctor.machine import Machine
from instrument.start.doctor.trials import TorchTrial
from tests.launch.doctor.support import BUSY, install, summary
from tests.support import nsys
from tests.support.programs import ROOT

pytestmark = pytest.mark.vendor


@pytest.fixture(scope="module")
def torch_trial() -> TorchTrial:
    """Run the trial of the real torch once."""
    return Machine().torch


def test_torch_profiler_is_proved(torch_trial: TorchTrial, machine: Machine) -> None:
    """A child records a region with torch.profiler, and the trace contains it."""
    assert ("", True) == (torch_trial.failure, torch_trial.region)
    assert (torch.__version__, torch.version.cuda, torch.version.hip) == (
        torch_trial.version,
        torch_trial.cuda,
        torch_trial.rocm,
    )
    assert torch.cuda.is_available() == bool(torch_trial.gpus) == torch_trial.kernel
    machine.torch = torch_trial
    assert "ok" == profilers.torch_profiler(machine).status
    assert "ok" == software.torch(machine).status


@pytest.mark.gpu
def test_the_kernel_of_a_region_is_proved(torch_trial: TorchTrial, machine: Machine) -> None:
    """On a GPU the trace contains the kernel, inside the region."""
    machine.torch = torch_trial
    assert ("ok", "regions arrive, and the GPU work in them (proved)", "") == summary(
        profilers.torch_profiler(machine)
    )
    assert "ok" == software.gpus(machine).status


def test_the_region_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a trace of a GPU, the region that launched a kernel is found."""
    trace = read_file(ROOT / "tests" / "data" / "gpu_two_steps.json")
    for region, expected in {"attention": True, "optimizer": False}.items():
        monkeypatch.setattr(trials, "REGION", region)
        assert expected == trials.has_kernel(trace)


@pytest.mark.nsys
def test_nsys_is_proved(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of the real nsys contains the region, whatever the settings are; no file is left."""
    nsys.nsys()
    monkeypatch.setenv("INSTRUMENT", "0")
    machine.packages = sys.path
    with nsys.alone():
        check = profilers.nsys(machine)
    assert ("ok", True) == (check.status, check.facts["proved"])
    assert "NVTX ranges arrive (proved); no GPU work" in check.sentence
    assert [] == list(machine.temp.glob("instrument-*"))
    note = profilers.nvtx(machine)
    old = nsys.version() < profilers.NSYS_THAT_ANSWERS
    assert ("note" if old else "ok") == note.status
    assert old == ("plain nvtx.annotate loses its ranges" in note.sentence)


@pytest.mark.nsys
def test_lost_ranges_are_found(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the real nsys does not record ranges, their loss is a problem."""
    real = nsys.nsys()
    (tmp_path / "nsys").write_text(
        f'#!/bin/sh\nshift\n[ $# = 0 ] && exec {real} --version\nexec env INSTRUMENT=0 {real} profile "$@"\n'
    )
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with nsys.alone():
        check = profilers.nsys(machine)
    assert "problem" == check.status
    assert "ranges are lost with nvtx missing" in check.sentence
    assert "nsys 2024.3" in check.fix


@pytest.mark.parametrize(
    "script, sentence, fix",
    [
        (
            "echo Illegal instruction; exit 132",
            "nsys profile ended with code 132: Illegal instruction",
            "shows the error",
        ),
        ("kill -KILL $$", "nsys profile was killed by SIGKILL", "shows the error"),
        ("exit 0", "nsys profile wrote no report.sqlite, but nothing", "shows the error"),
        ('touch "$7.qdstrm"', "nsys profile wrote no report.sqlite, but report.qdstrm", "importer"),
        ('echo no database > "$7.sqlite"', "report.sqlite: damaged database", "shows the error"),
        ('touch "$7.sqlite"', "it is empty", "shows the error"),
        ("printf 'a\\033[31mb\\rlast \\377\\n'; exit 1", "ended with code 1: last \ufffd", "shows the error"),
    ],
)
def test_nsys_that_fails(
    machine: Machine, tools: Callable[..., Path], script: str, sentence: str, fix: str
) -> None:
    """Any failure of nsys is a problem, with its last line of output."""
    tools("nsys", script)
    check = profilers.nsys(machine)
    assert "problem" == check.status
    assert check.sentence.startswith("2023.4.1.97: ")
    assert sentence in check.sentence
    assert fix in check.fix
    assert [] == list(machine.temp.glob("instrument-*"))


@pytest.mark.parametrize(
    "script",
    ["sleep 600 & {} wait", "trap '' TERM; sleep 600 & {} sleep 600", "(trap '' TERM; sleep 600) & {} wait"],
    ids=["ends", "ignores SIGTERM", "leaves one that ignores SIGTERM"],
)
def test_nsys_that_hangs(
    machine: Machine, tools: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """A hanging nsys is ended after the limit, with the processes that it started."""
    monkeypatch.setattr(trials, "_GRACE_S", 0.2)
    pids = machine.temp / "pids"
    tools("nsys", f"echo Collecting; {script.format(f'echo $! $$ > {pids};')}")
    machine.limit_s = 2
    check = profilers.nsys(machine)
    assert ("problem", "2023.4.1.97: nsys profile did not end in time: Collecting") == summary(check)[:2]
    assert "nsys shutdown" in check.fix
    for pid in map(int, pids.read_text().split()):
        tries = 100
        while running(pid) and tries:  # killing them takes the system a moment
            time.sleep(0.05)
            tries -= 1
        assert tries


def running(pid: int) -> bool:
    with suppress(OSError):
        return "Z" != Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


def test_nsys_that_cannot_be_started(machine: Machine, tools: Callable[..., Path]) -> None:
    """A file that cannot be executed is a problem."""
    tools("nsys").write_text("#!/nowhere\n")
    check = profilers.nsys(machine)
    assert "problem" == check.status
    assert check.sentence.startswith("of unknown version: ")


def test_no_trial_of_nsys_under_nsys(
    machine: Machine, tools: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a profiler, the check names that profiler and does not start nsys."""
    started = machine.temp / "started"
    tools("nsys", f"touch {started}")
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    check = profilers.nsys(machine)
    assert ("note", "2023.4.1.97; not proved, as Nsight Systems records this process", "") == summary(check)
    install(machine, "nvtx", "0.2.12")
    assert "plain nvtx.annotate loses its ranges" in profilers.nvtx(machine).sentence
    assert ("note", "Nsight Systems records this process", "") == summary(profilers.active_profiler(machine))
    assert not started.exists()


@pytest.mark.parametrize(
    "source, failure",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "import torch was killed by SIGSEGV"),
        ("import time; time.sleep(600)", "import torch did not end in time"),
        ("__version__ = '2.6.0'", "import torch ended with code 1: AttributeError: module 'torch' has no"),
    ],
)
def test_torch_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, failure: str) -> None:
    """A torch that crashes or hangs ends a child, not the doctor."""
    monkeypatch.setattr(trials, "_GRACE_S", 0.2)
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    machine = Machine(temp=tmp_path, limit_s=0.5 if "sleep" in source else 60)
    check = software.torch(machine)
    assert "problem" == check.status
    assert failure in check.sentence
    assert "import torch" in check.fix
    assert "note" == profilers.torch_profiler(machine).status
    assert [] == list(tmp_path.glob("instrument-*"))


def test_a_trial_that_cannot_write_files(machine: Machine, tools: Callable[..., Path]) -> None:
    """If no file can be written, that is the reported failure."""
    tools("nsys")
    (machine.root / "file").touch()
    unwritable = Machine(temp=machine.root / "file", packages=[])
    assert "Not a directory" in profilers.nsys(unwritable).sentence
    assert "absent" == software.torch(unwritable).status
    assert summary(system.temp_folder(unwritable))[:2] == (
        "problem",
        f"{machine.root / 'file'} cannot be written to: Not a directory",
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{BUSY}\nCompile with `TORCH_USE_CUDA_DSA`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
    ],
)
def test_a_gpu_that_cannot_be_used_now(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """If the GPU is full or busy, the trial runs on the CPU, and the GPU is not touched again."""

    def ones(*size: int, device: str = "cpu") -> torch.Tensor:
        if device == "cuda":
            raise error
        return torch.full(size, 1.0)

    def fail() -> None:
        raise AssertionError("the GPU was touched")

    activities = torch.profiler.ProfilerActivity
    for module in (torch.autograd, torch.autograd.profiler):
        monkeypatch.setattr(module, "_supported_activities", lambda: {activities.CPU, activities.CUDA})
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda number: "H100",
        "synchronize": fail, "_lazy_init": fail,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "ones", ones)
    trials.record_torch(tmp_path)
    facts = json.loads((tmp_path / trials.FACTS).read_text())
    first_line = str(error).partition("\n")[0]
    assert (["H100", "H100"], first_line, True) == (facts["gpus"], facts["why_no_gpu"], facts.pop("recorded"))
    assert trials.REGION in read_file(tmp_path / trials.TRACE).regions.text("name")
    machine.torch = TorchTrial(**facts, region=True)
    for check in (software.gpus(machine), profilers.torch_profiler(machine)):
        assert "note" == check.status
        assert first_line in check.sentence
        assert "CUDA_VISIBLE_DEVICES=1" in check.fix


@pytest.mark.gpu
def test_a_full_gpu() -> None:
    """Too little free GPU memory for the child is not reported as a problem of torch.profiler."""
    torch.ones(1, device="cuda")
    tensors = []
    for size in (1 << 30, 1 << 24, 1 << 21):
        with suppress(torch.OutOfMemoryError):
            while True:
                tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        trial = Machine().torch
    finally:
        tensors.clear()
        torch.cuda.empty_cache()
    assert "" == trial.failure
    assert trial.region
    assert "memory" in trial.why_no_gpu
