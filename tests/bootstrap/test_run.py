"""A program behaves under `instrument run` as without: arguments, exit code, signals and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from instrument.start.commands.run import excluding_options
from tests.bootstrap.programs import RUN, SHOW, SOURCE, TRAIN, entries_in, run, run_warm, write
from tests.support import warm
from tests.support.programs import environment

pytestmark = pytest.mark.process


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
def test_unchanged(tmp_path: Path, program: list[str], plain: list[str]) -> None:
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
    """A traceback looks as it does without `instrument run`."""
    write(tmp_path, "import torch\n1 / 0")
    assert run(tmp_path, [*RUN, "--", "train.py"]).stderr.startswith(
        run(tmp_path, [sys.executable, "train.py"]).stderr
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1])
def test_signals(tmp_path: Path, number: signal.Signals) -> None:
    """The started process is the program: a signal reaches it, and ends it as without `instrument run`."""
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


def test_interrupted_training(tmp_path: Path) -> None:
    """Steps recorded before Ctrl-C are kept, and the program ends as it would without."""
    write(
        tmp_path,
        TRAIN.replace("range(5)", "iter(int, 1)").replace(
            "    optimizer.step()", "    optimizer.step(); print(1, flush=True)"
        ),
    )
    command = [*RUN, "--steps", "2-1000000", "--", "train.py"]
    with warm.started(command, environment(), cwd=tmp_path) as program:
        for _ in range(20):
            program.readline()
        program.send_signal(signal.SIGINT)
        done = program.wait()
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr
    (entry,) = [
        json.loads(line) for line in (tmp_path / "runs/instrument/manifest.jsonl").read_text().splitlines()
    ]
    assert entry["status"] == "partial", entry
    assert (tmp_path / "runs/instrument" / entry["files"][0]["path"]).exists()


def test_off(tmp_path: Path) -> None:
    """With INSTRUMENT=0 the program runs without this library."""
    write(
        tmp_path, TRAIN + "\nimport sys, os\nprint(sorted(n for n in sys.modules if n.startswith('instrument')))"
    )
    done = run_warm(tmp_path, [*RUN, "--", "train.py"], INSTRUMENT="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_own_sitecustomize(tmp_path: Path) -> None:
    """A user's own ``sitecustomize`` still runs, and is the module of that name."""
    write(tmp_path, "import os\nos.environ['OWN'] = 'yes'\nvalue = 3", "own/sitecustomize.py")
    write(tmp_path, "import os, sitecustomize\nprint(os.environ['OWN'], sitecustomize.value)")
    paths = os.pathsep.join([str(tmp_path / "own"), environment()["PYTHONPATH"]])
    done = run(tmp_path, [*RUN, "--", "train.py"], PYTHONPATH=paths)
    assert (done.stdout, done.stderr) == ("yes 3\n", "")


def test_failing_sitecustomize(tmp_path: Path) -> None:
    """Python reports a failing ``sitecustomize``, as without, and the program runs."""
    write(tmp_path, "1 / 0", "own/sitecustomize.py")
    write(tmp_path, "print('ran')")
    paths = os.pathsep.join([str(tmp_path / "own"), environment()["PYTHONPATH"]])
    done = run(tmp_path, [*RUN, "--", "train.py"], PYTHONPATH=paths)
    assert done.stdout == "ran\n"
    assert "ZeroDivisionError" in done.stderr


def test_processes_of_the_program(tmp_path: Path) -> None:
    """Processes that the program spawns or forks work, and only those that train record."""
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
    done = run_warm(tmp_path, [*RUN, "--steps", "2-3,6", "--", "train.py"])
    assert done.returncode == 0, done.stderr
    entries = entries_in(tmp_path / "runs/instrument")
    assert [(entry["status"], entry["steps"]) for entry in entries] == [("recorded", [2, 3]), ("recorded", [6, 6])]


def test_old_windows_and_copies(tmp_path: Path) -> None:
    """`--keep` removes old windows once `--upload` has copied them."""
    pytest.importorskip("fsspec")
    write(tmp_path, TRAIN.replace("range(5)", "range(9)"))
    options = ["--steps", "2,4,6", "--keep", "windows=1", "--upload", f"file://{tmp_path / 'remote'}"]
    done = run_warm(tmp_path, [*RUN, *options, "--", "train.py"])
    assert (0, "") == (done.returncode, done.stdout)
    assert ["window-0003"] == [path.name for path in (tmp_path / "runs/instrument").glob("window-*")]
    assert 3 == len(list((tmp_path / "remote").glob("window-*/*.pt.trace.json.gz")))
    events = [entry.get("event") for entry in entries_in(tmp_path / "runs/instrument")]
    assert (3, 3, 2) == (events.count(None), events.count("upload"), events.count("removed"))


def test_nothing_to_record(tmp_path: Path) -> None:
    """A program without steps gets a warning with a hint at its end; one without torch gets none."""
    write(tmp_path, "import torch")
    assert "--step-on" in run_warm(tmp_path, [*RUN, "--", "train.py"]).stderr
    write(tmp_path, TRAIN.replace("    optimizer.step()", "    pass"))
    assert "step() was not called" in run_warm(tmp_path, [*RUN, "--", "train.py"]).stderr
    write(tmp_path, "print(1)")
    assert run(tmp_path, [*RUN, "--", "train.py"]).stderr == ""


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
            "--every must be an integer >= 4 (--warmup 1 + --active 3): 2",
        ),
        (["--steps", "3,4", "--active", "2", "--", "train.py"], "in '3,4' with --active 2"),
        (["--modules", "x", "--", "train.py"], "--modules must be"),
        (["--ranks", "a", "--", "train.py"], "--ranks must be"),
        (["--budget", "x", "--", "train.py"], "--budget must be REGION=N"),
        ([], "nothing to run"),
        (["--", "no-such-program"], "program not found: no-such-program"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: list[str], said: str) -> None:
    """Wrong arguments are reported at once, in one line, and nothing runs."""
    write(tmp_path, "print('ran')")
    done = run_warm(tmp_path, [*RUN, *options])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_print_command(tmp_path: Path) -> None:
    """The printed command line does the same in a shell."""
    write(tmp_path, TRAIN)
    printed = run(tmp_path, [*RUN, "--steps", "2", "--print-command", "--", "train.py"])
    assert not (tmp_path / "runs").exists()
    done = run(tmp_path, ["bash", "-c", printed.stdout])
    assert "Where the step went" in done.stderr


def test_syncs(tmp_path: Path) -> None:
    """Without a GPU, a message says that synchronizations are not detected; windows are recorded."""
    write(tmp_path, TRAIN)
    done = run_warm(tmp_path, [*RUN, "--steps", "2", "--syncs", "--budget", "x=1", "--", "train.py"])
    assert "synchronizations are not detected" in done.stderr
    assert "Where the step went" in done.stderr


def test_profiler_none(tmp_path: Path) -> None:
    """``--profiler none`` opens no window and writes nothing."""
    write(tmp_path, TRAIN)
    done = run_warm(tmp_path, [*RUN, "--profiler", "none", "--", "train.py"])
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A message before the program and one for each window report the folder; the program is unaffected."""
    write(tmp_path, 'import sys; print("begun", file=sys.stderr)\n' + TRAIN)
    (tmp_path / "taken").write_text("")
    done = run_warm(
        tmp_path, [*RUN, "--repeat", "2", "--wait", "0", "--active", "1", "-o", "taken/x", "--", "train.py"]
    )
    first, begun, *rest = done.stderr.splitlines()
    windows = [line for line in rest if line.startswith("instrument")]
    assert first.startswith(f"instrument: cannot write to {tmp_path / 'taken' / 'x'}: nothing can be created in ")
    assert begun == "begun"
    assert [line.partition(",")[0] for line in windows] == [
        f"instrument: window.failed (window={window}" for window in (1, 2)
    ]
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_empty_entries_of_the_path(tmp_path: Path) -> None:
    """An empty entry of PYTHONPATH, which is the current folder, keeps its place."""
    write(tmp_path, "value = 5", "here.py")
    write(tmp_path, "import here; print(here.value)", "scripts/train.py")
    done = run(tmp_path, [*RUN, "--", "scripts/train.py"], PYTHONPATH=f"{os.pathsep}{environment()['PYTHONPATH']}")
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_another_module_of_the_same_name(tmp_path: Path) -> None:
    """A program with its own module ``instrument`` imports that one, and a message says so."""
    write(tmp_path, "name = 'violin'", "own/instrument.py")
    write(tmp_path, "import instrument; print(instrument.name)", "own/train.py")
    done = run(tmp_path, [*RUN, "--", "own/train.py"])
    assert done.stdout == "violin\n"
    assert "nothing is recorded" in done.stderr
    unread = run(tmp_path, ["sh", "-c", '"$@" 2>/dev/full', "sh", *RUN, "--", "own/train.py"])
    assert (unread.stdout, unread.returncode) == ("violin\n", 0)


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
def test_options_that_exclude_it(line: str, options: str) -> None:
    """Options of Python are distinguished from values and from options of the program and other commands."""
    assert options == " ".join(excluding_options(line.split()))


@pytest.mark.parametrize("options", [["-E"], ["-IB"], ["-S"]])
def test_nothing_is_recorded(tmp_path: Path, options: list[str]) -> None:
    """If Python does not load the start-up code, one message says so, and the program runs."""
    done = run(tmp_path, [*RUN, "--out", "nope", "--", sys.executable, *options, "-c", "print(1)"])
    flag = options[0][:2]
    lost = "nothing is recorded: Python does not load instrument's start-up code"
    said = f"instrument: {lost} with {flag}; remove {flag}\n"
    assert (0, "1\n", said) == (done.returncode, done.stdout, done.stderr)


def test_another_python(tmp_path: Path) -> None:
    """A Python without the library prints a message as the program, but not as one of its processes."""
    venv.create(tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    code = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', '2'], stderr=-1).stderr)"
    done = run(tmp_path, [*RUN, "--", str(python), "-c", code], PYTHONPATH=str(tmp_path))
    assert (0, "b''\n") == (done.returncode, done.stdout)
    assert [f"install instrument for {python}"] == re.findall("install instrument for [^ ]*", done.stderr)


def test_no_window_warning(tmp_path: Path) -> None:
    """If the requested steps are not reached, the reason is printed at the end."""
    write(tmp_path, TRAIN)
    done = run_warm(tmp_path, [*RUN, "--steps", "100-110", "--", "train.py"])
    assert "no window was recorded" in done.stderr
    assert "before step 5" in done.stderr


def test_all_steps(tmp_path: Path) -> None:
    """The summaries, at the end and of the file, cover the steps that ran; what follows has a row of its own."""
    write(tmp_path, TRAIN + "\nmodel.eval()\nfor _ in range(50):\n    model(torch.ones(4096, 2))\n")
    at_the_end = run_warm(tmp_path, [*RUN, "--steps", "all", "--", "train.py"]).stderr
    of_the_file = run_warm(tmp_path, [*RUN[:-1], "summarize", *map(str, tmp_path.glob("runs/*/*/*.gz"))]).stdout
    for text in (at_the_end, of_the_file):
        assert "(mean of steps 0-4)" in text
        assert re.search(r"^Linear +1 +\d", text, re.MULTILINE)
        assert "(eval)" not in text
        assert re.search(r"^\(in no region\) +\d", text, re.MULTILINE)
        assert re.search(r"^Outside the steps: \d", text, re.MULTILINE)
        shares = [
            float(found) for found in re.findall(r"^[\w(].* (\d+\.\d) +#* *$", text.split("\n\n")[0], re.MULTILINE)
        ]
        assert abs(sum(shares) - 100) < 1
    assert at_the_end.split("\nFiles")[0].endswith(of_the_file.split("\nFiles")[0])


def test_off_prints_the_command(tmp_path: Path) -> None:
    """With INSTRUMENT=0 the program's own command is printed, and does not run."""
    write(tmp_path, "print('ran')")
    done = run(tmp_path, [*RUN, "--print-command", "--", "train.py"], INSTRUMENT="0")
    assert done.stdout == f"{sys.executable} train.py\n"


def test_closed_output(tmp_path: Path) -> None:
    """The program runs without a standard output."""
    write(tmp_path, "open('ran', 'w')")
    done = run(tmp_path, ["bash", "-c", f"{sys.executable} -m instrument run -- train.py >&-"])
    assert done.returncode == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.nsys
def test_no_folder_for_a_report(tmp_path: Path) -> None:
    """A folder that cannot be created is reported in one line, and nothing runs."""
    write(tmp_path, "print('ran')")
    (tmp_path / "taken").touch()
    done = run(tmp_path, [*RUN, "--profiler", "nsys", "-o", "taken", "--", "train.py"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot write to" in done.stderr


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
    """Tracebacks of the program contain no frame of the library, whichever torch function raises."""
    caught = "".join(f"        try: {line}\n        except Exception: traceback.print_exc()\n" for line in FAILING)
    write(tmp_path, f"import traceback\n{TRAIN}    if _ == 3:\n{caught}        model(torch.ones(1, 3))\n")
    plain = run_warm(tmp_path, [sys.executable, "train.py"]).stderr
    done = run_warm(tmp_path, [*RUN, "--", "train.py"]).stderr
    assert len(FAILING) + 1 == plain.count("Traceback")
    assert str(SOURCE) not in done
    frames = re.findall(r'File "(.*)", line \d+, in (?!inner)(.*)', plain)
    assert frames == re.findall(r'File "(.*)", line \d+, in (?!inner)(.*)', done)


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
    """Output that the program captures is its own; log lines and the summary go to the terminal."""
    write(tmp_path, CAPTURED)
    done = run_warm(tmp_path, [*RUN, "--", "train.py"])
    assert done.stdout == "the program's own"
    assert "instrument: no optimizer step was seen" in done.stderr
    assert "Where the step went" in done.stderr
