"""Helpers for the tests of the doctor."""

from __future__ import annotations

import os
import subprocess
import sys

from instrument.start.doctor.machine import Check, Machine
from instrument.start.doctor.trials import TorchTrial

VERSION = "NVIDIA Nsight Systems version 2023.4.1.97"
CPU = TorchTrial(version="2.13.0+cpu", region=True)
CUDA = TorchTrial(version="2.13.0+cu130", cuda="13.0", gpus=("H100",), region=True, kernel=True)
ROCM = TorchTrial(version="2.13.0+rocm7.0", rocm="7.0", gpus=("MI300X",), region=True, kernel=True)
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
FULL = TorchTrial(version="2.13.0+cu130", cuda="13.0", gpus=("H100",) * 2, why_no_gpu=BUSY, region=True)


def put(machine: Machine, path: str, text: str = "") -> None:
    """Write a system file."""
    file = machine.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def install(machine: Machine, name: str, version: str) -> None:
    """Write the metadata that pip writes for a package."""
    site = machine.root / "site"
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    machine.packages = [str(site)]


def capabilities(machine: Machine, *bits: int, seccomp: int = 0) -> None:
    effective = sum(1 << bit for bit in bits)
    put(machine, "proc/self/status", f"Name:\tx\nCapEff:\t{effective:016x}\nSeccomp:\t{seccomp}\n")


def summary(check: Check | None) -> tuple[str, str, str]:
    assert check is not None
    return check.status, check.sentence, check.fix


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", "doctor", *args],
        capture_output=True, text=True, timeout=300, env={**os.environ, **env},
    )  # fmt: skip
