"""Runs a program under a vendor's profiler, and prints a summary of the reports."""

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
from ..part_file import make_folder
from . import outcome
from .installed import Tool, find_tool
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
        profiler: a key of `VENDORS`.
        request: the program to run.
        tool: the installed profiler; by default the one on ``PATH``.

    Raises:
        LaunchError: the profiler or the program is not installed; the message says where to get the profiler.
        ValueError: ``profiler`` is unknown.
    """
    return _prepare(profiler, request, tool).command


def launch(profiler: str, request: LaunchRequest) -> int:
    """Run a program under a profiler, and print a summary of the reports on standard error.

    Signals go to the program. If the profiler wrote no report, the reason is printed.

    Returns:
        The program's exit code; 128 plus the number of the signal that ended it.

    Raises:
        LaunchError, ValueError: as for `command_line`.
    """
    prepared = _prepare(profiler, request, None)
    make_folder(request.out)
    manifest = outcome.manifest_size(request.out)
    code = run(prepared.command, {**request.environment, LAUNCHED: "1"}, request.command)
    outcome.print_outcome(VENDORS[profiler], request, prepared.report, manifest, code)
    return code


@dataclass(frozen=True)
class _PreparedLaunch:
    command: list[str]
    report: Path  # without the suffix that the tool adds


def _prepare(profiler: str, request: LaunchRequest, tool: Tool | None) -> _PreparedLaunch:
    if profiler not in VENDORS:
        raise ValueError(f'"profiler" must be one of {", ".join(VENDORS)}: {profiler!r}')
    vendor = VENDORS[profiler]
    tool = tool or find_tool(profiler)
    if tool is None:
        raise LaunchError(f"{vendor.title} is not installed or not on PATH; get it from {vendor.get}")
    if not request.command:
        raise LaunchError("no program to run")
    if shutil.which(request.command[0], path=request.environment.get("PATH")) is None:
        raise LaunchError(f"program not found: {request.command[0]}")
    report = _new_report_path(request, profiler)
    name = str(report).replace("%", vendor.percent)
    job = workers(request.command, request.environment) if vendor.rank is not None else None
    if job is None:
        return _PreparedLaunch([*vendor.prefix(request, tool, name, workers=False), *request.command], report)
    name += f"-rank{vendor.rank}"
    if job.restarts:
        name += f"-restart{vendor.rank}".replace("RANK", "TORCHELASTIC_RESTART_COUNT")
    return _PreparedLaunch(job.under(vendor.prefix(request, tool, name, workers=True)), report)


def _new_report_path(request: LaunchRequest, profiler: str) -> Path:
    """Return the path of a new report without its suffix; no tool overwrites an existing one."""
    name = f"{profiler}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    given = (request.environment.get(variable, "") for variable in _RANKS)
    rank = next((f"-rank{rank}" for rank in given if rank.isdecimal()), "")
    number, report = 1, request.out.absolute() / f"{name}{rank}"
    while any(report.parent.glob(f"{glob.escape(report.name)}[!0-9]*")) or report.exists():
        number += 1
        report = request.out.absolute() / f"{name}-{number}{rank}"
    return report
