"""The subcommand `summarize` and the help of the command line."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import instrument
from instrument.read.kineto import kineto
from instrument.read.tables.trace import Trace
from instrument.start.cli import SUBCOMMANDS, app

GPU_TRACE = Path(__file__).parent / "data" / "gpu_two_steps.json"


def command(*args: str | Path, input: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", *map(str, args)], input=input, capture_output=True, timeout=120
    )


def test_summarize() -> None:
    """`summarize` prints the summary of a window, the longest kernels, and how to open the file."""
    result = command("summarize", GPU_TRACE)
    text = result.stdout.decode()
    assert result.returncode == 0
    assert not result.stderr
    assert "Where the step went" in text
    assert "gemm                            4   175 us       81.2" in text
    assert "ui.perfetto.dev" in text
    assert str(GPU_TRACE) in text


def test_numbers() -> None:
    """With --json, `summarize` prints what `instrument.metrics` returns, and the source."""
    result = command("summarize", "--json", GPU_TRACE)
    printed = json.loads(result.stdout)
    trace = instrument.read_trace(GPU_TRACE)
    assert isinstance(trace, Trace)
    expected = instrument.metrics(trace)
    assert json.loads(json.dumps(expected)) == {key: printed[key] for key in expected}
    assert printed["path"] == str(GPU_TRACE)
    assert printed["coverage"]["launch"]["of"] == expected["gpu_events"]


def test_collectives() -> None:
    """The option selects the kernels that count as communication."""
    result = command("summarize", "--json", "--collectives", ".", GPU_TRACE)
    assert json.loads(result.stdout)["kernel_compute_ns"] == 0
    wrong = command("summarize", "--json", "--collectives", "(", GPU_TRACE)
    assert wrong.returncode == 2
    assert b"--collectives" in wrong.stderr
    assert command("summarize", "--collectives", "(", GPU_TRACE).returncode == 2
    assert (
        "exposed communication 0.0 %" not in command("summarize", "--collectives", ".", GPU_TRACE).stdout.decode()
    )


@pytest.mark.process
def test_standard_input() -> None:
    """A trace can be read from a pipe, also compressed."""
    piped = json.loads(command("summarize", "--json", "-", input=gzip.compress(GPU_TRACE.read_bytes())).stdout)
    assert json.loads(command("summarize", "--json", GPU_TRACE).stdout) == piped | {"path": str(GPU_TRACE)}
    assert command("summarize", "-", input=b"").stderr == b"instrument: cannot read -: it is empty\n"


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["summarize", GPU_TRACE], ["summarize", "--json", GPU_TRACE], ["diagnose", GPU_TRACE],
        ["diagnose", "--json", GPU_TRACE], ["diagnose", "--markdown", GPU_TRACE], ["whatif", GPU_TRACE],
        ["open", "--no-browser", GPU_TRACE],
        ["syncs", GPU_TRACE], ["syncs", "--json", GPU_TRACE], ["--help"], ["--version"],
        ["run", "--print-command", "train.py"],
    ],
)  # fmt: skip
def test_a_full_disk(arguments: list[str | Path]) -> None:
    """If the output cannot be written, every command says so in one line, and ends with code 1."""
    line = [sys.executable, "-m", "instrument", *map(str, arguments)]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert result.stderr.decode() == "instrument: cannot write the output: No space left on device\n"
    assert result.returncode == 1


def test_a_reader_that_stops() -> None:
    """If the reader of the output stops, the command ends without a message."""
    line = [sys.executable, "-m", "instrument", "summarize", str(GPU_TRACE)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""
        assert started.wait(60) in (0, 1)


def test_several(tmp_path: Path) -> None:
    """One unreadable file does not stop the others, and the exit code reports it."""
    (tmp_path / "bad.json").write_text("no trace")
    result = command("summarize", tmp_path / "bad.json", tmp_path / "missing.json", GPU_TRACE)
    assert result.returncode == 1
    assert b"Where the step went" in result.stdout
    lines = result.stderr.decode().splitlines()
    assert len(lines) == 2
    assert "bad.json" in lines[0]
    assert "it is a text file" in lines[0]
    assert "missing.json" in lines[1]
    assert "No such file" in lines[1]
    assert len(json.loads(command("summarize", "--json", GPU_TRACE, GPU_TRACE).stdout)) == 2


def test_a_damaged_file(tmp_path: Path) -> None:
    """The readable part is printed, and the loss is reported."""
    text = GPU_TRACE.read_text()
    (tmp_path / "cut.json").write_text(text[: len(text) * 2 // 3])
    result = command("summarize", tmp_path / "cut.json")
    assert result.returncode == 0
    assert "The file is damaged: the file ends in an event" in result.stdout.decode()
    assert "Events known to be lost: 1 (" in result.stdout.decode()
    assert 1 == json.loads(command("summarize", "--json", tmp_path / "cut.json").stdout)["lost"]["events"]


def test_ranks(tmp_path: Path) -> None:
    """The ranks of one job in one folder are printed together."""
    for rank in (0, 2):
        content = json.loads(GPU_TRACE.read_text())
        content["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
        (tmp_path / f"worker{rank}.pt.trace.json").write_text(json.dumps(content))
    text = command("summarize", tmp_path).stdout.decode()
    assert "2 of 4 ranks" in text
    assert '"clock" is the offset to add to the times of a rank' in text
    assert "Missing: rank 1, 3" in text
    found = json.loads(command("summarize", "--json", str(tmp_path / "*.json")).stdout)
    assert [0, 2] == [number["rank"] for number in found["ranks"]]
    assert ([1, 3], 4) == (found["missing"], found["world_size"])


def test_a_second_run_into_the_same_folder(tmp_path: Path) -> None:
    """The last run is printed, and the file of the other run is listed; a single rank is not mentioned."""
    for number, start in enumerate((0, 10_000_000), 1):
        content = json.loads(GPU_TRACE.read_text())
        for event in content["traceEvents"]:
            event["ts"] = event.get("ts", 0) + start
        (tmp_path / f"rank0.{number}.pt.trace.json").write_text(json.dumps(content))
    text = command("summarize", tmp_path).stdout.decode()
    assert text.startswith(f"{tmp_path}/rank0.2.pt.trace.json\n")
    assert f"Left out: {tmp_path}/rank0.1.pt.trace.json (steps 5-6, another run)\n" in text
    assert " ranks" not in text
    assert "Rank 0" not in text


def test_the_share_of_the_run(tmp_path: Path) -> None:
    """For the trace of a window, the summary has the recorded share of the run, from the manifest."""
    path = tmp_path / "window-0001" / "rank0.1.pt.trace.json"
    path.parent.mkdir()
    path.write_text(GPU_TRACE.read_text())
    timing = {
        "recorded_ns": 1,
        "around_ns": 1_000_000,
        "around_steps": [[0, 39]],
        "run_steps": 50,
        "run_ns": 80_000_000,
    }
    entry = {"files": [{"path": f"window-0001/{path.name}", "bytes": 1}], "timing": timing}
    (tmp_path / "manifest.jsonl").write_text(f"{json.dumps(entry)}\n")
    text = command("summarize", path).stdout.decode()
    assert "Recorded: 2 of the first 50 steps, 2.5 % of 80.0 ms\n" in text
    assert "The 40 steps around them took 1.00 ms" in text
    assert timing == json.loads(command("summarize", "--json", path).stdout)["timing"]


def test_problems_of_ranks(tmp_path: Path) -> None:
    """Damaged files, unreadable files and unknown ranks are reported below the table."""
    text = GPU_TRACE.read_text()
    (tmp_path / "rank0.json").write_text(text)
    (tmp_path / "rank1.json").write_text(text[: len(text) // 2])
    (tmp_path / "rank2.json").write_text("")
    (tmp_path / "another.json").write_text(text)
    (tmp_path / "settings.json").write_text('{"lr": 1}')
    printed = command("summarize", tmp_path).stdout.decode()
    assert f"Damaged, rank 1, {tmp_path / 'rank1.json'}: the file ends in an event" in printed
    assert f"Cannot read {tmp_path / 'rank2.json'}: it is empty" in printed
    assert "Neither the file nor its name gives the rank; numbered by name: 2" in printed
    assert "settings" not in printed
    assert 2 == json.loads(command("summarize", "--json", tmp_path).stdout)["ranks"][2]["rank"]


def test_no_torch() -> None:
    """Reading a trace does not import torch."""
    code = (
        "import sys; sys.argv = ['instrument', 'summarize', sys.argv[1]]\n"
        "from instrument.start.cli import app; app(standalone_mode=False); print('torch' in sys.modules)"
    )
    line = [sys.executable, "-c", code, str(GPU_TRACE)]
    done = subprocess.run(line, check=True, capture_output=True, text=True, timeout=120)
    assert "False" == done.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", [[], ["run"], ["summarize"], ["open"], ["syncs"], ["doctor"]])
def test_flags_show_no_type(command: list[str]) -> None:
    """Flags, including --help, are shown by their names only."""
    shown = CliRunner().invoke(app, [*command, "--help"]).stdout
    assert "--help" in shown
    assert "bool" not in shown


@pytest.mark.parametrize("command", ["run", "summarize", "syncs", "doctor"])
def test_values_are_words(command: str) -> None:
    """The value of an option is shown as a word or its choices, not as a Python type."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).stdout
    types = re.findall(r"<[^>|]*>", shown)
    assert "--help" in shown
    assert not types


def test_the_list_of_the_commands() -> None:
    """Its sentences, known without the modules of the commands, are the first of their docstrings."""
    for name, text in SUBCOMMANDS.items():
        help = import_module(f"instrument.start.commands.{name}").subcommand.help
        assert text == " ".join(help.partition("\n\n")[0].split())


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_help_fits(command: str) -> None:
    """No word of the help is cut off in a terminal of 80 columns."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "--help" in shown
    assert [] == [line for line in shown.splitlines() if "…" in line]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help(option: str) -> None:
    """The help lists the commands, and --version prints the version."""
    result = command(option)
    assert result.returncode == 0
    if option == "--version":
        assert instrument.__version__.encode() in result.stdout
    else:
        listed = re.findall(r"^[│|] (\w\S*) ", result.stdout.decode().partition("Commands")[2], re.MULTILINE)
        assert listed == list(SUBCOMMANDS)


def window(folder: Path, run: str, number: int, start: int, hidden: list[str]) -> None:
    """Write a window whose steps begin with ``start``."""
    content = json.loads(GPU_TRACE.read_text())
    for event in content["traceEvents"]:
        event["ts"] = event.get("ts", 0) + start * 1_000_000
        if event["name"].startswith("ProfilerStep#"):
            event["name"] = f"ProfilerStep#{int(event['name'].partition('#')[2]) - 5 + start}"
    name = f"window-{number:04d}/rank0.{run}.pt.trace.json"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    entry = {
        "run": run, "rank": 0, "window": number, "steps": [start, start + 1], "end_ns": start,
        "files": [{"path": name, "bytes": 1}], "hidden_regions": hidden,
        "timing": {"recorded_ns": 1, "around_ns": None, "around_steps": 0, "run_steps": 90, "run_ns": 10**9},
    }  # fmt: skip
    with (folder / "manifest.jsonl").open("a") as manifest:
        manifest.write(f"{json.dumps(entry)}\n")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Write two runs into one folder: three windows, then two."""
    for run, start, windows in ("first", 10, 3), ("second", 50, 2):
        for number in range(1, windows + 1):
            window(tmp_path, run, number, start + 10 * number, ["attention"])
    with (tmp_path / "manifest.jsonl").open("a") as manifest:
        manifest.write('{"files": [{"path": "../x"}, 3, {"path": 4}], "steps": 1, "end_ns": 9e9}\n[1]\nno json\n')
    return tmp_path


def test_the_folder_of_a_run(runs: Path) -> None:
    """The windows of the last run are summarized, as at the end of the run; those of other runs are named."""
    text = command("summarize", runs).stdout.decode()
    assert text.startswith(f"The 2 windows of the last run in {runs}\n")
    assert "(mean of steps 60-61, 70-71)" in text
    assert "Recorded: 4 of the first 90 steps" in text
    assert "Not shown, because they are inside compiled code: attention" in text
    for number, steps in (1, "20-21"), (2, "30-31"), (3, "40-41"):
        assert (
            f"Left out: {runs}/window-{number:04d}/rank0.first.pt.trace.json (steps {steps}, another run)\n"
            in text
        )
    assert all(f"  {runs}/window-{number:04d}/rank0.second.pt.trace.json\n" in text for number in (1, 2))
    assert text.count("rank0.second") == 2


def test_windows_without_a_trace(runs: Path) -> None:
    """A window of the last run that failed is named; in a folder without traces also one that was not reached."""
    lines = [
        {"run": "second", "window": number, "status": "failed", "reason": f"reason {number}"} for number in (3, 4)
    ]
    lines.insert(0, {**lines[0], "run": "first"})
    lines.append({**lines[0], "window": 5})  # that of a killed run is written when the next one ends
    with (runs / "manifest.jsonl").open("a") as manifest:
        manifest.writelines(f"{json.dumps(line)}\n" for line in lines)
    messages = command("summarize", runs).stderr.decode().splitlines()
    assert messages == [f"instrument: {runs}, window {number} failed: reason {number}" for number in (3, 4)]
    empty = runs / "empty"
    empty.mkdir()
    (empty / "manifest.jsonl").write_text(json.dumps({**lines[0], "status": "not reached"}))
    for name in ("summarize", "diagnose"):
        assert "the run has no trace; window 3 not reached: reason 3" in command(name, empty).stderr.decode()


def test_windows_that_are_being_finished(runs: Path) -> None:
    """A trace without a line in the manifest is named; nothing is said once all have one."""
    assert command("summarize", runs).stderr == b""
    raw = runs / "window-0003" / "rank0.third.pt.trace.json"
    for name in (raw.name, f"{raw.name}.gz", f".{raw.name}.gz.some.part"):
        raw.with_name(name).write_text("{}")
    messages = command("summarize", runs).stderr.decode()
    assert (
        f"instrument: 1 trace of {runs} without a line in manifest.jsonl: the window is being finished" in messages
    )
    assert messages.count("rank0.third") == 1


def test_each_window_is_read_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last window, whose ranks are read first, is not read again with the others."""
    (runs / "window-0002" / "rank0.first.pt.trace.json").unlink()  # otherwise two processes read
    paths: list[Path] = []
    original = kineto.read_kineto_ranks

    def record_path(path: Path, *arguments: Any) -> Any:
        paths.append(path)
        return original(path, *arguments)

    monkeypatch.setattr(kineto, "read_kineto_ranks", record_path)
    result = CliRunner().invoke(app, ["summarize", str(runs)])
    assert "(mean of steps 60-61, 70-71)" in result.stdout
    assert sorted(paths) == [runs / f"window-{number:04d}/rank0.second.pt.trace.json" for number in (1, 2)]


def test_one_window_of_a_run(runs: Path) -> None:
    """For the folder of a window, only that window is summarized."""
    text = command("summarize", runs / "window-0001").stdout.decode()
    assert "(mean of steps 60-61)" in text


def test_the_numbers_of_a_run(runs: Path) -> None:
    """With --json, the last window is printed, and each one of the run; other runs are listed as left out."""
    printed = json.loads(command("summarize", "--json", runs).stdout)
    assert printed["ranks"][0]["path"] == f"{runs}/window-0002/rank0.second.pt.trace.json"
    assert len(printed["left_out"]) == 3
    files = [f"{runs}/window-000{number}/rank0.second.pt.trace.json" for number in (1, 2)]
    assert files == [window["path"] for window in printed["windows"]]
    assert [[60, 61], [70, 71]] == [window["step_numbers"] for window in printed["windows"]]


def test_a_window_of_a_run_that_cannot_be_read(runs: Path) -> None:
    """The other windows are summarized, and the exit code reports the failure."""
    (runs / "window-0001" / "rank0.second.pt.trace.json").write_text("no trace")
    result = command("summarize", runs)
    assert result.returncode == 1
    assert b"rank0.second.pt.trace.json: it is a text file" in result.stderr
    assert b"(mean of steps 70-71)" in result.stdout
