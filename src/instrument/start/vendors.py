"""The vendors' profilers: whether each is installed, its command line, its reports, what is printed of them."""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..base.config import NVTX_START_END
from ..base.units import counted, natural_key
from ..show.terminal.console import print_line

COMMANDS = {"nsys": "nsys", "ncu": "ncu", "rocprof": "rocprofv3", "vtune": "vtune"}
"""The program of each tool, by the name of the tool on the command line."""


@dataclass(frozen=True)
class Tool:
    """An installed profiler.

    Attributes:
        name: its name in `COMMANDS`.
        path: the path of its program.
        version: its version, such as (2022, 4, 2); empty if unknown.
    """

    name: str
    path: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{COMMANDS[self.name]} {'.'.join(map(str, self.version)) or 'of unknown version'}"


def _said(*command: str) -> tuple[str, str]:
    """Return what a tool prints on standard output and on standard error; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    return done.stdout, done.stderr


def find_tool(name: str) -> Tool | None:
    """Return the tool ``name`` of `COMMANDS` that is on ``PATH``; None if it is not installed."""
    path = shutil.which(COMMANDS[name])
    if path is None:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)*", "".join(_said(path, "--version")))
    return Tool(name, path, tuple(map(int, version[0].split("."))) if version else ())


@dataclass(frozen=True)
class LaunchRequest:
    """A program to run under a vendor's profiler.

    Attributes:
        command: the program with its arguments.
        out: the folder for reports and for the ``manifest.jsonl`` of the windows.
        windows: the number of windows in the schedule; None if endless or unknown; 0 records the whole run.
        environment: the environment variables of the program.
        regions: measure only the kernels inside these regions (ncu).
        launches: measure at most this many kernel launches (ncu); None is 100.
        extra: further options, passed to the tool unchanged.
    """

    command: Sequence[str]
    out: Path
    windows: int | None
    environment: Mapping[str, str]
    regions: Sequence[str] = ()
    launches: int | None = None
    extra: Sequence[str] = ()


_MAX_WINDOWS_READ = 10  # that are read: nsys exports each to a database first


def matching(report: Path, suffix: str) -> list[Path]:
    """Return the files whose names begin like ``report`` and end with ``suffix``, in numeric order."""
    files = report.parent.glob(f"{glob.escape(report.name)}[!0-9]*")  # rank 1 is not rank 10
    return sorted((path for path in files if path.name.endswith(suffix)), key=lambda path: natural_key(path.name))


class Vendor:
    """A vendor's profiler.

    Attributes:
        title: the profiler's name for people.
        get: where to get the profiler.
        rank: the placeholder for the rank of a process in the name of its report; None if one report contains all.
        percent: the escape for a percent sign in that name.
        suffixes: how the names of its reports end.
    """

    title: str
    get: str
    rank: str | None = "%q{RANK}"
    percent = "%%"
    suffixes: tuple[str, ...]

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        Args:
            request: the program to run.
            tool: the installed profiler.
            report: the path of the report without its suffix.
            workers: whether each rank of a job runs under its own tool.
        """
        raise NotImplementedError

    def reports(self, report: Path) -> list[Path]:
        """Return the written reports, in order: one for each rank, and of nsys for each window."""
        return [path for suffix in self.suffixes for path in matching(report, suffix)]

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print the sum of the windows of one process, or the last window of each rank side by side."""
        # Not at the top: a program starts under the tool 0.2 s earlier.
        from ..read.jobs.read import read_file, read_traces
        from ..read.jobs.trace_files import rank_from_name
        from ..show.terminal.trace_report import print_trace_set, print_windows

        by_rank: dict[int | None, list[Path]] = defaultdict(list)
        for path in reports:
            by_rank[rank_from_name(path)].append(path)
        if len(by_rank) > 1:
            traces = read_traces([paths[-1] for paths in by_rank.values()])
            print_trace_set(traces, "auto", console=console)
            return
        read = [read_file(path) for path in reports[:_MAX_WINDOWS_READ]]
        windows = [trace for trace in read if trace.regions or trace.gpu or trace.runtime]
        if not windows:
            print_line(console, f"Nothing was recorded in {', '.join(map(str, reports))}")
            return
        print_windows([(trace, None) for trace in windows], "auto", console=console)
        if len(reports) > _MAX_WINDOWS_READ:
            more = counted(len(reports) - _MAX_WINDOWS_READ, "more window")
            print_line(console, f"... and {more}: instrument summarize {reports[-1]}")
        processes = {trace.threads[thread].process for trace in windows for thread in trace.steps.thread.tolist()}
        if len(processes) > 1:
            print_line(console, f"The steps of {len(processes)} processes are in one report, and are added up.")


# Without osrt, cudnn and cublas: tracing them slows down a loop that is bound by its launches.
_FIXED_OPTIONS = ("cuda", "nvtx")
_DEVICES = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/proc/driver/nvidia/version")
_ENDLESS = 100_000  # windows
# nsys writes its progress to standard output, which belongs to the program. So nsys runs with standard error
# instead, and passes the original on as descriptor 3, which the program gets back as its standard output.
HIDE_STDOUT = ("/bin/sh", "-c", 'exec "$@" 3>&1 >&2', "sh")
RESTORE_STDOUT = ("/bin/sh", "-c", 'if { true >&3; } 2>/dev/null; then exec "$@" >&3 3>&-; fi; exec "$@"', "sh")
_NSYS_LONG = {"-t": "--trace", "-s": "--sample", "-c": "--capture-range", "-p": "--nvtx-capture"}


class Nsys(Vendor):
    """Builds ``nsys profile`` command lines and reads ``.nsys-rep``."""

    title = "Nsight Systems"
    get = "https://developer.nvidia.com/nsight-systems"
    suffixes = (".nsys-rep",)

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        By default nsys kills the program at the end of a capture range; with repeat it does not. With sync, which
        2022.4 accepts and ignores, each report is written as its window ends. Without wait=primary nsys waits for
        processes that the program left behind; with kill=none the end of a recording does not end the program.
        """
        options = [f"--trace={','.join(_supported_traces(tool))}"]
        if request.windows != 0:
            end = f"--capture-range-end=repeat:{request.windows or _ENDLESS}:sync"
            options += ["--capture-range=nvtx", "--nvtx-capture=capture@instrument", end]
        options += ["--sample=none", "--cpuctxsw=none", "--wait=primary", "--kill=none"]
        given = {_NSYS_LONG.get(word, word) for word in (extra.partition("=")[0] for extra in request.extra)}
        own = [word for word in options if word.partition("=")[0] not in given]  # nsys accepts no option twice
        line = [tool.path, "profile", *own, "-o", report, *request.extra]
        return [*HIDE_STDOUT, *line, *RESTORE_STDOUT]


def _supported_traces(tool: Tool) -> list[str]:
    """Return the traces that nsys can record here, with collectives if this release can trace them."""
    if not (any(Path(device).exists() for device in _DEVICES) or shutil.which("nvidia-smi")):
        return ["nvtx"]
    section = re.search(r"--trace[ =](.*?)\n\s*(-\w, *)?--\w", _said(tool.path, "profile", "--help")[0], re.DOTALL)
    return [*_FIXED_OPTIONS, *(["nccl"] if section and "'nccl'" in section[1] else [])]


_MAX_LAUNCHES = 100  # each kernel is replayed several times, with caches flushed in between
_NCU_SCOPE = "--nvtx-push-pop-scope"
_NCU_SPECIAL = re.compile(r"([@,\[\]/*+\\])")


class Ncu(Vendor):
    """Builds ``ncu`` command lines and reads ``.ncu-rep``."""

    title = "Nsight Compute"
    get = "https://developer.nvidia.com/nsight-compute"
    suffixes = (".ncu-rep",)

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        Only kernels inside a window (by cudaProfilerStart) and inside one of the regions (by its NVTX range, of
        either kind) are measured. By default a push/pop range contains what its own thread launches, which is
        almost nothing in "backward", as autograd launches from another thread. Releases that cannot filter by
        process get start/end ranges. In a job of several ranks, kernels of collectives are excluded: one that is
        replayed alone would wait for the other ranks forever.
        """
        names = [_NCU_SPECIAL.sub(r"\\\1", name) for name in request.regions]
        expressions = [f"instrument@{name}{kind}" for name in names for kind in ("/", "")]
        inside = [word for expression in expressions for word in ("--nvtx-include", expression)]
        scope: Sequence[str] = ()
        ranges: Sequence[str] = ()
        if inside and _NCU_SCOPE in _said(tool.path, "--help")[0]:
            scope = (_NCU_SCOPE, "process")
        elif inside:
            ranges = ("env", f"{NVTX_START_END}=1")
        return [
            tool.path, "--target-processes", "all", *(["--profile-from-start", "off"] * (request.windows != 0)),
            "--nvtx", *scope, *inside, "--launch-count", str(request.launches or _MAX_LAUNCHES),
            *(["--kernel-name", "regex:^(?!nccl)"] * workers), "-o", report, *request.extra, *ranges,
        ]  # fmt: skip

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print a table of kernels by region, or the command that prints one."""
        from ..read.profilers.nsight import read_kernels
        from ..show.terminal.console import show
        from ..show.terminal.trace_report import measured_kernels

        try:
            kernels = [kernel for path in reports for kernel in read_kernels(path)]
        except ImportError as error:
            print_line(console, f"instrument: {error}; or: ncu --import {reports[0]}")
            return
        show(console, measured_kernels(kernels, reports[0]))


_ROCPD = (1, 0)  # the first version that writes databases


class Rocprof(Vendor):
    """Builds ``rocprofv3`` command lines and reads its databases, or the JSON of older versions."""

    title = "rocprofv3"
    get = "the package rocprofiler-sdk of ROCm"
    rank = "%env{RANK}%"
    percent = "%"
    suffixes = ("_results.db", "_results.json")

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program, each of whose processes writes a file."""
        folder, name = Path(report).parent, Path(report).name
        return [
            tool.path, "--hip-trace", "--kernel-trace", "--marker-trace", "--memory-copy-trace",
            *(["--selected-regions"] * (request.windows != 0)), "-f", "json" if tool.version < _ROCPD else "rocpd",
            "-d", str(folder), "-o", f"{name}.%pid%", *request.extra, "--",
        ]  # fmt: skip


class Vtune(Vendor):
    """Builds ``vtune -collect`` command lines; VTune itself summarizes a result."""

    title = "VTune"
    get = "https://www.intel.com/content/www/us/en/developer/tools/oneapi/vtune-profiler-download.html"
    rank = None
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
