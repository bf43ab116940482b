"""Nsight Compute: measures how well single kernels use the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..config import NVTX_START_END
from .installed import Tool, help_of
from .reports import matching
from .request import LaunchRequest

_LAUNCHES = 100  # each kernel is replayed several times, with caches flushed in between
_SCOPE = "--nvtx-push-pop-scope"
_SPECIAL = re.compile(r"([@,\[\]/*+\\])")


class Ncu:
    """Builds ``ncu`` command lines and reads ``.ncu-rep``."""

    title = "Nsight Compute"
    get = "https://developer.nvidia.com/nsight-compute"
    rank: str | None = "%q{RANK}"
    percent = "%%"

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        Only kernels inside a window (by cudaProfilerStart) and inside one of the regions (by its NVTX range, of
        either kind) are measured. By default a push/pop range contains what its own thread launches, which is
        almost nothing in "backward", as autograd launches from another thread. Releases that cannot filter by
        process get start/end ranges. In a job of several ranks, kernels of collectives are excluded: one that is
        replayed alone would wait for the other ranks forever.
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
        """Return the reports, one for each rank."""
        return matching(report, ".ncu-rep")

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print a table of kernels by region, or the command that prints one."""
        from ..console import print_line
        from ..report.kernels import print_measured_kernels
        from ..traces.ncu import read_kernels

        try:
            kernels = [kernel for path in reports for kernel in read_kernels(path)]
        except ImportError as error:
            print_line(console, f"instrument: {error}; or: ncu --import {reports[0]}")
            return
        print_measured_kernels(kernels, reports[0], console=console)


def _include(expression: str) -> tuple[str, str]:
    return "--nvtx-include", f"instrument@{expression}"
