"""scripts/gpu_check: rehearsals of each check without a GPU, their results, time limits and kept traces."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from scripts.gpu_check import __main__ as command
from scripts.gpu_check import costs, driver, edges, lengths, regions, runner, table, tools, windows
from scripts.gpu_check.check import Check, CheckContext, FailedError, Run, SkippedError

from instrument.base.config import settings
from tests.support import warm

pytestmark = pytest.mark.vendor

ROOT = Path(__file__).parents[1]
# Checks that run completely on the CPU; `nsys`, the tests and the full GPU have separate tests below.
REHEARSED = [
    driver.environment,
    driver.untouched,
    edges.detector,
    edges.graph,
    regions.tree,
    regions.lanes,
    regions.handles,
    lengths.ahead,
    costs.launches,
    costs.checkpointing,
    costs.compiled,
    tools.doctor,
    windows.first,
    costs.region,
    windows.stall,
    windows.terminated,
    windows.growth,
]


def run_warm(command: list[str], *, timeout: float, env: dict[str, str], **_: Any) -> Any:
    return warm.run(command, env, timeout=timeout)


@pytest.mark.parametrize("check", REHEARSED, ids=lambda check: check.__name__)
def test_rehearsal(tmp_path: Path, check: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check completes on the CPU, where each operator of a trace gets an emulated kernel, and has figures."""
    monkeypatch.setattr("scripts.gpu_check.check.run", run_warm)
    monkeypatch.setattr(edges, "WARM_UPS", (3,))
    monkeypatch.setattr(edges, "WINDOWS", ((3, 5),))
    monkeypatch.setattr(windows, "FIRST", 2)
    monkeypatch.setattr(windows, "MANY", 4)
    context = CheckContext(tmp_path, "cpu")
    check(context)
    assert context.figures
    assert all(isinstance(value, (int, float, str)) for value in context.figures.values())


def test_rehearsal_of_forks(tmp_path: Path) -> None:
    """The check runs in a new process, as a fork after multi-threaded computation may hang in OpenMP."""
    code = """
from pathlib import Path
from scripts.gpu_check.check import CheckContext
from scripts.gpu_check.driver import fork
context = CheckContext(Path(), "cpu")
fork(context)
print(context.figures)
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = warm.run([sys.executable, "-c", code], os.environ | {"PYTHONPATH": path}, cwd=tmp_path, check=True)
    assert "children that used the GPU" in done.stdout


def test_all_are_rehearsed() -> None:
    """All checks are rehearsed except those that run GPU tests or a vendor's tool, which have separate tests."""
    others = {"fork", "nsys", "ncu", "tests-alone", "tests"}
    assert {check.name for check in command.CHECKS if check.run not in REHEARSED} == others


def test_a_check_without_a_recording_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check fails when the library does not record."""
    monkeypatch.setattr(settings, "enabled", False)
    with pytest.raises(FailedError, match="one window of the steps"):
        edges.detector(CheckContext(tmp_path, "cpu"))


def test_a_driver_that_is_initialized_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails even if the forked children report that they trained."""
    monkeypatch.setattr(driver, "_forked", lambda _: "trained")
    monkeypatch.setattr(CheckContext, "cuda", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(FailedError, match="CUDA is initialized"):
        driver.fork(CheckContext(tmp_path, "cpu"))


def test_a_child_that_cannot_train_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the child's error, and when the child was forked."""
    monkeypatch.setattr(driver, "_forked", lambda _: "RuntimeError: initialization error")
    with pytest.raises(FailedError, match="'made': 'RuntimeError: initialization error', 'entered'"):
        driver.fork(CheckContext(tmp_path, "cpu"))


class GpuLikeContext(CheckContext):
    """A context that treats CPU times as GPU times."""

    rehearsal = False


def test_a_ratio_above_its_limit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the ratio, and the figures have all times and the limits."""
    context = GpuLikeContext(tmp_path, "cpu")
    measured = costs._Costs(context, rounds=1)
    took = iter([2.0, 2.1, 3.0])
    monkeypatch.setattr(measured, "_median_ms", lambda call: call())
    for name, at_most in {"before": None, "cheap": 1.1, "after a_window": 1.1}.items():
        now = next(took)
        measured.measure(name, lambda now=now: now, at_most)
    with pytest.raises(FailedError, match=r'^after a_window 1\.50 x, expected at most 1\.1 x "before"$'):
        measured.verdict()
    assert context.figures["cheap ratio"] == 1.05
    assert context.expected == dict.fromkeys(("cheap ratio", "after a_window ratio"), 'at most 1.1 x "before"')


def test_a_graph_without_kernels_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is recorded without kernels fails the check."""
    monkeypatch.setattr(edges, "python", lambda *_: SimpleNamespace(stdout="loss 1\n" * 103, stderr=""))
    monkeypatch.setattr(edges, "recorded", lambda *_: None)
    monkeypatch.setattr(CheckContext, "trace", lambda *_: None)
    monkeypatch.setattr("instrument.read.jobs.read.read_file", lambda _: SimpleNamespace(kernels=[]))
    with pytest.raises(FailedError, match="0 kernels in steps 3-5, expected at least 15"):
        edges.graph(CheckContext(tmp_path, "cpu"))


FULL = "CUDA error: out of memory"


@pytest.mark.parametrize(
    ("status", "sentence", "wrong"),
    [("note", f"H100; the first cannot be used now: {FULL}", ""), ("ok", "H100", "GPU: expected a note"),
     ("note", "H100; hidden", "GPU does not say why")],
)  # fmt: skip
def test_the_doctor_on_a_full_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, sentence: str, wrong: str
) -> None:
    """The check requires a note with the reason for a full GPU."""
    proof = f"regions arrive (proved); GPU work is not proved, as no GPU can be used now: {FULL}"
    checks = [
        {"name": "GPU", "status": status, "sentence": sentence},
        {"name": "torch.profiler", "status": "note", "sentence": proof},
    ]
    done = SimpleNamespace(returncode=0, stdout=json.dumps({"checks": checks}), stderr="")
    monkeypatch.setattr(tools, "python", lambda *_, **__: done)
    monkeypatch.setattr(tools, "filled", lambda _: [])
    context = CheckContext(tmp_path, "cuda")
    if wrong:
        with pytest.raises(FailedError, match=wrong):
            tools.doctor(context)
    else:
        tools.doctor(context)
    assert context.figures["GPU"] == f"{status}: {sentence}"


# The tests that a check runs

# One test that passes, one that passes or fails, and one that is skipped.
TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_one(): pass
def test_two(): assert {two}
def test_three(): pytest.skip("no ranges")
"""


@pytest.mark.parametrize("at_once", [(), ("-p", "xdist", "--numprocesses", "2")], ids=["one", "two"])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TESTS.format(two=True), {"passed": 2, "skipped": 1, "skipped as": "no ranges"}),
        (TESTS.format(two=False), "test_it.py::test_two"),
        (TESTS.replace("test_one", "one").replace("test_two", "two"), "no ranges"),
        ("import nothing_of_that_name", "test_it.py"),
        (TESTS.format(two="__import__('time').sleep(60)"), "did not end in 4 s"),
    ],
)
def test_the_tests_that_a_check_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    expected: dict[str, Any] | str,
    at_once: tuple[str, ...],
) -> None:
    """Passed tests are counted, failed tests are named, and skipped tests have their reason."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\nmarkers = gpu: x\n")
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    monkeypatch.setattr(tools, "_TEST_S", 50)
    context = CheckContext(tmp_path, "cpu", limit_s=9 if "sleep" in source else 60)
    stdout = os.dup(1)
    with (tmp_path / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        try:
            if isinstance(expected, dict):
                tools.pytest(context, *tools.gpu_tests(), *at_once)
                assert context.figures == expected
            else:
                error = SkippedError if expected == "no ranges" else FailedError
                with pytest.raises(error, match=expected):
                    tools.pytest(context, "tests/test_it.py", *at_once)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


def test_the_lists_have_every_gpu_test() -> None:
    """Every file with tests marked `gpu` is in one of the two lists, and their files exist."""
    tools_alone = [ROOT / name for name in tools.ALONE]
    assert all("mark.gpu" in path.read_text() for path in tools_alone)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert marked == {*tools_alone, *(ROOT / name for name in tools.gpu_tests())}
    path, _, name = tools.NCU.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_a_tool_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is skipped with the name of the tool."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SkippedError, match="nsys is not on the PATH"):
        tools.nsys(CheckContext(tmp_path, "cpu"))


@pytest.mark.nsys
def test_nsys_rehearsed(tmp_path: Path) -> None:
    """An installed nsys writes a report that the check reads."""
    from tests.support import nsys

    nsys.nsys()
    context = CheckContext(tmp_path, "cpu", limit_s=100)
    with nsys.alone():
        tools.nsys(context)
    assert context.figures == {"kernels": 0, "launches": 0}


# Results of checks


def passing(context: CheckContext) -> None:
    context.note("threads", 3)
    context.note("a_step ms", 1.25)
    context.note("a_step ratio", 1.5, "at most 2 x")
    context.note("of", "a day", "a week")


def failing(context: CheckContext) -> None:
    context.figures["kernels"] = 3
    raise FailedError("3 is not 4")


def skipping(context: CheckContext) -> None:
    raise SkippedError("no tool")


def wrong(context: CheckContext) -> None:
    raise ZeroDivisionError("a mistake")


def dying(context: CheckContext) -> None:
    print("last words", flush=True)
    os._exit(3)


def hanging(context: CheckContext) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"started {child.pid}", flush=True)
    if "STARTED" in os.environ:
        Path(os.environ["STARTED"]).write_text(f"{child.pid}\n")
    time.sleep(600)


CHECKS = [
    Check("passing", passing, 30),
    Check("failing", failing, 30),
    Check("skipping", skipping, 30),
    Check("wrong", wrong, 30),
    Check("dying", dying, 30, alone=True),
    Check("hanging", hanging, 5, alone=True),
    Check("last", passing, 30, alone=True),
]
MACHINE = {"gpu": "", "torch": "2", "python": "3"}
PROGRAM = "from tests.test_gpu_check import main\nmain()\n"


def main() -> None:
    """Run the checks above, in a process whose children use this module too."""
    prepare()
    sys.exit(command.main())


def prepare(program: str = sys.argv[0]) -> None:
    command.CHECKS[:] = CHECKS
    command.machine = lambda device: MACHINE
    runner.MODULE[:] = [program]
    runner.LEAST_S = 1


@pytest.fixture
def program_with_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that runs the checks above; this process uses them too."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(command, "CHECKS", CHECKS)
    monkeypatch.setattr(command, "machine", lambda _: MACHINE)
    monkeypatch.setattr(runner, "MODULE", [str(program)])
    monkeypatch.setattr(runner, "LEAST_S", 1)
    return program


def has_ended(process: int) -> bool:
    """Return whether a process has ended or ends soon."""
    try:
        watched = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 30)[0])
    finally:
        os.close(watched)


def test_the_results_of_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, program_with_checks: Path
) -> None:
    """Each check is in the table and in the file, also after a crash or a hang; the exit code is then 1."""
    out = tmp_path / "build" / "results.json"
    monkeypatch.setenv("COLUMNS", "160")
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert command.main(["--rehearse", "--out", str(out)]) == 1
    assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}
    checks = json.loads(out.read_text())["checks"]
    assert {name: result["status"] for name, result in checks.items()} == {
        "passing": "passed",
        "failing": "failed",
        "skipping": "skipped",
        "wrong": "failed",
        "dying": "failed",
        "hanging": "failed",
        "last": "passed",
    }
    assert checks["passing"]["figures"] == {"threads": 3, "a_step ms": 1.25, "a_step ratio": 1.5, "of": "a day"}
    assert checks["passing"]["expected"] == {"a_step ratio": "at most 2 x", "of": "a week"}
    assert checks["wrong"]["reason"] == "ZeroDivisionError: a mistake"
    assert checks["dying"]["reason"] == "ended with code 3: last words\n"
    how, _, log = checks["hanging"]["reason"].partition(": started ")
    assert how == "did not end in 5 s"
    assert has_ended(int(log))  # also a child that left the process group
    lines = capsys.readouterr().out.splitlines()
    progress, (_, *rows, summary, place) = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert progress[1] == "traces are not kept: this is a rehearsal"
    count = len(CHECKS)
    assert [text.split()[0] for text in progress[2:]] == [f"{number}/{count}" for number in range(1, count + 1)]
    assert {text.split()[1] for text in progress[2:]} == set(checks)
    assert [text.split()[0] for text in rows if text[0] != " "] == [check.name for check in CHECKS]
    passed, failed, skipped = rows[:3]
    figures = "3 threads; a_step 1.250 ms (1.50 x, expected at most 2 x); of: a day (expected a week)"
    assert passed.endswith(f"s  {figures}")
    assert failed.startswith("failing        FAILED ")
    assert failed.endswith("s  3 is not 4; 3 kernels")
    assert skipped.endswith("s  no tool")
    assert summary.startswith("This was a rehearsal")
    assert place.startswith("2 passed, 4 failed, 1 skipped in ")
    assert place.endswith(f" s; results in {out}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal(tmp_path: Path, program_with_checks: Path, number: signal.Signals) -> None:
    """The running check is ended, the remaining ones are listed, and the results so far are kept."""
    out = tmp_path / "results.json"
    os.mkfifo(tmp_path / "started")
    started = os.open(tmp_path / "started", os.O_RDWR)
    arguments = ["passing", "hanging", "last", "--rehearse", "--limit", "600", "--out", str(out)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "STARTED": str(tmp_path / "started")}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(program_with_checks), *arguments],
            stdout=output,
            stderr=output,
            env=os.environ | env,
        )
        try:
            assert select.select([started], [], [], 60)[0]
            child = int(os.read(started, 100))
            process.send_signal(number)
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
            os.close(started)
    assert has_ended(child)
    assert not list(tmp_path.glob("gpu-check-*"))
    checks = json.loads(out.read_text())["checks"]
    assert checks["passing"]["status"] == "passed"
    assert checks["hanging"]["reason"].startswith(f"ended by {number.name}: started")
    assert (checks["last"]["status"], checks["last"]["reason"]) == ("not run", f"ended by {number.name}")
    shown = (tmp_path / "output").read_text()
    assert "passing        ok" in shown
    assert "last           not run" in shown


# Time limits


class SimulatedClock:
    """A clock that `sleep` advances without waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowChild:
    """A check that uses its whole time limit."""

    running: ClassVar[list[Check]] = []

    def __init__(self, clock: SimulatedClock, check: Check, device: str, limit_s: float) -> None:
        assert not self.running or not (check.alone or any(other.alone for other in self.running))
        self.check, self._clock, self._end = check, clock, clock.now + limit_s
        self.running.append(check)

    def over(self) -> bool:
        return self._clock.now >= self._end

    def result(self, stopped: str = "") -> runner.Result:
        self.running.remove(self.check)
        return {"status": "failed", "reason": stopped, "seconds": 0.0}


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_checks_end_within_the_total_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Every check runs, and the last one ends in time, even if each uses its whole time limit."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2 * at_once)
    clock, results = SimulatedClock(), dict[str, runner.Result]()
    deadline = command.TOTAL_S - command.LAST_S
    start: Any = functools.partial(SlowChild, clock)
    runner.run(command.CHECKS, "cpu", deadline, runner.Stop(), results.__setitem__, clock=clock, start=start)
    assert results.keys() == {check.name for check in command.CHECKS}
    assert [name for name, result in results.items() if result["status"] == "not run"] == []
    assert SlowChild.running == []
    assert clock.now <= deadline + 0.1


def test_the_last_check_gets_the_remaining_time() -> None:
    """The last check can use the time that the others did not need."""
    assert runner.share_s(CHECKS[-1:], 400, 4) == 400
    assert runner.share_s(CHECKS, 600, 4) == 30


def test_a_check_without_enough_time_is_not_run(tmp_path: Path, program_with_checks: Path) -> None:
    """The check is reported as not run, and counts as not passed."""
    out = tmp_path / "results.json"
    least = str(command.LAST_S + runner.LEAST_S)
    assert command.main(["passing", "--rehearse", "--limit", least, "--out", str(out)]) == 1
    passing = json.loads(out.read_text())["checks"]["passing"]
    assert passing["status"] == "not run"
    assert passing["reason"].endswith(" s were left for it, at least 1 are needed")


@pytest.mark.parametrize(("left_s", "shown"), [(-1, "0.0"), (3.25, "3.2"), (9.99, "9.9")])
def test_the_remaining_time_is_rounded_down(left_s: float, shown: str) -> None:
    """The remaining time in the reason never reads as enough."""
    clock, results = SimulatedClock(), dict[str, runner.Result]()
    runner.run(CHECKS[-1:], "cpu", left_s, runner.Stop(), results.__setitem__, clock=clock)
    assert results["last"]["reason"] == f"{shown} s were left for it, at least 10 are needed"


# The command line


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command exits with 2 and suggests --rehearse."""
    monkeypatch.setattr(command, "machine", lambda _: MACHINE)
    assert command.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "kept"])
def test_the_line_about_kept_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """A line before the first check says whether traces are kept, and in which folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSTRUMENT_KEEP_TRACES", folder)
    monkeypatch.setattr(command, "machine", lambda _: MACHINE | {"gpu": "H100"})
    monkeypatch.setattr(command, "CHECKS", [])
    assert command.main(["--out", str(tmp_path / "results.json")]) == 0
    kept = f"small traces are kept in {tmp_path / folder}"
    unset = "traces are not kept: INSTRUMENT_KEEP_TRACES names no folder"
    assert (kept if folder else unset) in capsys.readouterr().out.splitlines()


def test_without_a_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is reported before the first check."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "msgspec" else find(name))
    assert command.main(["--rehearse"]) == 2
    assert capsys.readouterr().err == "not installed: msgspec\n"


def test_a_torch_that_cannot_be_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error output of the import is shown."""

    def fail(device: str) -> None:
        raise subprocess.CalledProcessError(1, "python", stderr="libcudart.so.13 is not there")

    monkeypatch.setattr(command, "machine", fail)
    assert command.main([]) == 2
    assert "torch cannot be used: libcudart.so.13 is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown checks nothing; known are graph, fork"),
        (["--child", "folder"], "--child runs one check: none is named"),
        (["graph", "fork", "--child", "folder"], "--child runs one check: graph fork"),
        (["--limit", "5"], "--limit must be at least 20, so that a check can run: 5"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """The error names the argument and the accepted values."""
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_the_results_must_be_a_regular_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device or a folder is refused before the first check rather than at the end."""
    with pytest.raises(SystemExit):
        command.main(["untouched", "--rehearse", "--out", str(tmp_path)])
    assert f"--out must be a regular file: {tmp_path}" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has the duration, the written files, and examples."""
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    for words in (
        "in under ten minutes",
        "build/gpu-check.json",
        "INSTRUMENT_KEEP_TRACES",
        "examples:",
    ):
        assert words in shown


def test_a_long_reason() -> None:
    """The row of a long reason has its beginning and its end."""
    reason = "begin\n" + "x y " * 2000 + "\nend"
    lines = table.row("name", {"status": "failed", "seconds": 1, "reason": reason}, 100).splitlines()
    assert "begin x" in lines[0]
    assert lines[-1].endswith("y end")
    assert {line[:34].strip() for line in lines[1:]} == {""}
    assert max(map(len, lines)) <= 100
    assert sum(map(len, lines)) < 800


def test_small_traces_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are kept compressed under the name of the check, if a folder is set; never those of a rehearsal."""
    monkeypatch.setenv("INSTRUMENT_KEEP_TRACES", str(tmp_path / "kept"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0.1.pt.trace.json").write_text('{"traceEvents": []}')
    CheckContext(tmp_path, "cpu").trace(tmp_path / "run", "name")
    assert not (tmp_path / "kept").exists()
    CheckContext(tmp_path, "cuda").trace(tmp_path / "run", "name")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["check_name.json.gz"]
