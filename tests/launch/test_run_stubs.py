"""Runs under stubs of the vendors' tools: program, environment, exit code, report and summary."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instrument.start import launch
from instrument.start.launch import VENDORS
from instrument.start.launch import run_tool as run_program
from tests.support import native
from tests.support.programs import run
from tests.traces import nsys_report, rocm_files

from .stubs import LAUNCH, Stub, launched, launching, request, stub

pytestmark = pytest.mark.vendor

STEPS = """
import sys
import instrument

with instrument.profile(sys.argv[1], schedule=instrument.schedule(wait=1, active=2, repeat=2)) as prof:
    for _ in range(int(sys.argv[2])):
        with instrument.annotate("forward"):
            pass
        prof.step()
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(STEPS)
    return path


def database(tmp_path: Path) -> Path:
    """Write the report of rocprofv3 for one step with a region."""
    return rocm_files.write_rocpd(tmp_path / "made.db", [rocm_files.STEP])


def program(script: Path, folder: Path, steps: int = 8, code: int = 0) -> list[str | Path]:
    return [sys.executable, script, folder / "out", str(steps), str(code)]


def ending(code: int = 0) -> list[str | Path]:
    """Return a program that only ends."""
    return [sys.executable, "-c", f"raise SystemExit({code})"]


def test_rocprofv3_ends_with_the_summary_of_its_database(tmp_path: Path) -> None:
    """The program's exit code is returned, the report is found and read, the regions are shown."""
    made = stub(tmp_path, "rocprofv3", version="1.0.0", report=database(tmp_path))
    done = launched("rocprof", tmp_path / "out", ending(3), made.environment())
    assert 3 == done.returncode, done.stderr
    assert ending(3) == made.calls[0]["program"]
    assert "instrument: rocprofv3 wrote " in done.stderr
    assert "Where the step went: CPU 8.90 us, GPU 2.00 us" in done.stderr
    assert "forward" in done.stderr
    assert "" == done.stdout


def test_windows_pause_and_resume_rocprofv3(tmp_path: Path, script: Path) -> None:
    """The tool's environment reaches the program, whose windows resume and pause the tool's library."""
    log, library = tmp_path / "roctx.jsonl", native.build("roctxlog", 'LIBRARY_NAME="preload"')
    made = stub(tmp_path, "rocprofv3", version="1.0.0", variables={
        "ROCP_TOOL_LIBRARIES": "tool.so", "LD_PRELOAD": str(library), "ROCTXLOG": str(log),
    })  # fmt: skip
    done = launched("rocprof", tmp_path / "out", program(script, tmp_path), made.environment())
    assert 0 == done.returncode, done.stderr
    ops = [line.split('"')[3] for line in log.read_text().splitlines()]
    step = ["start", "push", "pop", "end"]
    window = ["resume", *step, *step, "pause"]
    assert ["push", "pop", *window, "push", "pop", *window, "push", "pop", "push", "pop"] == ops
    assert "opened, but was not recorded" in done.stderr


def write_replays(tmp_path: Path, *, nodes: bool) -> Path:
    """Write the report of nsys for two replays of a CUDA graph, traced as a whole or by kernel."""
    made, tid = nsys_report.Database(), nsys_report.thread(42, 43)
    where = {"globalPid": nsys_report.HOST + (42 << 24), "streamId": 7}
    for start in (100, 200):
        made.call("cudaGraphLaunch_v10000", start, start + 10, tid, start)
        if nodes:
            made.kernel("gemm", start + 20, start + 50, correlationId=start, graphNodeId=1, **where)
        else:
            made.add(nsys_report.GRAPH, start + 20, start + 50, correlationId=start, graphId=9, **where)
    made.span("forward", 0, 300, tid)
    return made.write(tmp_path / f"nodes{nodes:d}.sqlite")


@pytest.mark.parametrize("nodes", [False, True])
def test_the_option_that_shows_kernels_inside_graphs(tmp_path: Path, nodes: bool) -> None:
    """After tracing graphs as a whole, the run and `summarize` name the option that shows their kernels."""
    report = write_replays(tmp_path, nodes=nodes)
    made = stub(tmp_path, "nsys", report=report)
    done = launched("nsys", tmp_path / "out", ending(), made.environment())
    assert 0 == done.returncode, done.stderr
    read = run([sys.executable, "-m", "instrument", "summarize", report], {**made.environment(), "COLUMNS": "100"})
    for text in (done.stderr, read.stdout):
        assert "forward" in text
        assert nodes != ("CUDA graph launches traced as a whole: 2." in text)
        assert nodes != ("--option=--cuda-graph-trace=node" in text)


@pytest.mark.parametrize("summary", ["0", "1"])
def test_the_summary_of_vtune(tmp_path: Path, summary: str) -> None:
    """VTune's own report is printed, unless summaries are off."""
    made = stub(tmp_path, "vtune", report=tmp_path)
    env = made.environment({"INSTRUMENT_SUMMARY": summary})
    done = launched("vtune", tmp_path / "out", ending(4), env)
    assert 4 == done.returncode
    assert "instrument: VTune wrote " in done.stderr
    assert (summary == "1") == ("Elapsed Time: 1.0s" in done.stderr) == ("vtune -report hotspots" in done.stderr)


def test_a_report_that_cannot_be_read(tmp_path: Path, script: Path) -> None:
    """The run itself succeeded: its exit code is returned, and the report is named."""
    made = stub(tmp_path, "nsys", report=script)
    done = launched("nsys", tmp_path / "out", ending(), made.environment())
    assert 0 == done.returncode
    assert re.search(r"the report cannot be summarized: cannot read \S+\.nsys-rep: damaged", done.stderr)
    assert "Traceback" not in done.stderr


def test_ncu_without_its_package_says_how_to_read_the_report(tmp_path: Path, script: Path) -> None:
    """The message has the command that installs the package, and ncu's own command."""
    made = stub(tmp_path, "ncu", report=script)
    env = made.environment()
    (tmp_path / "none" / "ncu_report").mkdir(parents=True)
    (tmp_path / "none" / "ncu_report" / "__init__.py").write_text("raise ImportError")
    env["PYTHONPATH"] = f"{tmp_path / 'none'}{os.pathsep}{env['PYTHONPATH']}"
    done = launched("ncu", tmp_path / "out", ending(), env)
    assert 0 == done.returncode
    assert "pip install ncu-report; or: ncu --import " in done.stderr


def test_each_rank_under_torchrun_has_a_tool_and_a_report(tmp_path: Path) -> None:
    """The launcher starts one tool for each rank; the reports are read as ranks of one job."""
    made = stub(tmp_path, "rocprofv3", version="1.0.0", report=database(tmp_path))
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    command = [torchrun, "--nproc-per-node=2", "--no-python", *ending()]
    done = launched("rocprof", tmp_path / "out", command, made.environment())
    assert 0 == done.returncode, done.stderr
    assert 2 == len(made.calls)
    assert [ending()] * 2 == [call["program"] for call in made.calls]
    assert "2 of 2 ranks" in done.stderr


def test_the_first_of_separately_launched_ranks_prints_the_summary(tmp_path: Path) -> None:
    """Each rank prints the path of its report; the summary is printed once."""
    made = stub(tmp_path, "rocprofv3", version="1.0.0", report=database(tmp_path))
    for rank, summary in (("0", True), ("1", False)):
        env = made.environment({"RANK": rank})
        done = launched("rocprof", tmp_path / "out", ending(), env)
        assert f"-rank{rank}." in done.stderr
        assert summary == ("Where the step went" in done.stderr)


@pytest.mark.parametrize(("windows", "steps", "code", "reason"), [
    (2, 0, 0, "window 1 (steps 1-2) was not reached, the loop ended in step 0; choose earlier steps"),
    (2, 8, 0, "a window opened, but was not recorded"),
    (0, 8, 5, "the program ended with exit code 5; see the profiler's messages above"),
    (0, 8, 0, "see its messages above"),
])  # fmt: skip
def test_a_missing_report_is_explained(
    tmp_path: Path, script: Path, windows: int, steps: int, code: int, reason: str
) -> None:
    """The reason comes from what this run wrote to the manifest, not from earlier runs."""
    made = stub(tmp_path, "nsys")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.jsonl").write_text('{"status": "failed", "window": 9, "reason": "of old"}\n')
    env = made.environment({"NVTX_INJECTION64_PATH": str(native.build("nvtxlog")), "NVTXLOG": os.devnull})
    env["NSYS_PROFILING_SESSION_ID"] = "1"
    command = program(script, tmp_path, steps, code)
    done = launched("nsys", tmp_path / "out", command, env, windows=windows)
    assert code == done.returncode
    assert f"instrument: Nsight Systems wrote no report: {reason}" in done.stderr
    assert "window 9" not in done.stderr
    assert "of old" not in done.stderr


@pytest.mark.parametrize(("code", "reason"), [
    (0, "no window opened, because no steps were found: "),
    (1, "the program ended with exit code 1 before a window opened"),
])  # fmt: skip
def test_a_program_without_steps(tmp_path: Path, code: int, reason: str) -> None:
    """The program has no steps, or fails before the first."""
    made = stub(tmp_path, "nsys")
    done = launched("nsys", tmp_path / "out", ending(code), made.environment())
    assert code == done.returncode
    assert reason in done.stderr


def test_a_damaged_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken lines are ignored; the others give the reason."""
    launch_request = request(tmp_path)
    launch_request.out.mkdir()
    path = launch_request.out / "manifest.jsonl"
    path.write_bytes(b"\xff{")
    launch.print_outcome(VENDORS["nsys"], launch_request, launch_request.out / "nsys-x", 0, 0)
    assert "no window opened" in capsys.readouterr().err
    skipped = '{"window": 1, "status": "skipped", "reason": "why not", "planned_steps": [1, 2]}'
    path.write_text(f'{{"window": 9}}\n{{"half\n{skipped}\n')
    launch.print_outcome(
        VENDORS["nsys"], launch_request, launch_request.out / "nsys-x", len(b'{"window": 9}\n'), 0
    )
    assert "window 1 (steps 1-2) was skipped, why not" in " ".join(capsys.readouterr().err.split())


LISTENER = """
import signal, sys, time
got = []
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(number))
print("ready", flush=True)
while signal.SIGUSR2 not in got:
    time.sleep(0.01)
print(*map(int, got), flush=True)
sys.exit(9)
"""


def interrupted(made: Stub, tmp_path: Path, source: str, *signals: int) -> tuple[int, str]:
    """Launch a program under a tool, send signals to the launching process, and return its code and output."""
    script = tmp_path / "listener.py"
    script.write_text(source)
    line = launching("rocprof", tmp_path / "out", [sys.executable, script])
    with subprocess.Popen(line, env=made.environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)  # two pending signals of one kind are delivered as one
        return process.wait(60), process.stdout.read()


def test_signals_reach_the_program_once_each(tmp_path: Path) -> None:
    """The program continues after signals that it handles, and its exit code is returned."""
    made = stub(tmp_path, "rocprofv3")
    sent = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT]
    sent = [
        number for number in sent if signal.getsignal(number) is not signal.SIG_IGN
    ]  # ignored signals, as under nohup
    code, output = interrupted(made, tmp_path, LISTENER, *sent, signal.SIGUSR2)
    assert (9, [*map(int, sent), int(signal.SIGUSR2)]) == (code, [int(word) for word in output.split()])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_program_that_does_not_handle_it(tmp_path: Path, number: int, code: int) -> None:
    """The exit code is 128 plus the number of the signal, as in a shell."""
    made = stub(tmp_path, "rocprofv3")
    source = "import time; print('ready', flush=True); time.sleep(60)"
    assert code == interrupted(made, tmp_path, source, number)[0]


def test_handlers_are_restored(tmp_path: Path) -> None:
    """After the run, the signal handlers of this process are the ones before it."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    command = list(map(str, ending(5)))
    assert 5 == run_program(command, os.environ, command)
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(FileNotFoundError):
        run_program([str(tmp_path / "none")], os.environ, command)
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def test_nohup_is_kept(tmp_path: Path) -> None:
    """A signal that this process ignores is not forwarded, and the program ignores it too."""
    made = stub(tmp_path, "rocprofv3")
    script = tmp_path / "script.py"
    script.write_text("import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)")
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{LAUNCH}"
    line = launching("rocprof", tmp_path / "out", [sys.executable, script])
    done = subprocess.run([*line[:2], code, *line[3:]], env=made.environment(), capture_output=True, text=True)
    assert "True\n" == done.stdout
