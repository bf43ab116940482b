"""Nsight Systems: records a timeline of regions, CUDA calls and GPU work."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .installed import Tool, help_of
from .reports import matching, show_traces
from .request import LaunchRequest

# Without osrt, cudnn and cublas: tracing them slows down a loop that is bound by its launches.
_FIXED_OPTIONS = ("cuda", "nvtx")
_DEVICES = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/proc/driver/nvidia/version")
_MAX_WINDOWS = 100_000  # windows
# nsys writes its progress to standard output, which belongs to the program. So nsys runs with standard error
# instead, and passes the original on as descriptor 3, which the program gets back as its standard output.
_HIDE_STDOUT = ("/bin/sh", "-c", 'exec "$@" 3>&1 >&2', "sh")
_RESTORE_STDOUT = ("/bin/sh", "-c", 'if { true >&3; } 2>/dev/null; then exec "$@" >&3 3>&-; fi; exec "$@"', "sh")
_LONG = {"-t": "--trace", "-s": "--sample", "-c": "--capture-range", "-p": "--nvtx-capture"}


class Nsys:
    """Builds ``nsys profile`` command lines and reads ``.nsys-rep``."""

    title = "Nsight Systems"
    get = "https://developer.nvidia.com/nsight-systems"
    rank: str | None = "%q{RANK}"
    percent = "%%"

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        By default nsys kills the program at the end of a capture range; with repeat it does not. With sync, which
        2022.4 accepts and ignores, each report is written as its window ends. Without wait=primary nsys waits for
        processes that the program left behind; with kill=none the end of a recording does not end the program.
        """
        options = [f"--trace={','.join(_supported_traces(tool))}"]
        if request.windows != 0:
            end = f"--capture-range-end=repeat:{request.windows or _MAX_WINDOWS}:sync"
            options += ["--capture-range=nvtx", "--nvtx-capture=capture@instrument", end]
        options += ["--sample=none", "--cpuctxsw=none", "--wait=primary", "--kill=none"]
        given = {_LONG.get(word, word) for word in (extra.partition("=")[0] for extra in request.extra)}
        own = [word for word in options if word.partition("=")[0] not in given]  # nsys accepts no option twice
        line = [tool.path, "profile", *own, "-o", report, *request.extra]
        return [*_HIDE_STDOUT, *line, *_RESTORE_STDOUT]

    def reports(self, report: Path) -> list[Path]:
        """Return the reports, one for each window and rank."""
        return matching(report, ".nsys-rep")

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print the regions and the GPU time."""
        show_traces(reports, console)


def _supported_traces(tool: Tool) -> list[str]:
    """Return the traces that nsys can record here, with collectives if this release can trace them."""
    if not (any(Path(device).exists() for device in _DEVICES) or shutil.which("nvidia-smi")):
        return ["nvtx"]
    section = re.search(r"--trace[ =](.*?)\n\s*(-\w, *)?--\w", help_of(tool, "profile"), re.DOTALL)
    return [*_FIXED_OPTIONS, *(["nccl"] if section and "'nccl'" in section[1] else [])]
