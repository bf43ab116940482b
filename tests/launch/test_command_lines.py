"""The command lines of the vendors' tools, by request, installed version and hardware."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from instrument.base.errors import LaunchError
from instrument.start import launch, vendors
from instrument.start.vendors import Tool

from .stubs import request, stub, without_rank

pytestmark = [pytest.mark.vendor, pytest.mark.usefixtures("without_rank")]
__all__ = ["without_rank"]

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
PROGRAM = [sys.executable, "train.py"]
HELP_2025 = """
\t-t, --trace=

\t   Possible values are 'cuda', 'cuda-hw', 'nvtx', 'cublas', 'osrt', 'cudnn', 'nccl' or 'none'.
\t   Select the API(s) to trace.
\t   Default is 'cuda,nvtx,osrt,opengl'.

\t--trace-fork-before-exec=

\t   Possible values are 'true' or 'false'.
"""


RANGE = ["--capture-range=nvtx", "--nvtx-capture=capture@instrument"]


def tool(name: str, *version: int) -> Tool:
    return Tool(name, f"/opt/{name}", version)


def command_line(*arguments: Any) -> list[str]:
    """Return the command line without the shells that separate the output of nsys from the program's."""
    line = launch.command_line(*arguments)
    for shell in (vendors.HIDE_STDOUT, vendors.RESTORE_STDOUT):
        at = next((at for at in range(len(line)) if line[at : at + len(shell)] == [*shell]), len(line))
        line = line[:at] + line[at + len(shell) :]
    return line


def own(line: list[str], *words: str) -> list[str]:
    """Return the part of a command line before ``words``, without the path of the report."""
    at = len(line) - len(words)
    assert list(words) == line[at:]
    return [re.sub(r"\d{8}T\d{6}-\d+", "TIME", word) for word in line[:at]]


@pytest.mark.parametrize(("windows", "capture"), [
    (2, [*RANGE, "--capture-range-end=repeat:2:sync"]), (None, [*RANGE, "--capture-range-end=repeat:100000:sync"]),
    (0, []),
])  # fmt: skip
def test_nsys_records_windows_or_the_whole_run(tmp_path: Path, windows: int | None, capture: list[str]) -> None:
    """A capture range does not have the default end, which kills the program; an endless plan has many windows."""
    line = command_line("nsys", request(tmp_path, windows=windows, extra=["--stats=true"]), tool("nsys", 2022, 4))
    assert [
        "/opt/nsys", "profile", line[2], *capture, "--sample=none", "--cpuctxsw=none", "--wait=primary",
        "--kill=none", "-o", f"{tmp_path}/out/nsys-TIME", "--stats=true",
    ] == own(line, *PROGRAM)  # fmt: skip


@pytest.mark.parametrize("close", ["", "3>&-"])
def test_nsys_prints_on_standard_error(tmp_path: Path, close: str) -> None:
    """The progress of nsys is not on the program's standard output, also if nsys passes no descriptor on."""
    installed = tmp_path / "nsys"
    installed.write_text(
        f'#!/bin/sh\necho progress\nuntil [ "$1" = /bin/sh ]; do shift; done\nexec "$@" {close}\n'
    )
    installed.chmod(0o755)
    launch_request = request(tmp_path, "sh", "-c", "echo result; echo complaint >&2; exit 3")
    line = launch.command_line("nsys", launch_request, Tool("nsys", str(installed), (2025, 1)))
    done = subprocess.run(line, capture_output=True, text=True)
    shown = ("result\n", "progress\ncomplaint\n") if not close else ("", "progress\nresult\ncomplaint\n")
    assert (3, *shown) == (done.returncode, done.stdout, done.stderr)


def test_nsys_gets_no_option_twice(tmp_path: Path) -> None:
    """An option that the user gives replaces the default, as nsys rejects an option given twice."""
    launch_request = request(tmp_path, windows=0, extra=["--sample=process-tree", "-t", "nvtx", "--kill=sigterm"])
    line = own(command_line("nsys", launch_request, tool("nsys", 2022, 4)), *PROGRAM)
    start = ["/opt/nsys", "profile", "--cpuctxsw=none", "--wait=primary", "-o", f"{tmp_path}/out/nsys-TIME"]
    assert [*start, *launch_request.extra] == line


@pytest.mark.parametrize(("help", "traces"), [
    (HELP_2025, "cuda,nvtx,nccl"),
    (HELP_2025.replace("'nccl'", "'ucx'"), "cuda,nvtx"),
    ("help of another form", "cuda,nvtx"),
])  # fmt: skip
def test_nsys_traces_cheap_apis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help: str, traces: str) -> None:
    """With a GPU, nsys traces CUDA and ranges, and collectives if the release can."""
    installed = stub(tmp_path, "nsys", help=help)
    monkeypatch.setattr(vendors, "_DEVICES", (str(tmp_path),))
    line = command_line("nsys", request(tmp_path), Tool("nsys", str(installed.folder / "nsys"), (2025, 1)))
    assert f"--trace={traces}" == line[2]


def test_nsys_traces_only_ranges_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, nsys traces only ranges."""
    monkeypatch.setattr(vendors, "_DEVICES", ())
    monkeypatch.setenv("PATH", "")
    assert "--trace=nvtx" == command_line("nsys", request(tmp_path), tool("nsys"))[2]


HELP_NCU = """
  --nvtx                                Enable NVTX support.
  --nvtx-push-pop-scope arg (=thread)   Set the NVTX push/pop range scope for filtering:
                                          thread
                                          process
  --support-32bit                       Support profiling processes launched from 32-bit applications.
"""


def ncu(tmp_path: Path, help: str) -> Tool:
    return Tool("ncu", str(stub(tmp_path, "ncu", help=help).folder / "ncu"), (2025, 3))


def test_ncu_measures_kernels_in_a_window_and_a_region(tmp_path: Path) -> None:
    """Ranges of both kinds and of any thread are included, with ncu's special characters escaped."""
    launch_request = request(tmp_path, regions=["a/b", "Range[i]*,+@", "plain"], launches=7)
    installed = ncu(tmp_path, HELP_NCU)
    assert [
        installed.path, "--target-processes", "all", "--profile-from-start", "off", "--nvtx",
        "--nvtx-push-pop-scope", "process",
        "--nvtx-include", r"instrument@a\/b/", "--nvtx-include", r"instrument@a\/b",
        "--nvtx-include", r"instrument@Range\[i\]\*\,\+\@/", "--nvtx-include", r"instrument@Range\[i\]\*\,\+\@",
        "--nvtx-include", "instrument@plain/", "--nvtx-include", "instrument@plain",
        "--launch-count", "7", "-o", f"{tmp_path}/out/ncu-TIME",
    ] == own(command_line("ncu", launch_request, installed), *PROGRAM)  # fmt: skip
    whole = own(command_line("ncu", request(tmp_path, windows=0), installed), *PROGRAM)
    assert ["--nvtx", "--launch-count", "100"] == whole[3:6]


def test_regions_are_start_end_ranges_without_the_scope_option(tmp_path: Path) -> None:
    """Start/end ranges belong to no thread, so that releases without the scope measure the backward pass too."""
    installed = ncu(tmp_path, HELP_NCU.replace("--nvtx-push-pop-scope", "--other"))
    line = own(command_line("ncu", request(tmp_path, regions=["backward"]), installed), *PROGRAM)
    assert ["env", "INSTRUMENT_NVTX_START_END=1"] == line[-2:]
    assert "--nvtx-push-pop-scope" not in line
    assert "env" not in command_line("ncu", request(tmp_path), installed)
    job = command_line("ncu", request(tmp_path, TORCHRUN, "train.py", regions=["backward"]), installed)
    assert ["env", "INSTRUMENT_NVTX_START_END=1", sys.executable, "-u", "train.py"] == job[-5:]


@pytest.mark.parametrize(("version", "format"), [((1, 0, 0), "rocpd"), ((0, 6, 0), "json"), ((), "json")])
def test_rocprofv3_records_selected_regions(tmp_path: Path, version: tuple[int, ...], format: str) -> None:
    """Versions that can write databases do; each process writes its own file."""
    traces = ["--hip-trace", "--kernel-trace", "--marker-trace", "--memory-copy-trace"]
    line = own(command_line("rocprof", request(tmp_path), tool("rocprof", *version)), *PROGRAM)
    assert [
        "/opt/rocprof", *traces, "--selected-regions", "-f", format, "-d", f"{tmp_path}/out",
        "-o", "rocprof-TIME.%pid%", "--",
    ] == line  # fmt: skip
    whole = command_line("rocprof", request(tmp_path, windows=0), tool("rocprof", *version))
    assert "--selected-regions" not in whole


def test_vtune_starts_paused(tmp_path: Path) -> None:
    """VTune starts paused, windows resume it, and another analysis than hotspots can be chosen."""
    line = own(command_line("vtune", request(tmp_path), tool("vtune")), *PROGRAM)
    report = f"{tmp_path}/out/vtune-TIME"
    start = ["-start-paused", "-return-app-exitcode", "-r", report]
    assert ["/opt/vtune", "-collect", "hotspots", *start, "--"] == line
    other = request(tmp_path, windows=0, extra=["-collect", "gpu-hotspots"])
    line = own(command_line("vtune", other, tool("vtune")), *PROGRAM)
    assert ["/opt/vtune", "-return-app-exitcode", "-r", report, "-collect", "gpu-hotspots", "--"] == line


def reported(line: list[str]) -> str:
    """Return the name of the report."""
    return re.sub(r"\d{8}T\d{6}-\d+", "TIME", Path(line[line.index("-o") + 1]).name)


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_a_rank_is_in_the_name_of_its_report(tmp_path: Path, variable: str) -> None:
    """The rank comes from the variables of torchrun, MPI or Slurm in the launching process."""
    launch_request = request(tmp_path, environment={**os.environ, variable: "12"})
    assert "nsys-TIME-rank12" == reported(command_line("nsys", launch_request, tool("nsys")))


def test_a_report_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is taken, by a report of any window, gets a number."""
    monkeypatch.setattr(launch.time, "strftime", lambda format: "19700101T000000")
    out = tmp_path / "out"
    out.mkdir()
    names = []
    for existing in ("{}.1.nsys-rep", "{}.nsys-rep", "{}.2.sqlite"):
        names.append(Path(command_line("nsys", request(tmp_path), tool("nsys"))[-3]).name)
        (out / existing.format(names[-1])).touch()
    name = f"nsys-19700101T000000-{os.getpid()}"
    assert [name, f"{name}-2", f"{name}-3"] == names
    folder = command_line("vtune", request(tmp_path), tool("vtune"))
    (Path(folder[folder.index("-r") + 1])).mkdir()
    assert folder != command_line("vtune", request(tmp_path), tool("vtune"))


def test_percent_signs_in_the_folder_stay(tmp_path: Path) -> None:
    """Nsys and ncu would replace what follows a percent sign."""
    launch_request = request(tmp_path / "100%q")
    for name, shown in (("nsys", "100%%q"), ("ncu", "100%%q"), ("rocprof", "100%q")):
        line = command_line(name, launch_request, tool(name))
        assert f"{tmp_path}/{shown}/out" in (line[line.index("-d" if name == "rocprof" else "-o") + 1])


JOBS: list[tuple[list[str], list[str], list[str]]] = [
    ([TORCHRUN, "--nproc-per-node=2", "train.py", "--lr", "1"], [TORCHRUN, "--nproc-per-node=2"],
     [sys.executable, "-u", "train.py", "--lr", "1"]),
    ([TORCHRUN, "--nproc-per-node", "2", "-m", "package.train", "-m"], [TORCHRUN, "--nproc-per-node", "2"],
     [sys.executable, "-u", "-m", "package.train", "-m"]),
    ([TORCHRUN, "--standalone", "--no-python", "./train", "x"], [TORCHRUN, "--standalone"], ["./train", "x"]),
    ([sys.executable, "-m", "torch.distributed.run", "--standalone", "train.py"],
     [sys.executable, "-m", "torch.distributed.run", "--standalone"], [sys.executable, "-u", "train.py"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "launcher", "program"), JOBS)
@pytest.mark.parametrize("name", ["nsys", "ncu", "rocprof"])
def test_each_rank_of_a_job_runs_under_its_own_tool(
    tmp_path: Path, command: list[str], launcher: list[str], program: list[str], name: str
) -> None:
    """The launcher starts the tool, which starts the launcher's program."""
    line = command_line(name, request(tmp_path, *command), tool(name))
    start = [*launcher, "--no_python"]
    assert start == line[: len(start)]
    assert program == line[-len(program) :]
    alone = command_line(name, request(tmp_path), tool(name))
    rank = {"nsys": "-rank%q{RANK}", "ncu": "-rank%q{RANK}", "rocprof": "-rank%env{RANK}%.%pid%"}[name]
    assert reported(alone).replace(".%pid%", "") + rank == reported(line)
    added = [word for word in line[len(start) : -len(program)] if word not in alone]
    expected = ["--kernel-name", "regex:^(?!nccl)"] if name == "ncu" else []
    assert expected == [word for word in added if not word.startswith(("-o", str(tmp_path), "rocprof-"))]


def test_dashes_before_the_script(tmp_path: Path) -> None:
    """The end mark of torchrun's options is omitted: the tool would be taken for the script."""
    command = [TORCHRUN, "--nproc-per-node", "2", "--", "train.py", "--", "x"]
    line = command_line("nsys", request(tmp_path, *command), tool("nsys"))
    assert line[3] == "--no_python"
    assert line[-3:] == ["train.py", "--", "x"]


def test_restarted_ranks_have_other_reports(tmp_path: Path) -> None:
    """If the launcher may restart ranks, the number of the restart is in the name."""
    line = command_line("nsys", request(tmp_path, TORCHRUN, "--max-restarts=2", "train.py"), tool("nsys"))
    assert "nsys-TIME-rank%q{RANK}-restart%q{TORCHELASTIC_RESTART_COUNT}" == reported(line)


def test_accelerate_launch_is_a_launcher(tmp_path: Path) -> None:
    """The options of `accelerate launch` end where the script begins."""
    pytest.importorskip("accelerate")
    accelerate = str(Path(sys.executable).parent / "accelerate")
    command = [accelerate, "launch", "--num_processes", "2", "--cpu", "train.py", "--lr", "1"]
    line = command_line("nsys", request(tmp_path, *command), tool("nsys"))
    assert [*command[:5], "--no_python", "/opt/nsys"] == line[:7]
    assert [sys.executable, "-u", "train.py", "--lr", "1"] == line[-5:]


@pytest.mark.parametrize("command", [[TORCHRUN, "--nonsense", "x"], [TORCHRUN]])
def test_a_faulty_job_is_left_to_its_launcher(tmp_path: Path, command: list[str]) -> None:
    """The launcher reports its wrong options."""
    line = command_line("nsys", request(tmp_path, *command), tool("nsys"))
    assert ["/opt/nsys", "profile"] == line[:2]
    assert command == line[-len(command) :]


def test_vtune_follows_all_ranks_itself(tmp_path: Path) -> None:
    """One result of VTune contains every process."""
    command = [TORCHRUN, "--nproc-per-node=2", "train.py"]
    assert ["--", *command] == command_line("vtune", request(tmp_path, *command), tool("vtune"))[-4:]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"profiler": "perf"}, ValueError, "\"profiler\" must be one of nsys, ncu, rocprof, vtune: 'perf'"),
    ({"profiler": "vtune"}, LaunchError, "VTune is not installed or not on PATH; get it from https://www.intel.com"),
    ({"command": ["no-such-program"]}, LaunchError, "program not found: no-such-program"),
    ({"command": []}, LaunchError, "no program to run"),
])  # fmt: skip
def test_requests_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], error: type, message: str
) -> None:
    """One message says what is missing and how to get it."""
    launch_request = launch.LaunchRequest(
        command=arguments.get("command", PROGRAM), out=tmp_path, windows=2, environment=dict(os.environ)
    )
    installed = None if "profiler" in arguments else tool("nsys")
    if installed is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(error, match=re.escape(message)):
        command_line(arguments.get("profiler", "nsys"), launch_request, installed)


EXTRA = ["--trace=cuda,nvtx,osrt,cudnn,cublas", "--cuda-graph-trace=node"]


@pytest.mark.nsys
@pytest.mark.parametrize(("windows", "extra"), [(0, ()), (1, ()), (2, ()), (None, ()), (0, EXTRA)])
def test_the_real_nsys_accepts_the_options(tmp_path: Path, windows: int | None, extra: list[str]) -> None:
    """The installed nsys accepts the options of every plan, and those that the documentation recommends."""
    from tests.support.nsys import alone, nsys, recorded
    from tests.support.programs import environment, run

    nsys()
    program = [sys.executable, "-c", "raise SystemExit(7)"]
    launch_request = request(tmp_path, *program, windows=windows, extra=extra)
    (tmp_path / "out").mkdir()

    def record() -> subprocess.CompletedProcess[str]:
        with alone():
            return run(command_line("nsys", launch_request), environment(), check=False, timeout=120)

    done = recorded(record)
    assert 7 == done.returncode, done.stderr
