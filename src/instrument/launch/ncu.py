"""Nsight Compute: how well single kernels use the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..config import NVTX_START_END
from ..report.console import line
from ..report.kernels import render_kernels
from ..traces.ncu import read_kernels
from .installed import Tool, help_of
from .reports import matching
from .request import LaunchRequest

_LAUNCHES = 100  # a kernel is run several times over, with caches flushed in between
_SCOPE = "--nvtx-push-pop-scope"
_SPECIAL = re.compile(r"([@,\[\]/*+\\])")


class Ncu:
    """Builds ``ncu`` and reads ``.ncu-rep``."""

    title = "Nsight Compute"
    get = "https://developer.nvidia.com/nsight-compute"
    rank: str | None = "%q{RANK}"
    percent = "%%"

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        What is measured lies in a window, by cudaProfilerStart, and in one of the regions, by its NVTX range, of
        either kind. A push/pop range holds by default what its own thread launches, which in "backward" is next to
        nothing: autograd launches from another. Releases that cannot filter by process are given start/end ranges.
        Kernels of collectives are left out where there are ranks: one that is repeated alone would wait for the
        others for ever.
        """
        names = [_SPECIAL.sub(r"\\\1", name) for name in request.regions]
        inside = [word for name in names for kind in ("/", "") for word in _include(f"{name}{kind}")]
        scope: Sequence[str] = ()
        ranges: Sequence[str] = ()
        if inside and _SCOPE in help_of(tool):
            scope = (_SCOPE, "process")
        elif inside:
            ranges = ("env", f"{NVTX_START_END}=1")
        return [
            tool.path, "--target-processes", "all", *(["--profile-from-start", "off"] * (request.windows != 0)),
            "--nvtx", *scope, *inside, "--launch-count", str(request.launches or _LAUNCHES),
            *(["--kernel-name", "regex:^(?!nccl)"] * workers), "-o", report, *request.extra, *ranges,
        ]  # fmt: skip

    def reports(self, report: Path) -> list[Path]:
        """Return the reports, one a rank."""
        return matching(report, ".ncu-rep")

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print a table of kernels by region, or how to get one."""
        try:
            kernels = [kernel for path in reports for kernel in read_kernels(path)]
        except ImportError as error:
            line(console, f"instrument: {error}; or: ncu --import {reports[0]}")
            return
        render_kernels(kernels, console=console)


def _include(expression: str) -> tuple[str, str]:
    return "--nvtx-include", f"instrument@{expression}"
