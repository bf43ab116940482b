"""Nsight Systems: a timeline of regions, CUDA calls and GPU work."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .installed import Tool, help_of
from .reports import matching, show_traces
from .request import LaunchRequest

# Not osrt, cudnn and cublas: to trace them slows down a loop that the CPU bounds by its launches.
_ALWAYS = ("cuda", "nvtx")
_DEVICES = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/proc/driver/nvidia/version")
_ENDLESS = 100_000  # windows
# nsys writes its progress to standard output, which is to be the program's alone. So nsys gets standard error in
# its place, and passes the other one on as descriptor 3 to the program, which gets it back.
_ASIDE = ("/bin/sh", "-c", 'exec "$@" 3>&1 >&2', "sh")
_BACK = ("/bin/sh", "-c", 'if { true >&3; } 2>/dev/null; then exec "$@" >&3 3>&-; fi; exec "$@"', "sh")
_LONG = {"-t": "--trace", "-s": "--sample", "-c": "--capture-range", "-p": "--nvtx-capture"}


class Nsys:
    """Builds ``nsys profile`` and reads ``.nsys-rep``."""

    title = "Nsight Systems"
    get = "https://developer.nvidia.com/nsight-systems"
    rank: str | None = "%q{RANK}"
    percent = "%%"

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        The default end of a capture range kills the program: repeat never does. With sync, which 2022.4 takes
        and ignores, each report is written as its window ends. Without wait=primary nsys waits for whatever the
        program left running behind it; with kill=none no end of a recording is that of the program.
        """
        options = [f"--trace={','.join(_traces(tool))}"]
        if request.windows != 0:
            end = f"--capture-range-end=repeat:{request.windows or _ENDLESS}:sync"
            options += ["--capture-range=nvtx", "--nvtx-capture=capture@instrument", end]
        options += ["--sample=none", "--cpuctxsw=none", "--wait=primary", "--kill=none"]
        theirs = {_LONG.get(word, word) for word in (extra.partition("=")[0] for extra in request.extra)}
        ours = [word for word in options if word.partition("=")[0] not in theirs]  # nsys takes none twice
        line = [tool.path, "profile", *ours, "-o", report, *request.extra]
        return [*_ASIDE, *line, *_BACK]

    def reports(self, report: Path) -> list[Path]:
        """Return the reports, one a window and rank."""
        return matching(report, ".nsys-rep")

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print the regions and the time of the GPU."""
        show_traces(reports, console)


def _traces(tool: Tool) -> list[str]:
    """What to trace of what is there; collectives where this release knows them."""
    if not (any(Path(device).exists() for device in _DEVICES) or shutil.which("nvidia-smi")):
        return ["nvtx"]
    section = re.search(r"--trace[ =](.*?)\n\s*(-\w, *)?--\w", help_of(tool, "profile"), re.DOTALL)
    return [*_ALWAYS, *(["nccl"] if section and "'nccl'" in section[1] else [])]
