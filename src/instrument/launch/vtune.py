"""VTune: samples where CPUs, and with ``-collect gpu-hotspots`` Intel GPUs, spend their time."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..console import print_line
from .installed import Tool, find_tool
from .request import LaunchRequest


class Vtune:
    """Builds ``vtune -collect`` command lines; VTune itself summarizes a result."""

    title = "VTune"
    get = "https://www.intel.com/content/www/us/en/developer/tools/oneapi/vtune-profiler-download.html"
    rank: str | None = None
    percent = "%"

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program."""
        chosen = any(word.startswith(("-collect", "--collect")) for word in request.extra)
        return [
            tool.path, *([] if chosen else ["-collect", "hotspots"]),
            *(["-start-paused"] * (request.windows != 0)), "-return-app-exitcode",
            "-r", report, *request.extra, "--",
        ]  # fmt: skip

    def reports(self, report: Path) -> list[Path]:
        """Return the folder of the result."""
        return [report] if report.is_dir() else []

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print VTune's own summary."""
        tool = find_tool("vtune")
        if tool is not None:
            command = [tool.path, "-report", "summary", "-r", str(reports[0])]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            for said in (done.stdout.rstrip() or done.stderr.rstrip()).splitlines():
                print_line(console, said)
        print_line(
            console,
            f"\nMore: vtune -report hotspots -group-by task -r {reports[0]}, or vtune-gui {reports[0]}",
        )
