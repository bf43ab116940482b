"""A program that `tests.support.warm` runs finds what a new process has, and an imported torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import TimeoutError  # another one before Python 3.11
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.programs import environment

SHOW = """
import __main__, json, os, signal, sys
names = ("__name__", "__file__", "__spec__", "__package__")
print(json.dumps({
    "main": [str(vars(__main__).get(name)) for name in names], "globals": sorted(globals()), "argv": sys.argv,
    "path": sys.path[:2], "input": sys.stdin.read(), "cwd": os.getcwd(), "own": os.environ["OWN"],
    "modules": [name for name in sys.modules if name.startswith(("instrument", "tests"))],
    "handler": str(signal.getsignal(signal.SIGINT)), "files": sorted(os.listdir("/proc/self/fd"))[:3],
}))
"""


def both(command: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in a new process, and in a warm one."""
    env, line = environment({"OWN": "yes"}), [sys.executable, *command]
    cold = subprocess.run(line, env=env, cwd=folder, input="a line\n", capture_output=True, text=True)
    return [cold, warm.run(line, env=env, cwd=folder, input="a line\n")]


@pytest.mark.parametrize("command", [["show.py", "--x", "1"], ["-c", SHOW, "y"], ["folder/show.py"]])
def test_same(tmp_path: Path, command: list[str]) -> None:
    """Arguments, ``__main__``, paths, input, variables, signal handlers and modules are the same."""
    for path in (tmp_path / "show.py", tmp_path / "folder" / "show.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(SHOW)
    cold, warmed = both(command, tmp_path)
    assert (0, "") == (warmed.returncode, warmed.stderr)
    assert json.loads(cold.stdout) == json.loads(warmed.stdout)


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "import sys; sys.exit('a reason')",
        "import atexit, sys; atexit.register(print, 'at exit'); sys.stderr.write('error')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os._exit(7)",
    ],
)
def test_same_end(tmp_path: Path, code: str) -> None:
    """Exit codes, signals and what is printed at exit are the same."""
    cold, warmed = both(["-c", code], tmp_path)
    assert (cold.returncode, cold.stdout, cold.stderr) == (warmed.returncode, warmed.stdout, warmed.stderr)


def test_error(tmp_path: Path) -> None:
    """An error ends the program with a traceback, and the next program runs."""
    cold, warmed = both(["-c", "1 / 0"], tmp_path)
    assert (1, 1) == (cold.returncode, warmed.returncode)
    assert cold.stderr.splitlines()[-1] == warmed.stderr.splitlines()[-1]
    assert both(["-c", "print(1)"], tmp_path)[1].stdout == "1\n"


def test_run(tmp_path: Path) -> None:
    """`instrument run` becomes the program, whose process it says it is."""
    text = """
import json, os, sys, torch
print(json.dumps([sys.argv, sorted(name for name in os.environ if name.startswith("INSTRUMENT"))]))
print(os.environ["INSTRUMENT_RUN_PROCESS"] == str(os.getpid()), "instrument.start.bootstrap.begin" in sys.modules)
"""
    (tmp_path / "show.py").write_text(text)
    cold, warmed = both(["-m", "instrument", "run", "--", "show.py", "--steps", "1"], tmp_path)
    assert (cold.returncode, cold.stdout, cold.stderr) == (warmed.returncode, warmed.stdout, warmed.stderr)
    assert warmed.stdout.splitlines()[1] == "True True"
    cold, warmed = both(["-m", "instrument", "run", "--none"], tmp_path)
    assert (2, 2) == (cold.returncode, warmed.returncode)
    assert "No such option" in warmed.stderr


def test_timeout(tmp_path: Path) -> None:
    """A program that takes too long is killed."""
    line = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    with pytest.raises(subprocess.TimeoutExpired) as error:
        warm.run(line, env=environment(), cwd=tmp_path, timeout=1)
    assert error.value.stdout == "1\n"
    assert warm.run([sys.executable, "-c", "print(signal)"], env=environment()).returncode == 1
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_program_beside_the_test(tmp_path: Path) -> None:
    """Its lines are read while it runs, it receives signals, and the end of the block ends it."""
    (tmp_path / "endless.py").write_text("import time\nprint(1)\nprint(2, flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-m", "instrument", "run", "--", "endless.py"]
    with warm.started(command, environment(), cwd=tmp_path) as program:
        assert ["1\n", "2\n"] == [program.readline(), program.readline()]
        with pytest.raises(TimeoutError):
            program.wait(0.1)
        program.send_signal(signal.SIGTERM)
        done = program.wait()
    assert (-signal.SIGTERM, "1\n2\n") == (done.returncode, done.stdout)
    with warm.started(command, environment(), cwd=tmp_path) as program:
        program.readline()
    assert -signal.SIGKILL == program.wait().returncode
    assert 0 == warm.run([sys.executable, "-c", "pass"], environment()).returncode


def test_a_block_that_fails_at_once() -> None:
    """Its error is raised, and a program that has not started yet is killed."""
    endless = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ValueError, match="at once"), warm.started(endless, environment()) as program:
        raise ValueError("at once")
    assert -signal.SIGKILL == program.wait().returncode


def test_a_program_that_ends_at_the_end_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing a process that has already ended raises nothing."""
    kill = os.kill

    def late(process: int, number: int) -> None:
        kill(process, signal.SIGTERM)
        program.wait()
        kill(process, number)

    endless = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    with warm.started(endless, environment()) as program:
        program.readline()
        monkeypatch.setattr(os, "kill", late)
    assert -signal.SIGTERM == program.wait().returncode


def test_interrupt(tmp_path: Path) -> None:
    """A program is killed if the test is interrupted, and the next one gets its own answer."""
    code = f"""if True:
    import os, pathlib, signal, time
    pathlib.Path({str(tmp_path / "process")!r}).write_text(str(os.getpid()))
    os.kill({os.getpid()}, signal.SIGINT)
    time.sleep(60)"""
    with pytest.raises(KeyboardInterrupt):
        warm.run([sys.executable, "-c", code], env=environment())
    process = int((tmp_path / "process").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(200):  # the kernel takes a moment
            os.kill(process, 0)
            time.sleep(0.01)
    assert warm.run([sys.executable, "-c", "raise SystemExit(7)"], env=environment()).returncode == 7


def test_further_imports(tmp_path: Path) -> None:
    """A program may find more packages imported, and no other program does."""
    code = "import os, sys; print('tabnanny' in sys.modules, os.getcwd()); sys.exit(3)"
    for imports in (("tabnanny",), (), ("tabnanny",)):
        done = warm.run([sys.executable, "-c", code], environment(), cwd=tmp_path, imports=imports)
        assert (3, f"{bool(imports)} {tmp_path}\n") == (done.returncode, done.stdout)
