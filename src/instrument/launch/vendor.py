"""Runs a program under a vendor's profiler, and reads what that wrote."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import LAUNCHED
from ..errors import LaunchError
from . import outcome
from .installed import Tool, find
from .ncu import Ncu
from .nsys import Nsys
from .process import run
from .request import LaunchRequest, Vendor
from .rocprof import Rocprof
from .vtune import Vtune
from .workers import workers

__all__ = ["VENDORS", "LaunchRequest", "command_line", "launch"]

VENDORS: Mapping[str, Vendor] = {"nsys": Nsys(), "ncu": Ncu(), "rocprof": Rocprof(), "vtune": Vtune()}

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def command_line(profiler: str, request: LaunchRequest, tool: Tool | None = None) -> list[str]:
    """Return the command line for the installed version of a profiler.

    Args:
        profiler: out of `VENDORS`.
        request: what to run.
        tool: what to run it with; by default what is on ``PATH``.

    Raises:
        LaunchError: the profiler or the program is not installed; the message says how to get the first.
        ValueError: no such profiler.
    """
    return _prepared(profiler, request, tool).command


def launch(profiler: str, request: LaunchRequest) -> int:
    """Run a program under a profiler, and print the summary of what that wrote on standard error.

    Signals go to the program. Where the profiler wrote nothing, the reason is printed.

    Returns:
        The program's exit code; 128 and the number of the signal that ended it.

    Raises:
        LaunchError, ValueError: as `command_line`.
    """
    prepared = _prepared(profiler, request, None)
    request.out.mkdir(parents=True, exist_ok=True)
    manifest = outcome.size(request.out)
    code = run(prepared.command, {**request.environment, LAUNCHED: "1"}, request.command)
    outcome.tell(VENDORS[profiler], request, prepared.report, manifest, code)
    return code


@dataclass(frozen=True)
class _Prepared:
    command: list[str]
    report: Path  # as far as its name is known


def _prepared(profiler: str, request: LaunchRequest, tool: Tool | None) -> _Prepared:
    if profiler not in VENDORS:
        raise ValueError(f'"profiler" must be one of {", ".join(VENDORS)}: {profiler!r}')
    vendor = VENDORS[profiler]
    tool = tool or find(profiler)
    if tool is None:
        raise LaunchError(f"{vendor.title} is not installed or not on PATH; get it from {vendor.get}")
    if not request.command:
        raise LaunchError("there is no program to run")
    if shutil.which(request.command[0], path=request.environment.get("PATH")) is None:
        raise LaunchError(f"there is no program {request.command[0]}")
    report = _fresh(request, profiler)
    name = str(report).replace("%", vendor.percent)
    job = workers(request.command, request.environment) if vendor.rank is not None else None
    if job is None:
        return _Prepared([*vendor.prefix(request, tool, name, workers=False), *request.command], report)
    name += f"-rank{vendor.rank}"
    if job.restarts:
        name += f"-restart{vendor.rank}".replace("RANK", "TORCHELASTIC_RESTART_COUNT")
    return _Prepared(job.under(vendor.prefix(request, tool, name, workers=True)), report)


def _fresh(request: LaunchRequest, profiler: str) -> Path:
    """The path of a report, without its suffix, that is not there yet: no tool is to overwrite one."""
    name = f"{profiler}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    given = (request.environment.get(variable, "") for variable in _RANKS)
    rank = next((f"-rank{rank}" for rank in given if rank.isdecimal()), "")
    number, report = 1, request.out.absolute() / f"{name}{rank}"
    while any(report.parent.glob(f"{glob.escape(report.name)}[!0-9]*")) or report.exists():
        number += 1
        report = request.out.absolute() / f"{name}-{number}{rank}"
    return report
