"""What the system lets profilers do, and whether there is room for what they write."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from .check import Check
from .machine import ADMIN, PERFMON, PTRACE, Machine

PER_PROCESS = 2
"""The largest perf_event_paranoid under which a program's own CPU samples are allowed."""

_MIB = 1 << 20
_FULL = 100 * _MIB  # a trace of a few steps does not fit
_FEW = 2048 * _MIB  # a long recording may not


def cpu_sampling(machine: Machine) -> Check | None:
    """Whether nsys and VTune may sample the CPU."""
    level = machine.number("proc/sys/kernel/perf_event_paranoid")
    if level is None or not (machine.tool("nsys") or machine.tool("vtune")):
        return None
    facts = {"perf_event_paranoid": level, "container": machine.container}
    if machine.may(ADMIN, PERFMON):
        return Check("ok", f"allowed to this user (perf_event_paranoid is {level})", facts=facts)
    if level > PER_PROCESS:
        cure = f"sudo sysctl -w kernel.perf_event_paranoid={PER_PROCESS}"
        sentence = f"not allowed: perf_event_paranoid is {level}. Ranges and GPU work are recorded without it"
        return Check("note", sentence, cure, facts)
    if machine.container and machine.status("Seccomp") == "2":
        sentence = "this container filters system calls, and most such filters do not allow it"
        return Check("note", sentence, "docker run --cap-add=PERFMON (SYS_ADMIN before Linux 5.8)", facts)
    return Check("ok", f"allowed (perf_event_paranoid is {level})", facts=facts)


def gpu_counters(machine: Machine) -> Check | None:
    """Whether Nsight Compute may read the GPU's counters."""
    found = re.search(r"RmProfilingAdminOnly: (\d)", machine.text("proc/driver/nvidia/params"))
    if found is None:
        return None
    facts = {"admin_only": found[1] == "1"}
    if found[1] == "0" or machine.may(ADMIN):
        return Check("ok", "may be read by this user", facts=facts)
    sentence = "only administrators may read them (ERR_NVGPUCTRPERM in ncu)"
    cure = (
        "docker run --cap-add=SYS_ADMIN"
        if machine.container
        else "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d/nvidia.conf, then reboot"
    )
    return Check("problem" if machine.tool("ncu") else "note", sentence, cure, facts)


def ptrace(machine: Machine) -> Check | None:
    """Whether VTune may attach to programs."""
    scope = machine.number("proc/sys/kernel/yama/ptrace_scope")
    if scope is None or machine.tool("vtune") is None:
        return None
    facts = {"ptrace_scope": scope}
    if scope == 0 or (scope < 3 and machine.may(PTRACE)):
        return Check("ok", f"allowed (ptrace_scope is {scope})", facts=facts)
    sentence = f"ptrace_scope is {scope}: VTune's user-mode sampling does not start"
    cure = "sudo sysctl -w kernel.yama.ptrace_scope=0" + " (after a restart: 3 stays)" * (scope == 3)
    return Check("problem", sentence, cure, facts)


def temp_folder(machine: Machine) -> Check:
    """Whether there is room for what profilers keep while they record."""
    cure = "export TMPDIR=FOLDER, one that can be written to and has room"
    return _room(machine.temp, machine.temp, "a recording", cure)


def shared_memory(machine: Machine) -> Check | None:
    """Whether there is room for what processes share."""
    folder = machine.root / "dev/shm"
    if not folder.is_dir():
        return None
    cure = "docker run --shm-size=8g" if machine.container else f"sudo mount -o remount,rw,size=8g {folder}"
    return _room(folder, folder, "the workers of a DataLoader, NCCL and nsys", cure, full=_MIB, few=256 * _MIB)


def out_folder(machine: Machine) -> Check:
    """Whether traces can be written."""
    folder = machine.out.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return _room(folder, machine.out, "traces", "another folder; look at it with instrument doctor --out FOLDER")


def _room(folder: Path, named: Path, what: str, cure: str, full: int = _FULL, few: int = _FEW) -> Check:
    """Whether a file can be written into ``folder``, and how much room is left there for ``what``."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        return Check("problem", f"{named} cannot be written to: {error.strerror}", cure, {"writable": False})
    free = shutil.disk_usage(folder).free
    facts = {"writable": True, "free_bytes": free}
    sentence = f"{named}, {_size(free)} free"
    if free < full:
        return Check("problem", f"{sentence}: too little for {what}", cure, facts)
    if free < few:
        return Check("note", f"{sentence}: little for {what}", cure, facts)
    return Check("ok", sentence, facts=facts)


def _size(size: int) -> str:
    return f"{size / (1 << 30):,.0f} GiB" if size >= 10 << 30 else f"{size / _MIB:,.0f} MiB"
