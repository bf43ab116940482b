"""The doctor: what it proves with real tools, what it finds wrong, and that nothing it looks at stops it."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from instrument.launch.doctor import (
    child,
    gpus,
    permissions,
    probe,
    profilers,
    proofs,
    settings,
    software,
    viewers,
)
from instrument.launch.doctor.check import Check, Status
from instrument.launch.doctor.examine import SECTIONS, Examined, examine
from instrument.launch.doctor.machine import ADMIN, PTRACE, Machine
from instrument.launch.doctor.page import numbers, render
from instrument.launch.doctor.proofs import NsysProof, TorchProof
from instrument.regions.emitters import roctx
from instrument.traces.read import read_file
from tests.support import native, nsys
from tests.support.programs import ROOT, TOOL_VARIABLES

GUIDE = (ROOT / "docs" / "doctor.md").read_text()
VERSION = "NVIDIA Nsight Systems version 2023.4.1.97"
CPU = TorchProof(version="2.13.0+cpu", region=True)
CUDA = TorchProof(version="2.13.0+cu130", cuda="13.0", gpus=("H100",), region=True, kernel=True)
ROCM = TorchProof(version="2.13.0+rocm7.0", rocm="7.0", gpus=("MI300X",), region=True, kernel=True)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool and no setting of the machine that the tests run on, but for what a test sets."""
    for name in list(os.environ):
        if name.startswith((*TOOL_VARIABLES, "KINETO_", "LD_PRELOAD", "CUDA_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with an empty system, no packages, and a torch for the CPU."""
    (tmp_path / "root").mkdir()
    made = Machine(root=tmp_path / "root", temp=tmp_path, out=tmp_path / "runs", packages=[], limit_s=30)
    made.torch = CPU
    return made


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes PATH hold nothing but the tools that a test writes as shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "touch", "kill", "env"):
        (folder / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, script: str = "", version: str = VERSION) -> Path:
        path = folder / name
        # $5 to $7 of `nsys profile` are --export=sqlite --output FILE
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{version}"; exit; }}\n{script}\n')
        path.chmod(0o755)
        return path

    return write


def put(machine: Machine, path: str, text: str = "") -> None:
    """Write a file of the system."""
    file = machine.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def install(machine: Machine, name: str, version: str) -> None:
    """Write what pip leaves of a package."""
    site = machine.root / "site"
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    machine.packages = [str(site)]


def capabilities(machine: Machine, *bits: int, seccomp: int = 0) -> None:
    effective = sum(1 << bit for bit in bits)
    put(machine, "proc/self/status", f"Name:\tx\nCapEff:\t{effective:016x}\nSeccomp:\t{seccomp}\n")


def brief(check: Check | None) -> tuple[str, str, str]:
    assert check is not None
    return check.status, check.sentence, check.cure


# Proved with the real thing


@pytest.fixture(scope="module")
def proved() -> TorchProof:
    """The real torch, examined once."""
    return Machine().torch


def test_torch_profiler_is_proved(proved: TorchProof, machine: Machine) -> None:
    """A child records a region with torch.profiler, which is found in the trace."""
    assert ("", True) == (proved.failure, proved.region)
    assert (torch.__version__, torch.version.cuda, torch.version.hip) == (proved.version, proved.cuda, proved.rocm)
    assert torch.cuda.is_available() == bool(proved.gpus) == proved.kernel
    machine.torch = proved
    assert "ok" == profilers.torch_profiler(machine).status
    assert "ok" == software.torch(machine).status


@pytest.mark.gpu
def test_the_kernel_of_a_region_is_proved(proved: TorchProof, machine: Machine) -> None:
    """On a GPU the kernel is in the trace, and is the region's."""
    machine.torch = proved
    assert ("ok", "regions arrive, and the GPU work in them (proved)", "") == brief(
        profilers.torch_profiler(machine)
    )
    assert "ok" == gpus.gpus(machine).status


def test_the_region_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a trace of a GPU it is told which region launched a kernel."""
    trace = read_file(ROOT / "tests" / "data" / "gpu_two_steps.json")
    for region, expected in {"attention": True, "optimizer": False}.items():
        monkeypatch.setattr(probe, "REGION", region)
        assert expected == proofs._kernel(trace)


@pytest.mark.nsys
def test_nsys_is_proved(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A region is recorded by the real nsys and found in its report, whatever is set here; nothing is left."""
    nsys.nsys()
    monkeypatch.setenv("INSTRUMENT", "0")
    machine.packages = sys.path
    with nsys.alone():
        check = profilers.nsys(machine)
    assert ("ok", True) == (check.status, check.facts["proved"])
    assert "NVTX ranges arrive (proved); no GPU work" in check.sentence
    assert [] == list(machine.temp.glob("instrument-*"))
    note = profilers.nvtx(machine)
    old = nsys.version() < profilers.ANSWERING_NSYS
    assert ("note" if old else "ok") == note.status
    assert old == ("plain nvtx.annotate loses its ranges" in note.sentence)


@pytest.mark.nsys
def test_lost_ranges_are_found(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the real nsys is kept from recording ranges, their loss is a problem."""
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
    assert "nsys 2024.3" in check.cure


@pytest.mark.nsys
def test_the_command(tmp_path: Path) -> None:
    """Here everything that is installed records: exit code 0, and each check is in the JSON."""
    nsys.nsys()
    with nsys.alone():
        done = command("--json", "--out", str(tmp_path / "runs"))
    assert (0, "") == (done.returncode, done.stderr)
    printed = json.loads(done.stdout)
    assert 0 == printed["problems"]
    checks = {check["name"]: check for check in printed["checks"]}
    assert checks["torch.profiler"]["facts"]["proved"]
    assert checks["nsys"]["facts"]["proved"]
    assert {"section", "name", "status", "sentence", "cure", "facts"} == set(checks["nsys"])


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", "doctor", *args],
        capture_output=True, text=True, timeout=300, env={**os.environ, **env},
    )  # fmt: skip


def test_files_of_the_current_folder_do_not_run(tmp_path: Path, tools: Callable[..., Path]) -> None:
    """Files in the current folder that are named as modules are not imported, by no command and no child of it."""
    tools("nsys", 'shift 7; exec "$@"')
    hostile = tmp_path / "here"
    (hostile / "instrument").mkdir(parents=True)
    names = ("torch", "json", "numpy", "rich", "msgspec", "sqlite3", "typer", "nvtx", "instrument/__init__")
    for name in names:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10)); raise SystemExit(3)"
        (hostile / f"{name}.py").write_text(text)
    for rank in range(4):
        shutil.copy(ROOT / "tests" / "data" / "gpu_two_steps.json", hostile / f"rank{rank}.json")
    script = [str(Path(sys.executable).with_name("instrument"))]
    for program in (script, [sys.executable, "-m", "instrument"]):
        for arguments in (["doctor"], ["summarize", "."], ["syncs", "rank0.json"], ["run", "--help"]):
            done = subprocess.run([*program, *arguments], cwd=hostile, capture_output=True, text=True, timeout=300)
            assert not (tmp_path / "ran").exists(), (arguments, (tmp_path / "ran").read_text())
            assert done.returncode in (0, 1), done.stderr
        shutil.rmtree(hostile / "instrument", ignore_errors=True)  # of which "python -m" makes its own choice


def test_a_machine_where_all_is_broken(tmp_path: Path, tools: Callable[..., Path]) -> None:
    """The page is whole, plain text where it is piped, and the exit code tells; so does a wrong option."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    tools("nsys", "echo No license; exit 3")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command(PYTHONPATH=path, INSTRUMENT_EMITTERS="nsys", COLUMNS="80")
    assert 1 == done.returncode
    assert "\x1b" not in done.stdout
    text = " ".join(done.stdout.split())
    assert "PROBLEM torch" in text
    assert "import torch ended with code 1: ImportError: libcudart.so.13: cannot open" in text
    assert "PROBLEM nsys 2023.4.1.97: nsys profile ended with code 3: No license" in text
    assert "PROBLEM settings INSTRUMENT_EMITTERS is ignored" in text
    assert re.search(r"\n3 problems.*\.\n$", done.stdout)
    assert 2 == command("--nonsense").returncode


# Tools that misbehave


@pytest.mark.parametrize(
    "script, sentence, cure",
    [
        (
            "echo Illegal instruction; exit 132",
            "nsys profile ended with code 132: Illegal instruction",
            "see what",
        ),
        ("kill -KILL $$", "nsys profile died of SIGKILL", "see what"),
        ("exit 0", "nsys profile left no report.sqlite but nothing", "see what"),
        ('touch "$7.qdstrm"', "nsys profile left no report.sqlite but report.qdstrm", "importer"),
        ('echo no database > "$7.sqlite"', "cannot read the trace", "see what"),
        ('touch "$7.sqlite"', "it is empty", "see what"),
        ("printf 'a\\033[31mb\\rlast \\377\\n'; exit 1", "ended with code 1: last \ufffd", "see what"),
    ],
)
def test_nsys_that_fails(
    machine: Machine, tools: Callable[..., Path], script: str, sentence: str, cure: str
) -> None:
    """Whatever nsys does is a finding, with what it said last."""
    tools("nsys", script)
    check = profilers.nsys(machine)
    assert "problem" == check.status
    assert check.sentence.startswith("2023.4.1.97: ")
    assert sentence in check.sentence
    assert cure in check.cure
    assert [] == list(machine.temp.glob("instrument-*"))


@pytest.mark.parametrize(
    "script",
    ["sleep 600 & {} wait", "trap '' TERM; sleep 600 & {} sleep 600", "(trap '' TERM; sleep 600) & {} wait"],
    ids=["ends", "ignores SIGTERM", "leaves one that ignores SIGTERM"],
)
def test_nsys_that_hangs(
    machine: Machine, tools: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """It is ended, with what it started, after the limit."""
    monkeypatch.setattr(child, "_GRACE_S", 0.2)
    pids = machine.temp / "pids"
    tools("nsys", f"echo Collecting; {script.format(f'echo $! $$ > {pids};')}")
    machine.limit_s = 2
    check = profilers.nsys(machine)
    assert ("problem", "2023.4.1.97: nsys profile did not end in time: Collecting") == brief(check)[:2]
    assert "nsys shutdown" in check.cure
    for pid in map(int, pids.read_text().split()):
        tries = 100
        while running(pid) and tries:  # they were killed, which takes the system a moment
            time.sleep(0.05)
            tries -= 1
        assert tries


def running(pid: int) -> bool:
    with suppress(OSError):
        return "Z" != Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


def test_nsys_that_cannot_be_started(machine: Machine, tools: Callable[..., Path]) -> None:
    """A file that is no program is a finding, too."""
    tools("nsys").write_text("#!/nowhere\n")
    check = profilers.nsys(machine)
    assert "problem" == check.status
    assert check.sentence.startswith("of unknown version: ")


def test_no_nsys_inside_of_nsys(
    machine: Machine, tools: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a profiler it says which, and starts no other one."""
    started = machine.temp / "started"
    tools("nsys", f"touch {started}")
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    check = profilers.nsys(machine)
    assert ("note", "2023.4.1.97; not proved, as Nsight Systems records this process", "") == brief(check)
    install(machine, "nvtx", "0.2.12")
    assert "plain nvtx.annotate loses its ranges" in profilers.nvtx(machine).sentence
    assert ("note", "Nsight Systems records this process", "") == brief(profilers.now(machine))
    assert not started.exists()


@pytest.mark.parametrize(
    "source, failure",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "import torch died of SIGSEGV"),
        ("import time; time.sleep(600)", "import torch did not end in time"),
        ("__version__ = '2.6.0'", "import torch ended with code 1: AttributeError: module 'torch' has no"),
    ],
)
def test_torch_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, failure: str) -> None:
    """A torch that crashes or hangs takes a child with it, not the doctor."""
    monkeypatch.setattr(child, "_GRACE_S", 0.2)
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    machine = Machine(temp=tmp_path, limit_s=0.5 if "sleep" in source else 60)
    check = software.torch(machine)
    assert "problem" == check.status
    assert failure in check.sentence
    assert "import torch" in check.cure
    assert "note" == profilers.torch_profiler(machine).status
    assert [] == list(tmp_path.glob("instrument-*"))


def test_no_room_for_a_proof(machine: Machine, tools: Callable[..., Path]) -> None:
    """Where nothing can be written, that is why nothing is proved."""
    tools("nsys")
    (machine.root / "file").touch()
    unwritable = Machine(temp=machine.root / "file", packages=[])
    assert "Not a directory" in profilers.nsys(unwritable).sentence
    assert "problem" == software.torch(unwritable).status
    assert brief(permissions.temp_folder(unwritable))[:2] == (
        "problem",
        f"{machine.root / 'file'} cannot be written to: Not a directory",
    )


def test_one_look_stops_no_other(machine: Machine) -> None:
    """One that raises is told as such, with its name; Ctrl-C is not held up."""

    def broken(machine: Machine) -> Check:
        raise ZeroDivisionError("oh")

    def interrupted(machine: Machine) -> Check:
        raise KeyboardInterrupt

    looks = {"first": broken, "silent": lambda machine: None, "last": lambda machine: Check("ok", "fine")}
    first, last = examine(machine, {"section": looks})
    assert ("section", "first", "problem") == (first.section, first.name, first.check.status)
    assert "not examined: ZeroDivisionError: oh" == first.check.sentence
    assert ("last", "fine") == (last.name, last.check.sentence)
    with pytest.raises(KeyboardInterrupt):
        list(examine(machine, {"section": {"looked": interrupted}}))


# What is installed, and fits or does not


def test_nothing_installed(machine: Machine, tools: Callable[..., Path]) -> None:
    """What is absent is no problem, but for torch."""
    machine.torch = TorchProof(failure="import torch ended with code 1")
    machine.viewer = "http://127.0.0.1:1"
    statuses = {item.name: item.check.status for item in examine(machine)}
    assert ["torch"] == [name for name, status in statuses.items() if status == "problem"]
    absent = {name for name, status in statuses.items() if status == "absent"}
    assert {"GPU", "frameworks", "nsys", "nvtx", "ncu", "rocprof", "vtune", "TensorBoard"} == absent
    assert "pip install torch" in software.torch(machine).cure


@pytest.mark.parametrize(
    "proof, status, words",
    [
        (CPU, "ok", "2.13.0+cpu, built for the CPU"),
        (CUDA, "ok", "built for CUDA 13.0"),
        (ROCM, "note", "torch.cuda.profiler.start() does nothing"),
        (TorchProof(version="2.5.1"), "problem", "older than 2.6"),
        (TorchProof(version="2.10.0a0+git1"), "ok", "2.10.0a0+git1"),
    ],
)
def test_torch(machine: Machine, proof: TorchProof, status: Status, words: str) -> None:
    """Its build and its age are looked at."""
    machine.torch = proof
    check = software.torch(machine)
    assert status == check.status
    assert words in check.sentence


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
FULL = TorchProof(version="2.13.0+cu130", cuda="13.0", gpus=("H100",) * 2, why_no_gpu=BUSY, region=True)


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
    """As it is full or busy: the proof is made on the CPU, and the GPU is not touched again."""

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
    probe.examine_torch(tmp_path)
    facts = json.loads((tmp_path / probe.FACTS).read_text())
    said = str(error).partition("\n")[0]
    assert (["H100", "H100"], said, True) == (facts["gpus"], facts["why_no_gpu"], facts.pop("recorded"))
    assert probe.REGION in read_file(tmp_path / probe.TRACE).regions.text("name")
    machine.torch = TorchProof(**facts, region=True)
    for check in (gpus.gpus(machine), profilers.torch_profiler(machine)):
        assert "note" == check.status
        assert said in check.sentence
        assert "CUDA_VISIBLE_DEVICES=1" in check.cure


@pytest.mark.gpu
def test_a_full_gpu() -> None:
    """With next to no memory left for the child, it is not torch.profiler that is to blame."""
    torch.ones(1, device="cuda")
    held = []
    for size in (1 << 30, 1 << 24, 1 << 21):
        with suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        proof = Machine().torch
    finally:
        held.clear()
        torch.cuda.empty_cache()
    assert "" == proof.failure
    assert proof.region
    assert "memory" in proof.why_no_gpu


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@x)"
NO_CUDA = TorchProof(version="2.13.0+cu130", cuda="13.0", why_no_gpu="The NVIDIA driver is too old")


@pytest.mark.parametrize(
    "device, proof, env, expected",
    [
        ("dev/nvidiactl", CUDA, {}, ("ok", "H100, NVIDIA driver 570.124.06")),
        ("dev/nvidiactl", CPU, {}, ("problem", "torch is built without CUDA")),
        ("dev/nvidiactl", FULL, {}, ("note", "2 x H100, NVIDIA driver 570.124.06; the first cannot be used now")),
        ("dev/nvidiactl", NO_CUDA, {}, ("problem", "torch cannot use it: The NVIDIA driver is too old")),
        ("dev/nvidiactl", NO_CUDA, {"CUDA_VISIBLE_DEVICES": ""}, ("note", "hidden by CUDA_VISIBLE_DEVICES")),
        ("dev/nvidiactl", TorchProof(failure="x"), {}, ("note", "not examined")),
        ("dev/null", NO_CUDA, {}, ("note", "none that can be opened from here")),
        ("dev/kfd", CPU, {}, ("note", "torch is built without ROCm")),
        ("dev/kfd", TorchProof(version="2.13.0", rocm="7.0"), {}, ("problem", "torch cannot use it")),
    ],
)
def test_gpus(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    proof: TorchProof,
    env: dict[str, str],
    expected: tuple[str, str],
) -> None:
    """A GPU that torch does not use is told, with why."""
    put(machine, device)
    put(machine, "proc/driver/nvidia/version", DRIVER)
    machine.torch = proof
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    check = gpus.gpus(machine)
    assert expected[0] == check.status
    assert expected[1] in check.sentence
    assert ("problem" != check.status) or check.cure


def test_many_gpus(machine: Machine) -> None:
    """Equal ones are counted."""
    machine.torch = TorchProof(version="2.13.0", cuda="13.0", gpus=("H100",) * 8 + ("T4",))
    assert "8 x H100, T4" == gpus.gpus(machine).sentence


@pytest.mark.parametrize(
    "proof, holder, expected",
    [
        (CUDA, "", ("ok", "the GPU work in them (proved)")),
        (TorchProof(version="2.13.0", cuda="13.0", gpus=("H100",), region=True), "", ("problem", "does not")),
        (
            TorchProof(version="2.13.0", cuda="13.0", gpus=("H100",), region=True),
            "lib.so",
            ("note", "CPU only"),
        ),
        (TorchProof(version="2.13.0"), "", ("problem", "regions are lost")),
        (TorchProof(version="2.13.0", failure="recording a region died of SIGSEGV"), "", ("problem", "SIGSEGV")),
    ],
)
def test_torch_profiler(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, proof: TorchProof, holder: str, expected: tuple[str, str]
) -> None:
    """What is lost is told, and where another tool has the GPU, that."""
    machine.torch = proof
    if holder:
        monkeypatch.setenv("CUDA_INJECTION64_PATH", holder)
        assert "holds the GPU's one tracing interface" in profilers.now(machine).sentence
    check = profilers.torch_profiler(machine)
    assert expected[0] == check.status
    assert expected[1] in check.sentence


@pytest.mark.parametrize(
    "version, nvtx, proof, expected",
    [
        ("2024.2.3", "0.2.12", NsysProof(region=True), "note"),
        ("2024.2.3", "0.2.11", NsysProof(region=True, plain=True), "ok"),
        ("2024.6.1", "0.2.17", NsysProof(region=True, plain=True), "ok"),
        ("2024.2.3", "0.2.12", NsysProof(failure="x"), "note"),
        ("2024.6.1", "0.2.12", NsysProof(failure="x"), "ok"),
        ("2024.2.3", "0.2.11", NsysProof(failure="x"), "ok"),
        ("none", "0.2.17", NsysProof(failure="x"), "ok"),
        ("2024.6.1", "", NsysProof(), "problem"),
    ],
)
def test_pairs_of_nsys_and_nvtx(
    machine: Machine, tools: Callable[..., Path], version: str, nvtx: str, proof: NsysProof, expected: str
) -> None:
    """What was proved decides, else the versions."""
    tools("nsys", version=version)
    machine.nsys = proof
    if nvtx:
        install(machine, "nvtx", nvtx)
    check = profilers.nvtx(machine)
    assert expected == check.status
    assert bool(check.cure) == (expected != "ok")


def test_ncu(machine: Machine, tools: Callable[..., Path]) -> None:
    """Without an NVIDIA GPU it records nothing."""
    tools("ncu", version="Version 2025.1.0.0 (build 35237751)")
    assert ("note", "2025.1.0.0: records nothing, as there is no NVIDIA GPU", "") == brief(profilers.ncu(machine))
    put(machine, "dev/nvidiactl")
    assert "ok" == profilers.ncu(machine).status


@pytest.fixture(scope="module")
def roctx_library() -> str:
    """Built before a test takes the compiler away from PATH."""
    return str(native.build("roctxlog", 'LIBRARY_NAME="libroctx64.so"'))


@pytest.mark.native
def test_rocprof(
    roctx_library: str, machine: Machine, tools: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rocTX library is loaded; rocprofv3 without it loses regions."""
    monkeypatch.setattr(roctx, "LIBRARIES", (roctx_library,))
    assert ("absent", True) == (profilers.rocprof(machine).status, profilers.rocprof(machine).facts["roctx"])
    tools("rocprofv3", version="version: 1.0.0")
    machine = Machine(root=machine.root)
    machine.torch = CPU
    assert "1.0.0: the rocTX library loads; no GPU work" in profilers.rocprof(machine).sentence
    machine.torch = ROCM
    assert ("ok", "1.0.0: the rocTX library loads; HIP calls and kernels; ranges are not proved", "") == brief(
        profilers.rocprof(machine)
    )
    monkeypatch.setattr(roctx, "LIBRARIES", ("libroctx-of-nobody.so",))
    check = profilers.rocprof(machine)
    assert "problem" == check.status
    assert "regions are lost, as there is no rocTX library" in check.sentence
    assert "rocprofiler-sdk-roctx" in check.cure


def test_vtune(machine: Machine, tools: Callable[..., Path]) -> None:
    """VTune without ittapi loses regions."""
    assert ("absent", "not installed; ittapi is missing", "") == brief(profilers.vtune(machine))
    tools("vtune", version="Intel(R) VTune(TM) Profiler 2025.0.1 (build 629235)")
    machine = Machine(root=machine.root, temp=machine.temp, packages=[])
    assert ("problem", "2025.0.1: regions are lost, as ittapi is missing", "pip install ittapi") == brief(
        profilers.vtune(machine)
    )
    install(machine, "ittapi", "1.2.2")
    assert ("ok", "2025.0.1: regions as tasks of ITT, ittapi 1.2.2 is there; not proved", "") == brief(
        profilers.vtune(machine)
    )


def test_frameworks(machine: Machine) -> None:
    """Versions are read without importing anything."""
    install(machine, "transformers", "5.23.0")
    install(machine, "megatron-core", "0.16.1")
    check = software.frameworks(machine)
    assert check.sentence.startswith("transformers 5.23.0, megatron-core 0.16.1; not installed: accelerate")
    assert "5.23.0" == check.facts["transformers"]


# Permissions and room


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
    assert permissions.cpu_sampling(machine) is None  # no tool that samples
    tools("nsys")
    check = permissions.cpu_sampling(Machine(root=machine.root))
    assert check is not None
    assert expected == check.status
    assert bool(check.cure) == (expected == "note")


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
    """Counters that only administrators may read stop ncu."""
    assert permissions.gpu_counters(machine) is None
    put(machine, "proc/driver/nvidia/params", text)
    capabilities(machine, *bits)
    if ncu:
        tools("ncu")
    check = permissions.gpu_counters(machine)
    assert check is not None
    assert expected == check.status
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in check.cure) == (expected != "ok")


@pytest.mark.parametrize(
    "scope, bits, expected",
    [(0, (), "ok"), (1, (), "problem"), (1, (PTRACE,), "ok"), (3, (PTRACE,), "problem")],
)
def test_ptrace(
    machine: Machine, tools: Callable[..., Path], scope: int, bits: tuple[int, ...], expected: str
) -> None:
    """VTune attaches to what it samples."""
    put(machine, "proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    capabilities(machine, *bits)
    tools("vtune")
    check = permissions.ptrace(machine)
    assert check is not None
    assert expected == check.status


@pytest.mark.parametrize("free, expected", [(20 << 30, "ok"), (1 << 30, "note"), (50 << 20, "problem")])
def test_room(machine: Machine, monkeypatch: pytest.MonkeyPatch, free: int, expected: str) -> None:
    """How much room is left is told before it is missing."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, free))
    for check in (permissions.temp_folder(machine), permissions.out_folder(machine)):
        assert (expected, free) == (check.status, check.facts["free_bytes"])
        assert bool(check.cure) == (expected != "ok")


def test_the_folder_for_traces(machine: Machine, tmp_path: Path) -> None:
    """One that is not there yet is looked for above; a file in its place is a problem."""
    machine.out = tmp_path / "not" / "there"
    check = permissions.out_folder(machine)
    assert check.sentence.startswith(f"{machine.out}, ")
    assert not machine.out.parent.exists()
    (tmp_path / "file").touch()
    machine.out = tmp_path / "file" / "runs"
    assert "problem" == permissions.out_folder(machine).status


def test_shared_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Docker gives by default is little."""
    assert permissions.shared_memory(machine) is None
    (machine.root / "dev/shm").mkdir(parents=True)
    put(machine, ".dockerenv")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, 64 << 20))
    status, sentence, cure = brief(permissions.shared_memory(machine))
    assert ("note", "docker run --shm-size=8g") == (status, cure)
    assert "64 MiB free: little for the workers of a DataLoader" in sentence


# The environment


@pytest.mark.parametrize(
    "value, expected",
    [({}, "ok"), ({"INSTRUMENT": "0"}, "problem"), ({"INSTRUMENT": "off"}, "problem"), ({"INSTRUMENT": "1"}, "ok"),
     ({"INSTRUMENT_EMITTERS": "nsys"}, "problem"), ({"INSTRUMENT_EMITTERS": "torch"}, "note"),
     ({"INSTRUMENT_EMITTERS": "auto"}, "ok"), ({"INSTRUMENT_EMITTERS": ""}, "ok")],
)  # fmt: skip
def test_settings(machine: Machine, monkeypatch: pytest.MonkeyPatch, value: dict[str, str], expected: str) -> None:
    """A setting that turns regions off is a problem, one that chooses where they go is worth a note."""
    for name, text in value.items():
        monkeypatch.setenv(name, text)
    check = settings.library(machine)
    assert expected == check.status
    assert ("unset" in check.cure) == (expected != "ok")


def test_injected_libraries(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not there, and an ITT collector without ittapi, lose regions."""
    assert settings.injected(machine) is None
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "./.")
    assert settings.injected(machine) is None
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(tmp_path / "gone.so"))
    status, sentence, cure = brief(settings.injected(machine))
    assert ("problem", "unset NVTX_INJECTION64_PATH") == (status, cure)
    assert str(tmp_path / "gone.so") in sentence
    monkeypatch.delenv("NVTX_INJECTION64_PATH")
    monkeypatch.setenv("INTEL_LIBITTNOTIFY64", "libittnotify_collector.so")
    assert "pip install ittapi" == brief(settings.injected(machine))[2]
    install(machine, "ittapi", "1.2.2")
    assert "ok" == brief(settings.injected(machine))[0]


def test_what_interferes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other profilers in the environment are named, with how to be rid of them."""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert settings.interfering(machine) is None
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2:/opt/rocm/lib/librocprofiler-sdk-tool.so")
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    status, sentence, cure = brief(settings.interfering(machine))
    assert ("note", "unset KINETO_USE_DAEMON LD_PRELOAD") == (status, cure)
    assert "loads librocprofiler-sdk-tool.so into every program" in sentence
    assert "jemalloc" not in sentence
    monkeypatch.setenv("ROCP_TOOL_LIBRARIES", "librocprofiler-sdk-tool.so")
    assert "unset KINETO_USE_DAEMON" == brief(settings.interfering(machine))[2]


# Viewers


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers as its server's ``code`` says."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_perfetto(machine: Machine, server: str) -> None:
    """Any answer will do; none is worth a note, no more."""
    machine.viewer = server
    assert ("ok", f"{server} can be reached", "") == brief(viewers.perfetto(machine))
    for silent in ("http://127.0.0.1:1", "nonsense", "http://nowhere.invalid"):
        machine.viewer = silent
        assert ("note", False) == (viewers.perfetto(machine).status, viewers.perfetto(machine).facts["reachable"])


def test_a_network_that_is_silent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the connection and never answers is waited for no longer than the limit."""
    monkeypatch.setattr(viewers, "_LIMIT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        machine.viewer = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert "note" == viewers.perfetto(machine).status


def test_names_that_are_looked_up_for_long(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up of a name, which has no limit of its own, is not waited for either."""
    monkeypatch.setattr(viewers, "_LIMIT_S", 0.2)
    given_up, answers = threading.Event(), []

    def getaddrinfo(*_: object, **__: object) -> list[object]:
        given_up.wait(30)
        answers.append(given_up.is_set())
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert "note" == viewers.perfetto(machine).status
    assert [] == answers
    given_up.set()


def test_tensorboard(machine: Machine) -> None:
    """The plugin without TensorBoard shows nothing."""
    install(machine, "torch-tb-profiler", "0.4.3")
    assert "pip install tensorboard" == viewers.tensorboard(machine).cure
    install(machine, "tensorboard", "2.21.0")
    assert "ok" == viewers.tensorboard(machine).status


# The page


def page(found: list[Examined], width: int) -> str:
    file = io.StringIO()
    render(found, console=Console(file=file, width=width, color_system=None))
    return file.getvalue()


WORDS = st.lists(st.text("abc[]/:-", min_size=1, max_size=15), min_size=1, max_size=30)


@given(WORDS, st.sampled_from([20, 80, 100]))
def test_sentences_fit(words: list[str], width: int) -> None:
    """Every word is on the page as it is, and no line is wider than the terminal where words can be parted."""
    text = page([Examined("section", "name", Check("note", " ".join(words)))], width)
    shown = text.split()
    assert ["section", "note", "name", *words, "No", "problem,"] == shown[: len(words) + 5]
    lines = text.splitlines()[1:-2]
    assert max(map(len, lines)) <= max(width, 46)


@pytest.mark.parametrize(
    "statuses, conclusion",
    [
        (["ok", "absent"], "No problem: what is installed records here."),
        (["ok", "note"], "No problem, 1 note: what is installed records here."),
        (["problem", "note", "note"], "1 problem, 2 notes."),
        (["problem", "problem"], "2 problems."),
    ],
)
def test_conclusion(statuses: list[Status], conclusion: str) -> None:
    """The last line says what it comes to, and so does the JSON."""
    found = [Examined("section", status, Check(status, "x", "do it")) for status in statuses]
    text = page(found, 80)
    assert conclusion == text.splitlines()[-1]
    assert len(statuses) == text.count("cure: do it")
    assert statuses.count("problem") == numbers(found)["problems"]


def test_the_guide() -> None:
    """The guide's page has the sections and the checks that there are, in their order."""
    (shown,) = re.findall(r"```\n\$ instrument doctor\n(.*?)```", GUIDE, re.DOTALL)
    assert list(SECTIONS) == [line for line in shown.splitlines() if line in SECTIONS]
    names = [name for looks in SECTIONS.values() for name in looks]
    signs = r"^(?:ok|note|PROBLEM|-) +(.*)$"
    rows = re.findall(signs, shown, re.MULTILINE)
    found = [next(name for name in names if row.startswith(f"{name} ")) for row in rows]
    assert found == [name for name in names if name in found]
    described = re.findall(r"^\| ([\w. ]+) \|", GUIDE, re.MULTILINE)
    assert names == [name for name in described if name in names]
