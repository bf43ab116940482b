"""rocprofv3: records a timeline of regions, HIP calls and GPU work on AMD GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .installed import Tool
from .reports import matching, show_traces
from .request import LaunchRequest

_ROCPD = (1, 0)  # the first version that writes databases


class Rocprof:
    """Builds ``rocprofv3`` command lines and reads its databases, or the JSON of older versions."""

    title = "rocprofv3"
    get = "the package rocprofiler-sdk of ROCm"
    rank: str | None = "%env{RANK}%"
    percent = "%"

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program, each of whose processes writes a file."""
        folder, name = Path(report).parent, Path(report).name
        return [
            tool.path, "--hip-trace", "--kernel-trace", "--marker-trace", "--memory-copy-trace",
            *(["--selected-regions"] * (request.windows != 0)), "-f", "json" if tool.version < _ROCPD else "rocpd",
            "-d", str(folder), "-o", f"{name}.%pid%", *request.extra, "--",
        ]  # fmt: skip

    def reports(self, report: Path) -> list[Path]:
        """Return the files, one for each process."""
        return [*matching(report, "_results.db"), *matching(report, "_results.json")]

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print the regions and the GPU time."""
        show_traces(reports, console)
