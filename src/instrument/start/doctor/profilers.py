"""Checks of the profilers: what each records here, and whether ranges arrive in its output."""

from __future__ import annotations

import re

from ...base.compat import tools
from ..vendors import Tool
from .machine import Check, Machine
from .software import USE_ANOTHER_GPU

NVTX_THAT_ASKS, NSYS_THAT_ANSWERS = (0, 2, 12), (2024, 3)
"""Since this nvtx, the package asks the tool whether it records; before this nsys, the tool does not answer."""


def torch_profiler(machine: Machine) -> Check:
    """Check that torch.profiler records a region, and the kernel that the region launches."""
    trial = machine.torch
    facts = {"proved": trial.region, "gpu": trial.kernel}
    if not trial.version:
        if not machine.package("torch"):
            return Check("absent", "not checked, as torch is not installed", facts=facts)
        return Check("note", "not checked, as torch cannot be used", facts=facts)
    if trial.failure:
        return Check("problem", trial.failure, "instrument run --profiler nsys, where nsys is installed", facts)
    if not trial.region:
        fix = f"pip install --upgrade torch ({trial.version} lacks the interface for regions)"
        return Check("problem", "regions are lost: the trace lacks one that was opened", fix, facts)
    if not trial.gpus:
        return Check("ok", "regions arrive (proved); CPU only, as there is no GPU", facts=facts)
    if trial.kernel:
        return Check("ok", "regions arrive, and the GPU work in them (proved)", facts=facts)
    if trial.why_no_gpu:
        why = f"GPU work is not proved, as no GPU can be used now: {trial.why_no_gpu}"
        return Check("note", f"regions arrive (proved); {why}", USE_ANOTHER_GPU, facts)
    tracer = tools.gpu_tracer()
    if tracer:
        return Check("note", f"regions arrive (proved); CPU only, as {tracer} traces the GPU", facts=facts)
    fix = "end other programs that trace this GPU; in a container, mount the driver's libcupti "
    fix += "or install nvidia-cuda-cupti"
    return Check("problem", "regions arrive, but the kernel that one launched does not", fix, facts)


def nsys(machine: Machine) -> Check:
    """Check that NVTX ranges arrive in a report of Nsight Systems."""
    tool = machine.tool("nsys")
    if tool is None:
        return Check("absent", "not installed; https://developer.nvidia.com/nsight-systems")
    version, facts = _version(tool), _facts(tool)
    active = recording_profiler()
    if active:
        return Check("note", f"{version}; not proved, as {active} records this process", facts=facts)
    trial = machine.nsys
    facts["proved"] = trial.region
    if trial.failure:
        return Check("problem", f"{version}: {trial.failure}", _nsys_cure(trial.failure), facts)
    if not trial.region:
        package = f"nvtx {machine.package('nvtx') or 'missing'}"
        sentence = f"{version}: ranges are lost with {package}: the report lacks one that was emitted"
        return Check("problem", sentence, "pip install --upgrade nvtx, and nsys 2024.3 or later", facts)
    gpu = "CUDA calls and GPU work were not tried" if machine.nvidia else "no GPU work, as there is no NVIDIA GPU"
    return Check("ok", f"{version}: NVTX ranges arrive (proved); {gpu}", facts=facts)


def _nsys_cure(failure: str) -> str:
    if ".qdstrm" in failure:
        return "install NVIDIA's full nsys package with its importer (host-linux-x64), not only the target part"
    if "in time" in failure:
        return "nsys status --environment; end other sessions: nsys sessions list, nsys shutdown --session=NAME"
    return "nsys profile --trace=nvtx python -c 'import instrument' shows the error"


def nvtx(machine: Machine) -> Check:
    """Check which nvtx is installed, and whether ranges of other libraries arrive under this nsys."""
    version, nsys = machine.package("nvtx"), machine.tool("nsys")
    facts = {"version": version}
    if not version:
        if nsys or machine.tool("ncu"):
            return Check("problem", "not installed: no region reaches NVIDIA's tools", "pip install nvtx", facts)
        return Check("absent", "not installed", facts=facts)
    if nsys is None or not _plain_ranges_lost(machine, nsys):
        return Check("ok", version, facts=facts)
    sentence = f"{version}: plain nvtx.annotate loses its ranges under {nsys}; regions of this library arrive"
    return Check("note", sentence, "nsys 2024.3 or later, or instrument.annotate instead", facts)


def _plain_ranges_lost(machine: Machine, nsys: Tool) -> bool:
    """Return whether ranges of the package nvtx are lost: by the trial or, without one, by the versions."""
    if not recording_profiler() and machine.nsys.region:
        return not machine.nsys.plain
    nvtx = tuple(int(part) for part in re.findall(r"\d+", machine.package("nvtx"))[:3])
    return nvtx >= NVTX_THAT_ASKS and () < nsys.version < NSYS_THAT_ANSWERS


def ncu(machine: Machine) -> Check:
    """Return what Nsight Compute would record."""
    tool = machine.tool("ncu")
    if tool is None:
        return Check("absent", "not installed; https://developer.nvidia.com/nsight-compute")
    if not machine.nvidia:
        return Check("note", f"{_version(tool)}: records nothing, as there is no NVIDIA GPU", facts=_facts(tool))
    return Check("ok", f"{_version(tool)}: the kernels in a region; ranges are not proved", facts=_facts(tool))


def rocprof(machine: Machine) -> Check:
    """Check that rocprofv3 finds a rocTX library, and return what it would record."""
    tool, library = machine.tool("rocprof"), _has_roctx()
    facts = {**_facts(tool), "roctx": library}
    loads = "the rocTX library loads" if library else "no rocTX library is found"
    if tool is None:
        built = "; torch is built for ROCm" if machine.torch.rocm else ""
        return Check("absent", f"rocprofv3 is not installed; {loads}{built}", facts=facts)
    if not library:
        fix = "install rocprofiler-sdk-roctx of the same ROCm, and add its folder to LD_LIBRARY_PATH"
        return Check("problem", f"{_version(tool)}: regions are lost, as {loads}", fix, facts)
    gpu = "HIP calls and kernels" if machine.amd else "no GPU work, as there is no AMD GPU"
    sentence = f"{_version(tool)}: {loads}; {gpu}; ranges are not proved"
    return Check("ok" if machine.amd else "note", sentence, facts=facts)


def _has_roctx() -> bool:
    from ...record.regions.tool_emitters import RoctxEmitter

    try:
        RoctxEmitter()
    except ImportError:
        return False
    return True


def vtune(machine: Machine) -> Check:
    """Check that regions would reach VTune."""
    tool, package = machine.tool("vtune"), machine.package("ittapi")
    facts = {**_facts(tool), "ittapi": package}
    ittapi = f"ittapi {package} is installed" if package else "ittapi is missing"
    if tool is None:
        return Check("absent", f"not installed; {ittapi}", facts=facts)
    if not package:
        return Check("problem", f"{_version(tool)}: regions are lost, as {ittapi}", "pip install ittapi", facts)
    return Check("ok", f"{_version(tool)}: regions as ITT tasks, {ittapi}; not proved", facts=facts)


def active_profiler(machine: Machine) -> Check:
    """Return the profiler that records this very process, or that has taken the GPU's tracing interface."""
    active, tracer = recording_profiler(), tools.gpu_tracer()
    facts = {"tool": active, "gpu_tracer": tracer}
    if tracer:
        sentence = f"{tracer} holds the GPU's only tracing interface: torch.profiler records the CPU alone"
        return Check("note", sentence, facts=facts)
    if active:
        return Check("note", f"{active} records this process", facts=facts)
    return Check("ok", "no profiler records this process", facts=facts)


def recording_profiler() -> str | None:
    """Return the profiler that records this process, if any."""
    records = {
        "Nsight Systems": tools.nsight_systems,
        "Nsight Compute": tools.nsight_compute,
        "rocprofv3": tools.rocprof,
        "VTune": tools.vtune,
        "an NVTX tool": tools.nvtx_injected,
    }
    return next((name for name, does_record in records.items() if does_record()), None)


def _version(tool: Tool) -> str:
    return ".".join(map(str, tool.version)) or "of unknown version"


def _facts(tool: Tool | None) -> dict[str, object]:
    return {"version": ".".join(map(str, tool.version)), "path": tool.path} if tool else {}
