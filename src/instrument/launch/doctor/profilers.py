"""What each profiler would record here, and whether ranges arrive in it."""

from __future__ import annotations

import re

from ... import tools
from ..installed import Tool
from .check import Check
from .gpus import ANOTHER
from .machine import Machine

ASKING_NVTX, ANSWERING_NSYS = (0, 2, 12), (2024, 3)
"""From the one on nvtx asks the tool whether it listens; before the other nsys does not know the question."""


def torch_profiler(machine: Machine) -> Check:
    """Whether torch.profiler records a region, and the kernel that it launches."""
    proof = machine.torch
    facts = {"proved": proof.region, "gpu": proof.kernel}
    if not proof.version:
        return Check("note", "not examined, as torch cannot be used", facts=facts)
    if proof.failure:
        return Check("problem", proof.failure, "instrument run --profiler nsys, where Nsight Systems is", facts)
    if not proof.region:
        cure = f"pip install --upgrade torch ({proof.version} has no place where regions can be put in)"
        return Check("problem", "regions are lost: one was opened and is not in the trace", cure, facts)
    if not proof.gpus:
        return Check("ok", "regions arrive (proved); CPU only, as there is no GPU", facts=facts)
    if proof.kernel:
        return Check("ok", "regions arrive, and the GPU work in them (proved)", facts=facts)
    if proof.why_no_gpu:
        sentence = (
            f"regions arrive (proved); GPU work is not proved, as no GPU can be used now: {proof.why_no_gpu}"
        )
        return Check("note", sentence, ANOTHER, facts)
    holder = tools.gpu_tracer()
    if holder:
        return Check("note", f"regions arrive (proved); CPU only, as {holder} traces the GPU", facts=facts)
    cure = (
        "end what else traces this GPU; in a container, mount the driver's libcupti or install nvidia-cuda-cupti"
    )
    return Check("problem", "regions arrive, and the kernel that one launched does not", cure, facts)


def nvtx(machine: Machine) -> Check:
    """Which nvtx is here, and whether ranges that do not come from this library arrive under this nsys."""
    version, nsys = machine.package("nvtx"), machine.tool("nsys")
    facts = {"version": version}
    if not version:
        if nsys or machine.tool("ncu"):
            return Check("problem", "not installed: no region reaches NVIDIA's tools", "pip install nvtx", facts)
        return Check("absent", "not installed", facts=facts)
    if nsys is None or not _plain_lost(machine, nsys):
        return Check("ok", version, facts=facts)
    sentence = f"{version}: plain nvtx.annotate loses its ranges under {nsys}; those of this library arrive"
    return Check("note", sentence, "nsys 2024.3 or later, or instrument.annotate in their place", facts)


def _plain_lost(machine: Machine, nsys: Tool) -> bool:
    """Whether ranges of the package nvtx alone are lost: as proved, or where that cannot be, by the versions."""
    if not recorded_by() and machine.nsys.region:
        return not machine.nsys.plain
    nvtx = tuple(int(part) for part in re.findall(r"\d+", machine.package("nvtx"))[:3])
    return nvtx >= ASKING_NVTX and () < nsys.version < ANSWERING_NSYS


def nsys(machine: Machine) -> Check:
    """Whether NVTX ranges arrive in a report of Nsight Systems."""
    tool = machine.tool("nsys")
    if tool is None:
        return Check("absent", "not installed; https://developer.nvidia.com/nsight-systems")
    version, facts = _version(tool), _facts(tool)
    holder = recorded_by()
    if holder:
        return Check("note", f"{version}; not proved, as {holder} records this process", facts=facts)
    proof = machine.nsys
    facts["proved"] = proof.region
    if proof.failure:
        return Check("problem", f"{version}: {proof.failure}", _nsys_cure(proof.failure), facts)
    if not proof.region:
        of_nvtx = f"nvtx {machine.package('nvtx') or 'missing'}"
        cure = "pip install --upgrade nvtx, and nsys 2024.3 or later"
        return Check(
            "problem", f"{version}: ranges are lost with {of_nvtx}: one was emitted and is not there", cure, facts
        )
    gpu = "CUDA calls and GPU work with them" if machine.nvidia else "no GPU work, as there is no NVIDIA GPU"
    return Check("ok", f"{version}: NVTX ranges arrive (proved); {gpu}", facts=facts)


def _nsys_cure(failure: str) -> str:
    if ".qdstrm" in failure:
        return (
            "install nsys with its importer (host-linux-x64): the whole package of NVIDIA's, not the target part"
        )
    if "in time" in failure:
        return "nsys status --environment; end other sessions: nsys sessions list, nsys shutdown --session=NAME"
    return "nsys profile --trace=nvtx python -c 'import instrument', and see what it says"


def ncu(machine: Machine) -> Check:
    """What Nsight Compute would record."""
    tool = machine.tool("ncu")
    if tool is None:
        return Check("absent", "not installed; https://developer.nvidia.com/nsight-compute")
    if not machine.nvidia:
        return Check("note", f"{_version(tool)}: records nothing, as there is no NVIDIA GPU", facts=_facts(tool))
    sentence = f"{_version(tool)}: the kernels in a region; ranges are not proved"
    return Check("ok", sentence, facts=_facts(tool))


def rocprof(machine: Machine) -> Check:
    """Whether a rocTX library is there for rocprofv3, and what it would record."""
    tool, library = machine.tool("rocprof"), _roctx()
    facts = {**_facts(tool), "roctx": library}
    loads = "the rocTX library loads" if library else "there is no rocTX library"
    if tool is None:
        built = "; torch is built for ROCm" if machine.torch.rocm else ""
        return Check("absent", f"rocprofv3 is not installed; {loads}{built}", facts=facts)
    if not library:
        cure = "install rocprofiler-sdk-roctx of the same ROCm, and have its folder in LD_LIBRARY_PATH"
        return Check("problem", f"{_version(tool)}: regions are lost, as {loads}", cure, facts)
    gpu = "HIP calls and kernels" if machine.amd else "no GPU work, as there is no AMD GPU"
    return Check(
        "ok" if machine.amd else "note", f"{_version(tool)}: {loads}; {gpu}; ranges are not proved", facts=facts
    )


def _roctx() -> bool:
    from ...regions.emitters.roctx import RoctxEmitter

    try:
        RoctxEmitter()
    except ImportError:
        return False
    return True


def vtune(machine: Machine) -> Check:
    """Whether regions would reach VTune."""
    tool, package = machine.tool("vtune"), machine.package("ittapi")
    facts = {**_facts(tool), "ittapi": package}
    there = f"ittapi {package} is there" if package else "ittapi is missing"
    if tool is None:
        return Check("absent", f"not installed; {there}", facts=facts)
    if not package:
        return Check("problem", f"{_version(tool)}: regions are lost, as {there}", "pip install ittapi", facts)
    return Check("ok", f"{_version(tool)}: regions as tasks of ITT, {there}; not proved", facts=facts)


def now(machine: Machine) -> Check:
    """Which profiler records this very process, and what else in the environment takes part in recording."""
    holder, gpu = recorded_by(), tools.gpu_tracer()
    facts = {"tool": holder, "gpu_tracer": gpu}
    if gpu:
        sentence = f"{gpu} holds the GPU's one tracing interface: torch.profiler sees the CPU alone beside it"
        return Check("note", sentence, facts=facts)
    if holder:
        return Check("note", f"{holder} records this process", facts=facts)
    return Check("ok", "no profiler records this process", facts=facts)


def recorded_by() -> str | None:
    """Return the profiler that records this process, if any."""
    known = {
        "Nsight Systems": tools.nsight_systems,
        "Nsight Compute": tools.nsight_compute,
        "rocprofv3": tools.rocprof,
        "VTune": tools.vtune,
    }
    found = next((name for name, here in known.items() if here()), None)
    return found or ("a tool of NVTX" if tools.nvtx_injected() else None)


def _version(tool: Tool) -> str:
    return ".".join(map(str, tool.version)) or "of unknown version"


def _facts(tool: Tool | None) -> dict[str, object]:
    return {"version": ".".join(map(str, tool.version)), "path": tool.path} if tool else {}
