"""Checks of the system: permissions of profilers, room for traces, and environment variables."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ...base.compat.tools import TOOL_FREE_INJECTION
from ...base.config import Settings, parse_emitters
from .machine import ADMIN, PERFMON, PTRACE, Check, Machine
from .profilers import recording_profiler

PER_PROCESS = 2
"""The largest perf_event_paranoid that allows a program to sample its own CPU time."""

_MIB = 1 << 20
_MIN_SPACE = 100 * _MIB  # for a trace of a few steps
_LOW_SPACE = 2048 * _MIB  # for a long recording
_INJECTIONS = {
    "NVTX_INJECTION64_PATH": TOOL_FREE_INJECTION,
    "CUDA_INJECTION64_PATH": "",
    "INTEL_LIBITTNOTIFY64": "",
}
_PROFILERS = re.compile(
    "nsight|toolsinjection|rocprof|roctracer|ittnotify|vtune|cupti|kineto|dynolog", re.IGNORECASE
)  # in the names of libraries that LD_PRELOAD loads


def cpu_sampling(machine: Machine) -> Check | None:
    """Check that nsys and VTune may sample the CPU."""
    level = machine.number("proc/sys/kernel/perf_event_paranoid")
    if level is None or not (machine.tool("nsys") or machine.tool("vtune")):
        return None
    facts = {"perf_event_paranoid": level, "container": machine.container}
    if machine.has_capability(ADMIN, PERFMON):
        return Check("ok", f"allowed to this user (perf_event_paranoid is {level})", facts=facts)
    if level > PER_PROCESS:
        fix = f"sudo sysctl -w kernel.perf_event_paranoid={PER_PROCESS}"
        sentence = f"not allowed: perf_event_paranoid is {level}; ranges and GPU work are recorded anyway"
        return Check("note", sentence, fix, facts)
    if machine.container and machine.status("Seccomp") == "2":
        sentence = "this container filters system calls, and most filters forbid it"
        return Check("note", sentence, "docker run --cap-add=PERFMON (SYS_ADMIN before Linux 5.8)", facts)
    return Check("ok", f"allowed (perf_event_paranoid is {level})", facts=facts)


def gpu_counters(machine: Machine) -> Check | None:
    """Check that Nsight Compute may read the GPU's counters."""
    admin_only = re.search(r"RmProfilingAdminOnly: (\d)", machine.text("proc/driver/nvidia/params"))
    if admin_only is None:
        return None
    facts = {"admin_only": admin_only[1] == "1"}
    if admin_only[1] == "0" or machine.has_capability(ADMIN):
        return Check("ok", "this user may read them", facts=facts)
    sentence = "only administrators may read them (ERR_NVGPUCTRPERM in ncu)"
    fix = (
        "docker run --cap-add=SYS_ADMIN"
        if machine.container
        else "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d/nvidia.conf, then reboot"
    )
    return Check("problem" if machine.tool("ncu") else "note", sentence, fix, facts)


def ptrace(machine: Machine) -> Check | None:
    """Check that VTune may attach to programs."""
    scope = machine.number("proc/sys/kernel/yama/ptrace_scope")
    if scope is None or machine.tool("vtune") is None:
        return None
    facts = {"ptrace_scope": scope}
    if scope == 0 or (scope < 3 and machine.has_capability(PTRACE)):
        return Check("ok", f"allowed (ptrace_scope is {scope})", facts=facts)
    sentence = f"ptrace_scope is {scope}: VTune's user-mode sampling does not start"
    fix = "sudo sysctl -w kernel.yama.ptrace_scope=0" + " (after a restart: 3 stays)" * (scope == 3)
    return Check("problem", sentence, fix, facts)


def temp_folder(machine: Machine) -> Check:
    """Check that profilers have room for temporary files."""
    fix = "export TMPDIR=FOLDER, a writable folder with room"
    return _check_room(machine.temp, machine.temp, "a recording", fix)


def shared_memory(machine: Machine) -> Check | None:
    """Check that processes have room for shared memory."""
    folder = machine.root / "dev/shm"
    if not folder.is_dir():
        return None
    fix = "docker run --shm-size=8g" if machine.container else f"sudo mount -o remount,rw,size=8g {folder}"
    return _check_room(
        folder, folder, "the workers of a DataLoader, NCCL and nsys", fix, too_little=_MIB, little=256 * _MIB
    )


def out_folder(machine: Machine) -> Check:
    """Check that traces can be written."""
    folder = machine.out.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    fix = "another folder; check it with instrument doctor --out FOLDER"
    return _check_room(folder, machine.out, "traces", fix)


def _check_room(
    folder: Path, named: Path, what: str, fix: str, too_little: int = _MIN_SPACE, little: int = _LOW_SPACE
) -> Check:
    """Check that ``folder`` is writable and has room for ``what``."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        return Check("problem", f"{named} cannot be written to: {error.strerror}", fix, {"writable": False})
    free = shutil.disk_usage(folder).free
    facts = {"writable": True, "free_bytes": free}
    sentence = f"{named}, {_format_size(free)} free"
    if free >= little:
        return Check("ok", sentence, facts=facts)
    enough = free >= too_little
    return Check(
        "note" if enough else "problem", f"{sentence}: {'' if enough else 'too '}little for {what}", fix, facts
    )


def _format_size(size: int) -> str:
    return f"{size / (1 << 30):,.0f} GiB" if size >= 10 << 30 else f"{size / _MIB:,.0f} MiB"


def settings(machine: Machine) -> Check:
    """Check that the settings of this library do not turn regions off."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("INSTRUMENT")}
    if not Settings({"INSTRUMENT": given.get("INSTRUMENT", "1")}).enabled:
        sentence = f"INSTRUMENT={given['INSTRUMENT']}: this library is off"
        return Check("problem", sentence, "unset INSTRUMENT", given)
    emitters = given.get("INSTRUMENT_EMITTERS") or "auto"
    try:
        chosen = parse_emitters(emitters)
    except ValueError as error:
        return Check("problem", f"INSTRUMENT_EMITTERS is ignored: {error}", "unset INSTRUMENT_EMITTERS", given)
    if chosen != "auto":
        sentence = f"INSTRUMENT_EMITTERS={emitters}: regions go only there, whichever profiler records"
        return Check("note", sentence, "unset INSTRUMENT_EMITTERS", given)
    listed = ", ".join(f"{name}={value}" for name, value in given.items())
    return Check("ok", listed or "regions go to every profiler that records", facts=given)


def injected_libraries(machine: Machine) -> Check | None:
    """Check the libraries that profilers inject into programs by environment variables."""
    given = {name: os.environ.get(name, "") for name in _INJECTIONS}
    given = {name: value for name, value in given.items() if value and value != _INJECTIONS[name]}
    for name, value in given.items():
        if "/" in value and not Path(value).exists():
            return Check("problem", f"{name} names a file that does not exist: {value}", f"unset {name}", given)
    if "INTEL_LIBITTNOTIFY64" in given and not machine.package("ittapi"):
        sentence = "INTEL_LIBITTNOTIFY64 is set, and ittapi is missing: regions are lost"
        return Check("problem", sentence, "pip install ittapi", given)
    return Check("ok", ", ".join(given), facts=given) if given else None


def interfering_settings(machine: Machine) -> Check | None:
    """Return other environment variables that change what is recorded."""
    environ, meanings = os.environ, {}
    if environ.get("KINETO_USE_DAEMON"):
        meanings["KINETO_USE_DAEMON"] = "a daemon may start torch.profiler at any time"
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        blocks = "each launch blocks until its kernel ends: times differ from those of a usual run"
        meanings["CUDA_LAUNCH_BLOCKING"] = blocks
    if environ.get("TORCH_PROFILER_EMIT_ROCTX", "0") not in ("", "0"):
        meanings["TORCH_PROFILER_EMIT_ROCTX"] = "torch emits rocTX ranges itself"
    preloaded = "" if recording_profiler() else environ.get("LD_PRELOAD", "")  # else it is that profiler's
    names = [Path(path).name for path in preloaded.replace(":", " ").split()]
    profilers = list(filter(_PROFILERS.search, names))
    if profilers:
        meanings["LD_PRELOAD"] = f"loads {', '.join(profilers)} into every program"
    if not meanings:
        return None
    sentence = "; ".join(f"{name}: {meaning}" for name, meaning in meanings.items())
    return Check("note", sentence, f"unset {' '.join(meanings)}", {name: environ[name] for name in meanings})
