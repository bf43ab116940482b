"""A program under `instrument run` is what it is without: its arguments, exit code, signals and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from instrument.bootstrap.program import excluded
from instrument.traces.read import read_trace
from tests.support.programs import ROOT, environment

SOURCE = ROOT / "src"
RUN = [sys.executable, "-m", "instrument", "run"]
SHOW = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps([sys.argv, __name__, main.__file__, sys.path, sys.flags.dev_mode, sys.stdin.read(), os.getcwd()]))
"""
TRAIN = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def run(folder: Path, command: list[str], given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(variables), input=given, capture_output=True, text=True, timeout=300
    )


def entries_in(folder: Path) -> list[dict[str, Any]]:
    """The lines of a manifest."""
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("program", "plain"),
    [
        (["--", "train.py", "--steps", "7", "-m", "--", "x"], ["train.py", "--steps", "7", "-m", "--", "x"]),
        (["train.py", "--out", "here"], ["train.py", "--out", "here"]),
        (["-m", "package.train", "--steps", "1"], ["-m", "package.train", "--steps", "1"]),
        (["--", "-m", "package.train", "-m"], ["-m", "package.train", "-m"]),
        (["--", "-X", "dev", "train.py"], ["-X", "dev", "train.py"]),
        (["--", "folder", "x"], ["folder", "x"]),
    ],
)
def test_as_without(tmp_path: Path, program: list[str], plain: list[str]) -> None:
    """Arguments, ``__main__``, ``sys.path``, interpreter options and standard input are the program's own."""
    for name in ("train.py", "package/train.py", "folder/__main__.py"):
        write(tmp_path, SHOW, name)
    expected = run(tmp_path, [sys.executable, *plain], "a line")
    done = run(tmp_path, [*RUN, "--syncs", *program], "a line")
    assert (expected.returncode, expected.stdout) == (done.returncode, done.stdout)
    assert json.loads(done.stdout)[-2] == "a line"


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_code(tmp_path: Path, code: int) -> None:
    """The program's exit code is the command's."""
    write(tmp_path, f"raise SystemExit({code})")
    assert run(tmp_path, [*RUN, "--", "train.py"]).returncode == code


def test_traceback(tmp_path: Path) -> None:
    """An error looks as it does without."""
    write(tmp_path, "import torch\n1 / 0")
    assert run(tmp_path, [*RUN, "--", "train.py"]).stderr.startswith(
        run(tmp_path, [sys.executable, "train.py"]).stderr
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1])
def test_signals(tmp_path: Path, number: signal.Signals) -> None:
    """The process that was started is the program: a signal finds it, and ends it as without."""
    write(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    codes = []
    for command in ([sys.executable, "train.py"], [*RUN, "--", "train.py"]):
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            process.send_signal(number)
            codes.append(process.wait(timeout=60))
    assert codes[0] == codes[1]


FORWARD = """
import torch
model = torch.nn.Linear(2, 2)
for _ in range(110):
    model(torch.ones(1, 2))
"""


@pytest.mark.parametrize(
    ("program", "steps", "untimed", "around"),
    [
        (TRAIN, "2", [0, 0], [[1, 1], [3, 4]]),
        (TRAIN, "0", None, [[1, 4]]),  # step 0 begins where its recording does
        (FORWARD, "104", [0, 100], [[101, 103], [105, 109]]),  # 100 calls may be those of one step
    ],
)
def test_steps_whose_beginning_is_not_known(
    tmp_path: Path, program: str, steps: str, untimed: list[int] | None, around: list[list[int]]
) -> None:
    """They are not timed, which the summary says, but are steps of the run."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    timing = entry["timing"]
    assert (untimed, around) == (timing["untimed_steps"], timing["around_steps"])
    assert (110 if program == FORWARD else 5) == timing["run_steps"]
    said = [] if untimed is None else ["step 0" if untimed == [0, 0] else "steps 0-100"]
    text = " ".join(done.stderr.split())
    assert said == re.findall(r"\(not counting (steps? [\d-]+), whose start is unknown\)", text)


def test_interrupted_training(tmp_path: Path) -> None:
    """What was recorded until Ctrl-C is kept, and the program ends as it would."""
    write(
        tmp_path,
        TRAIN.replace("range(5)", "iter(int, 1)").replace(
            "    optimizer.step()", "    optimizer.step(); print(1, flush=True)"
        ),
    )
    with subprocess.Popen(
        [*RUN, "--steps", "2-1000000", "--", "train.py"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    (entry,) = [
        json.loads(line) for line in (tmp_path / "runs/instrument/manifest.jsonl").read_text().splitlines()
    ]
    assert entry["status"] == "partial"
    assert (tmp_path / "runs/instrument" / entry["files"][0]["path"]).exists()


def test_off(tmp_path: Path) -> None:
    """With INSTRUMENT=0 the program is run as it is, and nothing of ours is in it."""
    write(
        tmp_path, TRAIN + "\nimport sys, os\nprint(sorted(n for n in sys.modules if n.startswith('instrument')))"
    )
    done = run(tmp_path, [*RUN, "--", "train.py"], INSTRUMENT="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_own_sitecustomize(tmp_path: Path) -> None:
    """The ``sitecustomize`` of a user's own still runs, and is the module of that name."""
    write(tmp_path, "import os\nos.environ['OWN'] = 'yes'\nvalue = 3", "own/sitecustomize.py")
    write(tmp_path, "import os, sitecustomize\nprint(os.environ['OWN'], sitecustomize.value)")
    paths = os.pathsep.join([str(tmp_path / "own"), environment()["PYTHONPATH"]])
    done = run(tmp_path, [*RUN, "--", "train.py"], PYTHONPATH=paths)
    assert (done.stdout, done.stderr) == ("yes 3\n", "")


def test_failing_sitecustomize(tmp_path: Path) -> None:
    """One that fails is reported by Python, as without, and the program runs."""
    write(tmp_path, "1 / 0", "own/sitecustomize.py")
    write(tmp_path, "print('ran')")
    paths = os.pathsep.join([str(tmp_path / "own"), environment()["PYTHONPATH"]])
    done = run(tmp_path, [*RUN, "--", "train.py"], PYTHONPATH=paths)
    assert done.stdout == "ran\n"
    assert "ZeroDivisionError" in done.stderr


def test_processes_of_the_program(tmp_path: Path) -> None:
    """Processes that it spawns or forks work, and only those that train record."""
    write(
        tmp_path,
        """
import multiprocessing, sys
def double(x):
    return 2 * x
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(pool.map(double, [1, 2, 3]))
""",
    )
    done = run(tmp_path, [*RUN, "--", "train.py"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 4, 6]\n[2, 4, 6]\n", "")


def test_workers_of_a_loader(tmp_path: Path) -> None:
    """A DataLoader with workers gives its batches, and one window is recorded."""
    write(
        tmp_path,
        """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for method in ("fork", "spawn"):
        for batch in DataLoader(torch.ones(8, 2), 2, num_workers=2, multiprocessing_context=method):
            model(batch).sum().backward()
            optimizer.step()
""",
    )
    done = run(tmp_path, [*RUN, "--steps", "2-3,6", "--", "train.py"])
    assert done.returncode == 0, done.stderr
    entries = entries_in(tmp_path / "runs/instrument")
    assert [(entry["status"], entry["steps"]) for entry in entries] == [("recorded", [2, 3]), ("recorded", [6, 6])]


def test_nothing_to_record(tmp_path: Path) -> None:
    """A program that trains nothing is told so at its end, with what to write; one without torch is not."""
    write(tmp_path, "import torch")
    assert "--step-on" in run(tmp_path, [*RUN, "--", "train.py"]).stderr
    write(tmp_path, TRAIN.replace("    optimizer.step()", "    pass"))
    assert "step() was not called" in run(tmp_path, [*RUN, "--", "train.py"]).stderr
    write(tmp_path, "print(1)")
    assert run(tmp_path, [*RUN, "--", "train.py"]).stderr == ""


HAND = """
for parameter in model.parameters():
        with torch.no_grad():
            parameter -= parameter.grad
"""


@pytest.mark.parametrize("update", ["optimizer.step()", HAND.strip()])
def test_own_windows_come_first(tmp_path: Path, update: str) -> None:
    """Where the program records steps itself its windows are recorded; typed options are said to be ignored."""
    text = TRAIN.replace("range(5)", "instrument.steps(range(5), 'own', at='1-3')").replace(
        "optimizer.step()", update
    )
    write(tmp_path, "import instrument\n" + text)
    done = run(tmp_path, [*RUN, "--steps", "1-3", "--out", "other", "--", "train.py"])
    assert done.returncode == 0
    (entry,) = entries_in(tmp_path / "own")
    assert entry["status"] == "recorded"
    said = [line for line in done.stderr.splitlines() if line.startswith("instrument:")]
    ignored = "instrument: the program records windows of its own, so these are ignored: --steps 1-3 --out other"
    assert said == [ignored]
    assert not (tmp_path / "other").exists()
    assert "are ignored" not in run(tmp_path, [*RUN, "--", "train.py"]).stderr


def test_what_a_step_holds(tmp_path: Path) -> None:
    """Validation after an update is a part of the next step, under `run` and in `instrument.steps`."""
    text = TRAIN.replace(
        "optimizer.step()", "optimizer.step()\n    with instrument.annotate(f'validate {_}'): pass"
    )
    write(tmp_path, "import instrument\n" + text, "plain.py")
    write(
        tmp_path,
        "import instrument\n" + text.replace("range(5)", "instrument.steps(range(5), 'own', at=3)"),
        "own.py",
    )
    run(tmp_path, [sys.executable, "own.py"])
    run(tmp_path, [*RUN, "--steps", "3", "--out", "run", "--", "plain.py"])
    for folder in ("own", "run"):
        (path,) = (tmp_path / folder).glob("window-0001/*.json.gz")
        names = list(read_trace(path).regions.text("name"))
        assert [name for name in names if name.startswith("validate")] == ["validate 2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "12-10", "--", "train.py"], "--steps must have the lower step of a range first: '12-10'"),
        (
            ["--steps", "1-2", "--active", "2", "--", "train.py"],
            "--active cannot be combined with a range in --steps",
        ),
        (["--steps", "3", "--wait", "2", "--", "train.py"], "--wait cannot be combined with --steps"),
        (["--steps", "3", "--every", "9", "--", "train.py"], "--every cannot be combined with --steps"),
        (["--every", "9", "--wait", "2", "--", "train.py"], "--wait cannot be combined with --every"),
        (["--steps", "3 at 4", "--", "train.py"], "--steps must be steps such as \"10-12,100\": '3 at 4'"),
        (
            ["--steps", "all", "--wait", "2", "--", "train.py"],
            "--wait cannot be combined with --steps all",
        ),
        (
            ["--every", "2", "--warmup", "1", "--active", "3", "--", "train.py"],
            "--every must be an integer >= 4 (--warmup 1 + --active 3), got 2",
        ),
        (["--steps", "3,4", "--active", "2", "--", "train.py"], "from '3,4' with --active 2"),
        (["--modules", "x", "--", "train.py"], "--modules must be"),
        (["--ranks", "a", "--", "train.py"], "--ranks must be"),
        (["--budget", "x", "--", "train.py"], "a budget is written as REGION=N"),
        ([], "nothing to run"),
        (["--", "no-such-program"], "there is no program no-such-program"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: list[str], said: str) -> None:
    """What is wrong is said at once, in one line, and nothing is run."""
    write(tmp_path, "print('ran')")
    done = run(tmp_path, [*RUN, *options])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_print_command(tmp_path: Path) -> None:
    """What is printed does the same when a shell runs it."""
    write(tmp_path, TRAIN)
    printed = run(tmp_path, [*RUN, "--steps", "2", "--print-command", "--", "train.py"])
    assert not (tmp_path / "runs").exists()
    done = run(tmp_path, ["bash", "-c", printed.stdout])
    assert "Where the step went" in done.stderr


def test_syncs(tmp_path: Path) -> None:
    """Without a GPU a line says that synchronizations are not detected; the windows are recorded."""
    write(tmp_path, TRAIN)
    done = run(tmp_path, [*RUN, "--steps", "2", "--syncs", "--budget", "x=1", "--", "train.py"])
    assert "synchronizations are not detected" in done.stderr
    assert "Where the step went" in done.stderr


def test_nobody_records(tmp_path: Path) -> None:
    """``--profiler none`` opens no window and writes nothing."""
    write(tmp_path, TRAIN)
    done = run(tmp_path, [*RUN, "--profiler", "none", "--", "train.py"])
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """It is said before the program starts, and in a line for each window; the program is as without."""
    write(tmp_path, 'import sys; print("begun", file=sys.stderr)\n' + TRAIN)
    (tmp_path / "taken").write_text("")
    done = run(
        tmp_path, [*RUN, "--repeat", "2", "--wait", "0", "--active", "1", "-o", "taken/x", "--", "train.py"]
    )
    first, begun, *rest = done.stderr.splitlines()
    windows = [line for line in rest if line.startswith("instrument")]
    assert first.startswith(f"instrument: cannot write to {tmp_path / 'taken' / 'x'}: nothing can be created in ")
    assert begun == "begun"
    assert [line.partition(",")[0] for line in windows] == [
        f"instrument: window not recorded (window={window}" for window in (1, 2)
    ]
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_empty_entries_of_the_path(tmp_path: Path) -> None:
    """An empty entry of PYTHONPATH, which is the current folder, stays where it is."""
    write(tmp_path, "value = 5", "here.py")
    write(tmp_path, "import here; print(here.value)", "scripts/train.py")
    done = run(tmp_path, [*RUN, "--", "scripts/train.py"], PYTHONPATH=f"{os.pathsep}{environment()['PYTHONPATH']}")
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_another_module_of_the_name(tmp_path: Path) -> None:
    """A program with an ``instrument`` of its own gets that one, and is told that nothing is recorded."""
    write(tmp_path, "name = 'violin'", "own/instrument.py")
    write(tmp_path, "import instrument; print(instrument.name)", "own/train.py")
    done = run(tmp_path, [*RUN, "--", "own/train.py"])
    assert done.stdout == "violin\n"
    assert "nothing is recorded" in done.stderr


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("python train.py -E", ""),
        ("python -E train.py", "-E"),
        ("/usr/bin/python3.11 -IB -m train -S", "-I"),
        ("python3 -BSE -c -I", "-E -S"),
        ("python -Xdev -W error -X importtime -uI train.py", "-I"),
        ("python -W -E -c pass", ""),
        ("python -Wignore::UserWarning:E train.py", ""),
        ("python --check-hash-based-pycs never -Ic pass", "-I"),
        ("python -Ecpass", "-E"),
        ("python -mI", ""),
        ("python - -E", ""),
        ("torchrun -E train.py", ""),
    ],
)
def test_options_that_leave_it_out(line: str, options: str) -> None:
    """Options of Python are told from values, from those of the program and from those of other commands."""
    assert options == " ".join(excluded(line.split()))


@pytest.mark.parametrize("options", [["-E"], ["-IB"], ["-S"]])
def test_nothing_is_recorded(tmp_path: Path, options: list[str]) -> None:
    """Where Python does not load the start-up code, one sentence says so, and the program runs."""
    done = run(tmp_path, [*RUN, "--out", "nope", "--", sys.executable, *options, "-c", "print(1)"])
    flag = options[0][:2]
    lost = "nothing is recorded: Python does not load instrument's start-up code"
    said = f"instrument: {lost} with {flag}; remove {flag}\n"
    assert (0, "1\n", said) == (done.returncode, done.stdout, done.stderr)


def test_another_python(tmp_path: Path) -> None:
    """A Python without the library says so as the program, and not as a process that the program starts."""
    venv.create(tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    code = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', '2'], stderr=-1).stderr)"
    done = run(tmp_path, [*RUN, "--", str(python), "-c", code], PYTHONPATH=str(tmp_path))
    assert (0, "b''\n") == (done.returncode, done.stdout)
    assert [f"install instrument for {python}"] == re.findall("install instrument for [^ ]*", done.stderr)


def test_windows_back_to_back_in_the_backward(tmp_path: Path) -> None:
    """Where optimizers step in the backward, windows may follow each other without a pause."""
    write(
        tmp_path,
        """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()}
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
for _ in range(8):
    model(torch.randn(3, 4)).square().mean().backward()
""",
    )
    windows = ["--wait", "0", "--warmup", "0", "--active", "1", "--repeat", "5"]
    assert run(tmp_path, [*RUN, *windows, "--", "train.py"]).returncode == 0
    entries = entries_in(tmp_path / "runs/instrument")
    assert [entry["steps"] for entry in entries] == [[step, step] for step in range(5)]


def test_optimizers_that_compare_as_they_like(tmp_path: Path) -> None:
    """One that cannot be hashed disturbs nothing, and its steps count."""
    write(
        tmp_path,
        TRAIN.replace("torch.optim.SGD", "Odd").replace(
            "import torch",
            "import torch\nclass Odd(torch.optim.SGD):\n    __eq__ = None\n    __hash__ = None",
        ),
    )
    done = run(tmp_path, [*RUN, "--steps", "2", "--", "train.py"])
    assert done.returncode == 0
    assert "Where the step went" in done.stderr


def test_no_window_is_said(tmp_path: Path) -> None:
    """Where the steps asked for never come, the reason is told at the end."""
    write(tmp_path, TRAIN)
    done = run(tmp_path, [*RUN, "--steps", "100-110", "--", "train.py"])
    assert "no window was recorded" in done.stderr
    assert "before step 5" in done.stderr


def test_all_steps(tmp_path: Path) -> None:
    """The summary, at the end and of the file, is of the steps that were run; what follows is a row by itself."""
    write(tmp_path, TRAIN + "\nmodel.eval()\nfor _ in range(50):\n    model(torch.ones(4096, 2))\n")
    at_the_end = run(tmp_path, [*RUN, "--steps", "all", "--", "train.py"]).stderr
    of_the_file = run(tmp_path, [*RUN[:-1], "summarize", *map(str, tmp_path.glob("runs/*/*/*.gz"))]).stdout
    for text in (at_the_end, of_the_file):
        assert "(mean of steps 0-4)" in text
        assert re.search(r"^Linear +1 +\d", text, re.MULTILINE)
        assert "(eval)" not in text
        assert re.search(r"^\(in no region\) +\d", text, re.MULTILINE)
        assert re.search(r"^\(outside steps, total\) +\d", text, re.MULTILINE)
        shares = [
            float(found) for found in re.findall(r"^[\w(].* (\d+\.\d) +#* *$", text.split("\n\n")[0], re.MULTILINE)
        ]
        assert abs(sum(shares) - 100) < 1
    assert at_the_end.split("\nFiles")[0].endswith(of_the_file.split("\nFiles")[0])


def test_off_prints_the_command(tmp_path: Path) -> None:
    """With INSTRUMENT=0 the command that is printed is the program's, and it is not run."""
    write(tmp_path, "print('ran')")
    done = run(tmp_path, [*RUN, "--print-command", "--", "train.py"], INSTRUMENT="0")
    assert done.stdout == f"{sys.executable} train.py\n"


def test_closed_output(tmp_path: Path) -> None:
    """Without a standard output the program runs all the same."""
    write(tmp_path, "open('ran', 'w')")
    done = run(tmp_path, ["bash", "-c", f"{sys.executable} -m instrument run -- train.py >&-"])
    assert done.returncode == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.nsys
def test_no_folder_for_a_report(tmp_path: Path) -> None:
    """A folder that cannot be made is one line, and nothing is run."""
    write(tmp_path, "print('ran')")
    (tmp_path / "taken").touch()
    done = run(tmp_path, [*RUN, "--profiler", "nsys", "-o", "taken", "--", "train.py"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot write to" in done.stderr


MODEL = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
BY_HAND = f"""{MODEL}
def train_step(number):
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    model.zero_grad()
for number in range(6):
    train_step(number)
"""
EVALUATION = f"""{MODEL}
with torch.no_grad():
    for _ in range(6):
        model(torch.ones(1, 2))
"""
LBFGS = f"""{MODEL}
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss
for _ in range(6):
    optimizer.step(closure)
"""
LATE = f"""{MODEL}
optimizer = None
for number in range(12):
    model(torch.ones(1, 2)).sum().backward()
    if number % 2:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("program", "options", "last", "said"),
    [
        (BY_HAND, [], 6, "each backward pass counts as a step"),
        (EVALUATION, [], 6, "each call of Sequential counts as a step"),
        (LBFGS, [], 6, None),
        (LATE, [], 6, "each backward pass counts as a step"),
        (TRAIN.replace("range(5)", "range(6)"), ["--step-on", "forward"], 6, None),
        (LATE, ["--step-on", "backward"], 12, None),
        (BY_HAND, ["--step-on", "train.py:train_step"], 6, None),
    ],
)
def test_what_a_step_is(tmp_path: Path, program: str, options: list[str], last: int, said: str | None) -> None:
    """The best sign that the program gives, which is said where it is no optimizer; or what the user says."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", "3,1000", *options, "--", "train.py"])
    assert done.returncode == 0, done.stderr
    assert said is None or said in done.stderr
    assert (said is None) == ("--step-on" not in done.stderr)
    recorded, missed = entries_in(tmp_path / "runs/instrument")[-2:]
    assert (recorded["status"], recorded["steps"]) == ("recorded", [3, 3])
    assert missed["reason"] == f"the loop ended before step {last}"
    assert "Sequential" in done.stderr or "Linear" in done.stderr


@pytest.mark.parametrize("program", [TRAIN, BY_HAND, EVALUATION])
def test_step_0(tmp_path: Path, program: str) -> None:
    """The first step is recorded where it is asked for, with the regions of the model."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", "0", "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert (entry["status"], entry["steps"]) == ("recorded", [0, 0])
    assert "Linear" in done.stderr


ACTOR_CRITIC = f"""{MODEL}
critic = torch.nn.Linear(2, 1)
optimizers = [torch.optim.SGD(network.parameters(), 0.1) for network in (critic, model)]
for number in range(9):
    for network, optimizer in list(zip((critic, model), optimizers))[: 1 + (number > 2)]:
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
SEARCHES = """
import gc, torch
searches = []
def counted(search):
    def call(*given):
        if torch.autograd._profiler_enabled():
            searches.append(1)
        return search(*given)
    return call
gc.get_objects, gc.get_referrers = counted(gc.get_objects), counted(gc.get_referrers)
"""


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (ACTOR_CRITIC, []),
        (LATE.replace("optimizer = None", "optimizer = torch.optim.SGD(model.parameters(), 0.1)"),
         ["--step-on", "backward", "--steps", "0-4"]),
        (TRAIN, ["--steps", "0"]),
        (EVALUATION, ["--steps", "all"]),
    ],
)  # fmt: skip
def test_no_search_is_recorded(tmp_path: Path, program: str, options: list[str]) -> None:
    """All objects of the process are searched before a window opens, and not inside."""
    write(tmp_path, f"{SEARCHES}{program}\nprint(len(searches))")
    done = run(tmp_path, [*RUN, *options, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert "recorded" == entry["status"]
    assert "0\n" == done.stdout
    assert "Linear" in done.stderr


@pytest.mark.parametrize(("steps", "inside"), [("2-6", False), ("0", True)])
def test_an_optimizer_that_is_made_in_a_window(tmp_path: Path, steps: str, inside: bool) -> None:
    """What it takes to find its model is between two steps, or in step 0 where that is recorded, and is said."""
    program = f"""{MODEL}
def train(network, count):
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(count):
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
if {inside}:
    model(torch.ones(1, 2))
else:
    train(model, 4)
train(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(2, 1)), 5)
"""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert entry["timing"]["own_ns"] > 0
    assert "While recording, the library itself worked for" in done.stderr
    trace = read_trace(tmp_path / "runs/instrument" / entry["files"][0]["path"])
    names = list(trace.regions.text("name"))
    assert "Tanh" in names
    own = [row for row, name in enumerate(names) if name == "instrument (own work)"]
    assert own
    for row in own:
        start, end = trace.regions.start_ns[row], trace.regions.end_ns[row]
        assert any((trace.steps.start_ns < end) & (start < trace.steps.end_ns)) == inside


@pytest.mark.parametrize(
    ("steps", "entries"),
    [
        ([], [("recorded", [103, 105])]),
        (["--steps", "0,2-4,103"], [("skipped", [0, 0]), ("not reached", None), ("recorded", [103, 103])]),
    ],
)
def test_steps_that_pass_unseen(tmp_path: Path, steps: list[str], entries: list[Any]) -> None:
    """No window is recorded of calls that ended before it was known that a call is a step."""
    write(tmp_path, f"{MODEL}for _ in range(110):\n    model(torch.ones(1, 2))\n")
    done = run(tmp_path, [*RUN, *steps, "--", "train.py"])
    unseen = "steps up to 100 passed before it was known what a step is"
    assert unseen in done.stderr
    assert 1 == done.stderr.count("use --step-on to choose something else")
    found = entries_in(tmp_path / "runs/instrument")
    assert [(entry["status"], entry["steps"]) for entry in found] == entries
    assert {entry["reason"] for entry in found if entry["status"] != "recorded"} <= {unseen}
    assert "Linear" in done.stderr.split("Where the step went")[1]


@pytest.mark.parametrize(
    ("end", "status", "steps"),
    [
        ("", "partial", None),
        ("1 / 0", "partial", [5, 5]),
        ("import signal; signal.raise_signal(signal.SIGTERM)", "partial", [5, 5]),
    ],
)
def test_step_after_the_last_update(tmp_path: Path, end: str, status: str, steps: list[int] | None) -> None:
    """It is cut short where an error or a signal ends the program in it; at the program's end it never ran."""
    write(tmp_path, f"{TRAIN}\n{end}\n")
    done = run(tmp_path, [*RUN, "--steps", "2,5", "--", "train.py"])
    found = entries_in(tmp_path / "runs/instrument")
    assert [(entry["status"], entry["steps"]) for entry in found] == [("recorded", [2, 2]), (status, steps)]
    assert [None, steps and 5] == [entry["cut_step"] for entry in found]
    assert bool(steps) == ("(step 2; step 5 was cut short)" in done.stderr)
    if steps is None:
        assert found[-1]["reason"] == "the loop ended before step 5"
        assert "Recorded: 1 of the 5 steps run so far" in done.stderr
        assert "The 3 steps around them" in done.stderr
        assert "window-0002" not in done.stderr


@pytest.mark.parametrize("wrong", ["nothing", "no.py:step", "train:a b"])
def test_wrong_sign_of_a_step(tmp_path: Path, wrong: str) -> None:
    """It is said at once."""
    done = run(tmp_path, [*RUN, "--step-on", wrong, "--", "train.py"])
    assert (done.returncode, wrong.partition(":")[0] in done.stderr) == (2, True)


def test_function_that_is_not_there(tmp_path: Path) -> None:
    """At the end it is said that nothing was recorded, and why."""
    write(tmp_path, TRAIN)
    done = run(tmp_path, [*RUN, "--step-on", "train.py:nothing", "--", "train.py"])
    assert "was not found, or never called" in done.stderr


FAILING = [
    "model(torch.ones(1, 2)).sum().backward(torch.ones(3))",
    "optimizer.step(1)",
    "torch.amp.GradScaler('cpu').step(None)",
    "torch.ones(2).copy_(torch.ones(3))",
    "torch.ones(2).to('nothing')",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1, 2, 3, 4, 5)",
    "torch.optim.SGD([])",
]


def test_tracebacks_in_a_window(tmp_path: Path) -> None:
    """No frame of the library is in a traceback of the program, whichever torch function raises."""
    caught = "".join(f"        try: {line}\n        except Exception: traceback.print_exc()\n" for line in FAILING)
    write(tmp_path, f"import traceback\n{TRAIN}    if _ == 3:\n{caught}        model(torch.ones(1, 3))\n")
    plain = run(tmp_path, [sys.executable, "train.py"]).stderr
    done = run(tmp_path, [*RUN, "--", "train.py"]).stderr
    assert len(FAILING) + 1 == plain.count("Traceback")
    assert str(SOURCE) not in done
    frames = re.findall(r'File "(.*)", line \d+, in (?!inner)(.*)', plain)
    assert frames == re.findall(r'File "(.*)", line \d+, in (?!inner)(.*)', done)


SIGTERM = (
    TRAIN.replace("range(5)", "range(10**9)")
    + """
    if _ == 4:
        print("ready", flush=True)
    {body}
"""
)


@pytest.mark.parametrize(
    ("handler", "code"),
    [("", -signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 3)],
)
def test_sigterm(tmp_path: Path, handler: str, code: int) -> None:
    """An open window is saved, and the process ends by the signal; a program's own handler is left alone."""
    write(tmp_path, f"import signal, sys\n{handler}\n" + SIGTERM.format(body="pass"))
    with subprocess.Popen(
        [*RUN, "--steps", "2-1000000000", "--", "train.py"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert entry["status"] == "partial"
    assert entry["files"]
    assert "Where the step went" in said


def test_sigterm_twice(tmp_path: Path) -> None:
    """The second signal ends the process at once, also where Python runs no handler."""
    stuck = """
import ctypes
def stuck():
    mutex = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(mutex)
"""
    write(tmp_path, stuck + SIGTERM.format(body="if _ == 4: stuck()"))
    with subprocess.Popen(
        [*RUN, "--steps", "2-1000000000", "--", "train.py"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "stuck\n"]
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.parametrize("ending", ["SyncError('on purpose')", "ZeroDivisionError('on purpose')"])
def test_sigterm_where_saving_fails(tmp_path: Path, ending: str) -> None:
    """The process ends by the signal all the same."""
    patch = f"""
import instrument.integrations.loop
from instrument.errors import SyncError
def stop(*_, **__):
    raise {ending}
instrument.integrations.loop.Loop.stop = stop
"""
    body = "if _ == 5:\n        import signal; signal.raise_signal(signal.SIGTERM)"
    write(tmp_path, patch + SIGTERM.format(body=body))
    done = run(tmp_path, [*RUN, "--steps", "2-1000000000", "--", "train.py"], INSTRUMENT_STRICT="1")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "ready\n")


def test_sigterm_after_the_last_window(tmp_path: Path) -> None:
    """The handler and the wakeup descriptor are there while windows are ahead, and no longer."""
    text = """
    import signal, threading
    wakeup = signal.set_wakeup_fd(-1)
    if wakeup != -1:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    threads = sum(thread.name == "instrument-sigterm" for thread in threading.enumerate())
    print(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, wakeup != -1, threads if _ < 2 else "")
"""
    write(tmp_path, TRAIN + text)
    for options in (["--steps", "2"], ["--profiler", "none"]):
        done = run(tmp_path, [*RUN, *options, "--", "train.py"])
        ahead = ["False", "False", "0"] if "none" in options else ["True", "True", "1"]
        window = [*2 * [ahead], *3 * [["False", "False"]]]
        assert [line.split() for line in done.stdout.splitlines()] == window


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_in_c_stays(tmp_path: Path, when: str) -> None:
    """`faulthandler` sets one that Python does not know of: SIGTERM prints the stacks, and the program goes on."""
    register = "import faulthandler, os, signal; faulthandler.register(15, chain=False, all_threads=False)"
    sent = "\n    if _ in (3, 4): import os, signal; os.kill(os.getpid(), signal.SIGTERM)\nprint('end')"
    before, after = (register, "") if when == "before" else ("", f"\n    if _ == 1: {register}")
    write(tmp_path, f"{before}\n{TRAIN}{after}{sent}")
    done = run(tmp_path, [*RUN, "--steps", "2", "--", "train.py"])
    assert (done.returncode, done.stdout, done.stderr.count("most recent call first")) == (0, "end\n", 2)


@pytest.mark.parametrize("times", [1, 2])
def test_a_handler_that_the_program_sets_later(tmp_path: Path, times: int) -> None:
    """It gets the signals from then on, also while windows are to come."""
    text = f"""
    import os, signal, time
    import instrument.bootstrap.termination as termination
    termination._GRACE_S = 0.1
    if _ == 1:
        signal.signal(signal.SIGTERM, lambda *_: print("saved"))
    if _ in (2, 3)[:{times}]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
print("end")
"""
    write(tmp_path, TRAIN + text)
    done = run(tmp_path, [*RUN, "--steps", "0,100", "--", "train.py"])
    assert (done.returncode, done.stdout) == (0, times * "saved\n" + "end\n")


@pytest.mark.parametrize("last", [64, 1024])
def test_a_program_that_closes_all_files(tmp_path: Path, last: int) -> None:
    """Those that it opens under the same numbers are neither written to nor closed."""
    body = f"""
    if _ == 0:
        import os, signal, sys
        os.closerange(3, {last})
        files = [open(f"log{{number}}", "wb", buffering=0) for number in range(300)]
        signal.signal(signal.SIGUSR1, lambda *_: print("signal"))
    if _ == 2:
        os.kill(os.getpid(), signal.SIGUSR1)
    for file in files:
        file.write(b"step\\n")
for file in files:
    file.write(b"end\\n")
assert all(os.path.getsize(file.name) == 29 for file in files)
"""
    write(tmp_path, TRAIN + body)
    done = run(tmp_path, [*RUN, "--steps", "1", "--", "train.py"])
    assert (done.returncode, done.stdout) == (0, "signal\n"), done.stderr
    assert entries_in(tmp_path / "runs/instrument")[0]["files"]


def test_children_have_the_default(tmp_path: Path) -> None:
    """A forked process ends by the signal as it would, and nothing of ours is left in it."""
    write(
        tmp_path,
        TRAIN
        + """
    if _ == 3:
        import os, signal
        child = os.fork()
        if not child:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(7)
        assert os.waitpid(child, 0)[1] == 7 << 8
""",
    )
    assert run(tmp_path, [*RUN, "--steps", "100", "--", "train.py"]).returncode == 0


def test_one_backward(tmp_path: Path) -> None:
    """Code that is annotated "backward" has that region once."""
    text = TRAIN.replace("    model(", "    with instrument.annotate('backward'): model(")
    write(tmp_path, f"import instrument\n{text}")
    done = run(tmp_path, [*RUN, "--steps", "2", "--", "train.py"])
    assert len(re.findall(r"^ *backward +", done.stderr, re.MULTILINE)) == 1


CAPTURED = """
import contextlib, io, sys, torch
model = torch.nn.Linear(2, 2)
captured = io.StringIO()
with contextlib.redirect_stderr(captured):
    for _ in range(60):
        model(torch.ones(1, 2)).sum().backward()
    sys.stderr.write("the program's own")
print(captured.getvalue(), end="")
"""


def test_captured_standard_error(tmp_path: Path) -> None:
    """What the program captures of its own is its own; log lines and the summary are on the terminal."""
    write(tmp_path, CAPTURED)
    done = run(tmp_path, [*RUN, "--", "train.py"])
    assert done.stdout == "the program's own"
    assert "instrument: no optimizer step was seen" in done.stderr
    assert "Where the step went" in done.stderr
