"""scripts/gpu_check: each check is rehearsed without a GPU; how they end, and what is kept."""

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
from scripts.gpu_check import costs, driver, edges, lengths, regions, runner, table, tools
from scripts.gpu_check.check import Check, CheckContext, FailedError, Run, SkippedError

from instrument.config import settings

ROOT = Path(__file__).parents[1]
# These do all that they do on a GPU, on the CPU; see below for `nsys` and the tests, and for what fills a GPU.
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
]


@pytest.mark.parametrize("check", REHEARSED, ids=lambda check: check.__name__)
def test_rehearsal(tmp_path: Path, check: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check runs to its end on the CPU, where each operator of a trace is given a kernel, and has figures."""
    monkeypatch.setattr(edges, "WARM_UPS", (3,))
    monkeypatch.setattr(edges, "WINDOWS", ((3, 5),))
    context = CheckContext(tmp_path, "cpu")
    check(context)
    assert context.figures
    assert all(isinstance(value, (int, float, str)) for value in context.figures.values())


def test_rehearsal_of_forks(tmp_path: Path) -> None:
    """It runs in a new process, as a child forked after computing on several threads may hang in OpenMP."""
    out = tmp_path / "results.json"
    arguments = ["-m", "scripts.gpu_check", "fork", "--rehearse", "--out", str(out)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["checks"]["fork"]["status"] == "passed"


def test_all_are_rehearsed() -> None:
    """All but the checks that run GPU tests or a vendor's tool, which have tests of their own below."""
    others = {"fork", "nsys", "ncu", "tests-alone", "tests"}
    assert {check.name for check in command.CHECKS if check.run not in REHEARSED} == others


def test_a_broken_promise_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail shows nothing."""
    monkeypatch.setattr(settings, "enabled", False)
    with pytest.raises(FailedError, match="one window of the steps"):
        edges.detector(CheckContext(tmp_path, "cpu"))


def test_a_driver_that_is_initialized_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails even if the forked children say that they trained."""
    monkeypatch.setattr(driver, "_forked", lambda _: "trained")
    monkeypatch.setattr(CheckContext, "cuda", SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(FailedError, match="CUDA is initialized"):
        driver.fork(CheckContext(tmp_path, "cpu"))


def test_a_child_that_cannot_train_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has its error, and when it was forked."""
    monkeypatch.setattr(driver, "_forked", lambda _: "RuntimeError: initialization error")
    with pytest.raises(FailedError, match="'made': 'RuntimeError: initialization error', 'entered'"):
        driver.fork(CheckContext(tmp_path, "cpu"))


class Measured(CheckContext):
    """A context in which times of the CPU count as those of a GPU."""

    rehearsal = False


def test_what_costs_too_much_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has its ratio, and the figures have all times and what was expected."""
    context = Measured(tmp_path, "cpu")
    of_one = costs._Costs(context, rounds=1)
    took = iter([2.0, 2.1, 3.0])
    monkeypatch.setattr(of_one, "_median_ms", lambda call: call())
    for name, at_most in {"before": None, "cheap": 1.1, "after a_window": 1.1}.items():
        now = next(took)
        of_one.measure(name, lambda now=now: now, at_most)
    with pytest.raises(FailedError, match=r'^after a_window 1\.50 x, expected at most 1\.1 x "before"$'):
        of_one.verdict()
    assert context.figures["cheap ratio"] == 1.05
    assert context.expected == dict.fromkeys(("cheap ratio", "after a_window ratio"), 'at most 1.1 x "before"')


def test_a_graph_without_kernels_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is recorded and empty is not what was promised."""
    monkeypatch.setattr(edges, "python", lambda *_: SimpleNamespace(stdout="loss 1\n" * 103, stderr=""))
    monkeypatch.setattr(edges, "recorded", lambda *_: None)
    monkeypatch.setattr(CheckContext, "trace", lambda *_: None)
    monkeypatch.setattr("instrument.traces.read.read_file", lambda _: SimpleNamespace(kernels=[]))
    with pytest.raises(FailedError, match="0 kernels in steps 3-5, expected at least 15"):
        edges.graph(CheckContext(tmp_path, "cpu"))


FULL = "CUDA error: out of memory"


@pytest.mark.parametrize(
    ("status", "sentence", "wrong"),
    [("note", f"H100; the first cannot be used now: {FULL}", ""), ("ok", "H100", "GPU: expected a note"),
     ("note", "H100; hidden", "GPU does not say why")],
)  # fmt: skip
def test_what_the_doctor_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, sentence: str, wrong: str
) -> None:
    """Of a full GPU it must give a note that says why."""
    proof = f"regions arrive (proved); GPU work is not proved, as no GPU can be used now: {FULL}"
    said = [
        {"name": "GPU", "status": status, "sentence": sentence},
        {"name": "torch.profiler", "status": "note", "sentence": proof},
    ]
    done = SimpleNamespace(returncode=0, stdout=json.dumps({"checks": said}), stderr="")
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

# One that passes, one that passes or fails, and one that skips: the check counts them and gives the reason.
TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_one(): pass
def test_two(): assert {two}
def test_three(): pytest.skip("no ranges")
"""


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        (TESTS.format(two=True), {"passed": 2, "skipped": 1, "skipped as": "no ranges"}),
        (TESTS.format(two=False), "test_it.py::test_two"),
        (TESTS.replace("test_one", "one").replace("test_two", "two"), "no ranges"),
        ("import nothing_of_that_name", "test_it.py"),
        (TESTS.format(two="__import__('time').sleep(60)"), "did not end in 2 s"),
    ],
)
def test_the_tests_that_a_check_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, ended: dict[str, Any] | str
) -> None:
    """What passed is counted, what failed is named, and why something was skipped is said."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\nmarkers = gpu: x\n")
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    monkeypatch.setattr(tools, "_TEST_S", 50)
    context = CheckContext(tmp_path, "cpu", limit_s=7 if "sleep" in source else 60)
    to = os.dup(1)
    with (tmp_path / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        try:
            if isinstance(ended, dict):
                tools.pytest(context, *tools.gpu_tests())
                assert context.figures == ended
            else:
                wanted = SkippedError if ended == "no ranges" else FailedError
                with pytest.raises(wanted, match=ended):
                    tools.pytest(context, "tests/test_it.py")
        finally:
            os.dup2(to, 1)
            os.close(to)


def test_every_test_for_a_gpu_is_run() -> None:
    """Every test marked `gpu` is in one of the two lists, and what they name exists."""
    tools_alone = [ROOT / name for name in tools._ALONE]
    assert all("mark.gpu" in path.read_text() for path in tools_alone)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert marked == {*tools_alone, *(ROOT / name for name in tools.gpu_tests())}
    path, _, name = tools._NCU.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_a_tool_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is skipped, and names the tool."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SkippedError, match="nsys is not on the PATH"):
        tools.nsys(CheckContext(tmp_path, "cpu"))


@pytest.mark.nsys
def test_nsys_rehearsed(tmp_path: Path) -> None:
    """nsys, where it is installed, writes a report that the check reads."""
    from tests.support import nsys

    nsys.nsys()
    context = CheckContext(tmp_path, "cpu", limit_s=100)
    with nsys.alone():
        tools.nsys(context)
    assert context.figures == {"kernels": 0, "launches": 0}


# How checks end


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
HERE = {"gpu": "", "torch": "2", "python": "3"}
PROGRAM = "from tests.test_gpu_check import main\nmain()\n"


def main() -> None:
    """Run the checks above, in a process whose children find them here too."""
    prepare()
    sys.exit(command.main())


def prepare(program: str = sys.argv[0]) -> None:
    command.CHECKS[:] = CHECKS
    command.machine = lambda device: HERE
    runner.MODULE[:] = [program]
    runner.LEAST_S = 1


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that runs the checks above; this process has them too."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(command, "CHECKS", CHECKS)
    monkeypatch.setattr(command, "machine", lambda _: HERE)
    monkeypatch.setattr(runner, "MODULE", [str(program)])
    monkeypatch.setattr(runner, "LEAST_S", 1)
    return program


def ended(process: int) -> bool:
    """Whether a process is over, or soon is."""
    try:
        watched = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 30)[0])
    finally:
        os.close(watched)


def test_how_checks_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, made: Path
) -> None:
    """Each is in the table and in the file, also one that crashed or did not end; then the exit code is 1."""
    out = tmp_path / "build" / "results.json"
    monkeypatch.setenv("COLUMNS", "160")
    before = [signal.getsignal(number) for number in runner.Stop._SIGNALS]
    assert command.main(["--rehearse", "--out", str(out)]) == 1
    assert before == [signal.getsignal(number) for number in runner.Stop._SIGNALS]
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
    assert ended(int(log))  # what left the group too
    lines = capsys.readouterr().out.splitlines()
    said, (_, *rows, summary, place) = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert said[1] == "traces are not kept: this is a rehearsal"
    count = len(CHECKS)
    assert [text.split()[0] for text in said[2:]] == [f"{number}/{count}" for number in range(1, count + 1)]
    assert {text.split()[1] for text in said[2:]} == set(checks)
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
def test_a_signal(tmp_path: Path, made: Path, number: signal.Signals) -> None:
    """What runs is ended, the rest is named, and the results so far are kept."""
    out = tmp_path / "results.json"
    os.mkfifo(tmp_path / "started")
    started = os.open(tmp_path / "started", os.O_RDWR)
    arguments = ["passing", "hanging", "last", "--rehearse", "--limit", "600", "--out", str(out)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "STARTED": str(tmp_path / "started")}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(made), *arguments], stdout=output, stderr=output, env=os.environ | env
        )
        try:
            assert select.select([started], [], [], 60)[0]
            child = int(os.read(started, 100))
            process.send_signal(number)
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
            os.close(started)
    assert ended(child)
    assert not list(tmp_path.glob("gpu-check-*"))
    checks = json.loads(out.read_text())["checks"]
    assert checks["passing"]["status"] == "passed"
    assert checks["hanging"]["reason"].startswith(f"ended by {number.name}: started")
    assert (checks["last"]["status"], checks["last"]["reason"]) == ("not run", f"ended by {number.name}")
    shown = (tmp_path / "output").read_text()
    assert "passing        ok" in shown
    assert "last           not run" in shown


# The time


class SimulatedClock:
    """A clock that waiting moves on at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowChild:
    """A check that takes all the time that it may."""

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
def test_all_is_over_in_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Every check runs, and the last ends in time, even if each takes all of its time."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2 * at_once)
    clock, results = SimulatedClock(), dict[str, runner.Result]()
    deadline = command.TOTAL_S - command.LAST_S
    start: Any = functools.partial(SlowChild, clock)
    runner.run(command.CHECKS, "cpu", deadline, runner.Stop(), results.__setitem__, clock=clock, start=start)
    assert results.keys() == {check.name for check in command.CHECKS}
    assert [name for name, result in results.items() if result["status"] == "not run"] == []
    assert SlowChild.running == []
    assert clock.now <= deadline + 2 * runner._POLL_S


def test_the_last_gets_what_is_left() -> None:
    """Time that the others do not take is not lost."""
    assert runner.share_s(CHECKS[-1:], 400, 4) == 400
    assert runner.share_s(CHECKS, 600, 4) == 30


def test_what_the_time_is_over_for_is_not_run(tmp_path: Path, made: Path) -> None:
    """It is said, and counts as not passed."""
    out = tmp_path / "results.json"
    least = str(command.LAST_S + runner.LEAST_S)
    assert command.main(["passing", "--rehearse", "--limit", least, "--out", str(out)]) == 1
    passing = json.loads(out.read_text())["checks"]["passing"]
    assert passing["status"] == "not run"
    assert passing["reason"].endswith(" s were left for it, at least 1 are needed")


@pytest.mark.parametrize(("left_s", "said"), [(-1, "0.0"), (3.25, "3.2"), (9.99, "9.9")])
def test_how_much_time_was_left(left_s: float, said: str) -> None:
    """It reads as less than what is needed."""
    clock, results = SimulatedClock(), dict[str, runner.Result]()
    runner.run(CHECKS[-1:], "cpu", left_s, runner.Stop(), results.__setitem__, clock=clock)
    assert results["last"]["reason"] == f"{said} s were left for it, at least 10 are needed"


# The command line


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and what can be done."""
    monkeypatch.setattr(command, "machine", lambda _: HERE)
    assert command.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "kept"])
def test_whether_traces_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """A line before the first check says whether, and in which folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSTRUMENT_KEEP_TRACES", folder)
    monkeypatch.setattr(command, "machine", lambda _: HERE | {"gpu": "H100"})
    monkeypatch.setattr(command, "CHECKS", [])
    assert command.main(["--out", str(tmp_path / "results.json")]) == 0
    kept = f"small traces are kept in {tmp_path / folder}"
    unset = "traces are not kept: INSTRUMENT_KEEP_TRACES names no folder"
    assert (kept if folder else unset) in capsys.readouterr().out.splitlines()


def test_without_a_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named before the first check."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "msgspec" else find(name))
    assert command.main(["--rehearse"]) == 2
    assert capsys.readouterr().err == "not installed: msgspec\n"


def test_a_torch_that_cannot_be_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is shown."""

    def fail(device: str) -> None:
        raise subprocess.CalledProcessError(1, "python", stderr="libcudart.so.13 is not there")

    monkeypatch.setattr(command, "machine", fail)
    assert command.main([]) == 2
    assert "torch cannot be used: libcudart.so.13 is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "unknown checks nothing; known are graph, fork"),
        (["--child", "folder"], "--child runs one check: none is named"),
        (["graph", "fork", "--child", "folder"], "--child runs one check: graph fork"),
        (["--limit", "5"], "--limit must be at least 20, so that a check can run: 5"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """They are named, with what is accepted."""
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert said in capsys.readouterr().err


def test_a_place_for_the_results_that_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the first check: a device would be replaced, a folder found out about at the end."""
    with pytest.raises(SystemExit):
        command.main(["untouched", "--rehearse", "--out", str(tmp_path)])
    assert f"--out must be a regular file: {tmp_path}" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It says how long it takes, what is written where, and gives examples."""
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    for words in (
        "at most nine and a half minutes",
        "build/gpu-check.json",
        "INSTRUMENT_KEEP_TRACES",
        "examples:",
    ):
        assert words in said


def test_a_long_reason() -> None:
    """Its beginning and its end are in the line."""
    reason = "begin\n" + "x y " * 2000 + "\nend"
    lines = table.row("name", {"status": "failed", "seconds": 1, "reason": reason}, 100).splitlines()
    assert "begin x" in lines[0]
    assert lines[-1].endswith("y end")
    assert {line[:34].strip() for line in lines[1:]} == {""}
    assert max(map(len, lines)) <= 100
    assert sum(map(len, lines)) < 800


def test_small_traces_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed, under the name of the check, where a folder for them is named; never those of a rehearsal."""
    monkeypatch.setenv("INSTRUMENT_KEEP_TRACES", str(tmp_path / "kept"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0.1.pt.trace.json").write_text('{"traceEvents": []}')
    CheckContext(tmp_path, "cpu").trace(tmp_path / "run", "name")
    assert not (tmp_path / "kept").exists()
    CheckContext(tmp_path, "cuda").trace(tmp_path / "run", "name")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["check_name.json.gz"]
