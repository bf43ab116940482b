"""Which Python, torch and frameworks are here."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

from ... import __version__
from .check import Check
from .machine import Machine

OLDEST_TORCH = (2, 6)
FRAMEWORKS = (
    *("transformers", "accelerate", "lightning", "pytorch-lightning", "megatron-core"),
    *("deepspeed", "torchtitan", "vllm"),
)


def instrument(machine: Machine) -> Check:
    """Which release of this library is here, and where."""
    folder = Path(__file__).parents[2]
    return Check("ok", f"{__version__}, {folder}", facts={"version": __version__, "folder": str(folder)})


def python(machine: Machine) -> Check:
    """Which Python runs."""
    version = platform.python_version()
    sentence = (
        f"{platform.python_implementation()} {version}, {platform.system()} {platform.machine()}, {sys.executable}"
    )
    return Check("ok", sentence, facts={"version": version, "executable": sys.executable})


def torch(machine: Machine) -> Check:
    """Whether torch can be imported, what it is built for, and whether it is new enough."""
    found = machine.torch
    if not found.version:
        if not machine.package("torch"):
            return Check("problem", "not installed", f"{sys.executable} -m pip install torch")
        cure = f"{sys.executable} -c 'import torch', and see what it says"
        return Check("problem", f"{machine.package('torch')} cannot be used: {found.failure}", cure)
    built = f"CUDA {found.cuda}" if found.cuda else f"ROCm {found.rocm}" if found.rocm else "the CPU"
    sentence = f"{found.version}, built for {built}"
    facts = {"version": found.version, "cuda": found.cuda, "rocm": found.rocm}
    if _release(found.version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        cure = f"pip install 'torch>={oldest}'"
        return Check("problem", f"{sentence}: older than {oldest}, which this library needs", cure, facts)
    if found.rocm:
        sentence += "; torch.cuda.profiler.start() does nothing in it"
        return Check("note", sentence, "instrument run --profiler rocprof", facts)
    return Check("ok", sentence, facts=facts)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def frameworks(machine: Machine) -> Check:
    """Which frameworks are installed."""
    versions = {name: machine.package(name) for name in FRAMEWORKS}
    here = {name: version for name, version in versions.items() if version}
    if not here:
        return Check("absent", f"none of {', '.join(FRAMEWORKS)}", facts=versions)
    missing = [name for name, version in versions.items() if not version]
    sentence = ", ".join(f"{name} {version}" for name, version in here.items())
    return Check("ok", sentence + (f"; not installed: {', '.join(missing)}" if missing else ""), facts=versions)
