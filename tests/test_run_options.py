"""The options of ``instrument run``: their defaults, and which have an effect with which profiler."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import instrument
from instrument.base.config import RUN
from instrument.integrations import loop as loops
from instrument.integrations.loop import Loop, loop_from_environment
from instrument.record.allocator_history.options import MemoryHistory
from instrument.record.exporters.torch_profiler import DETAILS
from instrument.record.windows.api import new_profile
from instrument.start import commands
from instrument.start.cli import app
from instrument.start.commands.run import Profiler

WINDOWS = {
    "steps": "2",
    "wait": "1",
    "warmup": "1",
    "active": "1",
    "repeat": "1",
    "every": "9",
    "out": "o",
    "ranks": "0",
    "trigger": "file",
    "black-box": None,
    "compile-log": None,
}
TORCH = {
    "detail": "full", "diagnose": None, "shapes": None, "memory": None, "stacks": None, "keep": "windows=20",
    "upload": "file:///o", "upload-timeout": "9",
}  # fmt: skip
NCU = {"region": "forward", "launches": "3"}
VENDOR = {"option": "--x"}
ALWAYS = {
    "modules": "2", "names": "path", "syncs": None, "budget": "x=1", "step-on": "backward", "print-command": None,
}  # fmt: skip
NEEDED = {"upload-timeout": ["--upload=file:///o"]}  # beside the option
OPTIONS = WINDOWS | TORCH | NCU | VENDOR | ALWAYS


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put every tool on PATH, and a script into the current folder."""
    for name in ("nsys", "ncu", "rocprofv3", "vtune"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\necho 2024.1.0\n")
        path.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.chdir(tmp_path)


def run(*options: str) -> Any:
    """Print the command line of a run."""
    return CliRunner().invoke(app, ["run", *options, "--print-command", "--", "train.py"])


def settings(*options: str) -> dict[str, object]:
    """Return the settings for the processes of a run."""
    result = run(*options)
    assert result.exit_code == 0, result.stderr
    (text,) = [word for word in shlex.split(result.stdout) if word.startswith("INSTRUMENT_RUN=")]
    found: dict[str, object] = json.loads(text.partition("=")[2])
    return found


def effective(option: str, profiler: Profiler) -> bool:
    if option in NCU:
        return profiler is Profiler.ncu
    if option in VENDOR:
        return profiler not in (Profiler.auto, Profiler.torch, Profiler.none)
    if option in TORCH:
        return profiler in (Profiler.auto, Profiler.torch)
    return option in ALWAYS or profiler is not Profiler.none


def test_every_option_is_known() -> None:
    """The cases below contain all options."""
    names = {name.replace("_", "-") for name in commands.run.run.__annotations__}
    assert names - {"ctx", "program", "return", "profiler"} == set(OPTIONS)


@pytest.mark.parametrize("profiler", Profiler)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_without_effect_are_refused(option: str, profiler: Profiler) -> None:
    """An option has an effect with a profiler, or is rejected with a message that names both."""
    value = OPTIONS[option]
    words = [f"--{option}" if value is None else f"--{option}={value}"]
    if effective(option, profiler):
        result = run("--profiler", profiler.value, *words, *NEEDED.get(option, ()))
        assert (result.exit_code, result.stderr) == (0, "")
    else:
        result = run("--profiler", profiler.value, *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--{option} has no effect with --profiler {profiler.value}" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("profiler", ["nsys", "ncu", "rocprof", "vtune"])
def test_ranks_of_a_whole_run(profiler: str) -> None:
    """A vendor's tool that records the whole run records every rank."""
    result = run("--profiler", profiler, "--steps", "all", "--ranks", "0")
    assert result.exit_code == 2
    assert "--ranks has no effect with --steps all" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "3", "--repeat", "0"], "--repeat cannot be combined with --steps"),
        (["--steps", "3", "--wait", "0"], "--wait cannot be combined with --steps"),
        (["--steps", "all", "--warmup", "0"], "--warmup cannot be combined with --steps all"),
        (["--every", "9", "--wait", "0"], "--wait cannot be combined with --every"),
        (["--modules", "none", "--names", "class"], "--names has no effect with --modules none"),
        (["--upload-timeout", "9"], "--upload-timeout has no effect without --upload"),
    ],
)
def test_options_without_effect_beside_others(options: list[str], message: str) -> None:
    """An option that has no effect beside another is rejected, also with the value 0 or the default."""
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_options_of_torch_under_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a tool that records instead of torch.profiler, options of torch.profiler are reported as ignored."""
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert (
        run("--shapes").stderr
        == "instrument: ignored under nsight systems, as only torch.profiler has them: --shapes\n"
    )
    assert run("--shapes", "--profiler", "torch").stderr == ""
    options = ["--upload", "file:///o", "--upload-timeout", "9"]
    assert run(*options).stderr.endswith("only torch.profiler has them: --upload, --upload-timeout\n")


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (["--wait", "4"], (4, 1, 3, None)),
        (["--wait", "1", "--warmup", "2"], (1, 2, 3, None)),
        (["--repeat", "2"], (1, 1, 3, 2)),
        (["--active", "5"], (1, 1, 5, None)),
        (["--warmup", "0"], (1, 0, 3, None)),
        ([], (None, None, None, None)),
        (["--every", "9"], (None, None, None, None)),
        (["--steps", "7"], (None, None, None, None)),
    ],
)
def test_defaults(options: list[str], plan: tuple[int | None, ...]) -> None:
    """The defaults of wait, warmup and active agree with --help."""
    found = settings(*options)
    assert plan == tuple(found.get(name) for name in ("wait", "warmup", "active", "repeat"))


def test_the_recorded_detail() -> None:
    """`--detail` is the argument of a profile, has no default of its own, and accepts the library's names."""
    assert "detail" not in settings()
    assert [settings("--detail", name)["detail"] for name in DETAILS] == list(DETAILS)
    assert "--detail has no effect with --profiler nsys" in run("--detail", "full", "--profiler", "nsys").stderr
    assert 2 == run("--detail", "all").exit_code


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--memory"], {"profile_memory": True}),
        (["--memory", "events"], {"profile_memory": True}),
        (["--memory", "--shapes"], {"profile_memory": True, "record_shapes": True}),
        (["--memory", "snapshot"], {"memory": asdict(instrument.memory_history())}),
        (["--memory=snapshot,stacks=all,entries=9"], {"memory": asdict(MemoryHistory("all", 9))}),
    ],
)
@pytest.mark.parametrize("separator", [[], ["--"]])
def test_memory(words: list[str], expected: dict[str, object], separator: list[str]) -> None:
    """`--memory` takes a value or none: the word after it may be the program."""
    result = CliRunner().invoke(app, ["run", "--print-command", *words, *separator, "train.py", "a"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith(" train.py a\n")
    (text,) = [word for word in shlex.split(result.stdout) if word.startswith("INSTRUMENT_RUN=")]
    assert expected.items() <= json.loads(text.partition("=")[2]).items()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("all", "--memory must be events, or snapshot with options such as"),
        ("snapshot,stack=all", "each once: snapshot,stack=all"),
        ("snapshot,entries=1,entries=2", "each once: snapshot,entries=1,entries=2"),
        ("snapshot,entries=0", '--memory snapshot,entries=0: "entries" must be an integer >= 1: 0'),
    ],
)
def test_wrong_values_of_memory(value: str, message: str) -> None:
    """The message names the option, the value and what is accepted."""
    result = run(f"--memory={value}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_word_after_memory_that_is_no_program(separator: list[str]) -> None:
    """It may be meant as the value of `--memory`, whose values the message then has."""
    after = CliRunner().invoke(app, ["run", "--memory", "snapshots", *separator, "train.py"])
    assert (2, "") == (after.exit_code, after.stdout)
    assert "program not found: snapshots; if this is for --memory, it must be events, or snapshot" in after.stderr
    elsewhere = CliRunner().invoke(app, ["run", "--memory", "--shapes", "snapshots", *separator, "train.py"])
    assert "instrument: program not found: snapshots\n" == elsewhere.stderr


def test_memory_without_a_profiler() -> None:
    """Windows of memory alone are windows, with their options; other options still have no effect."""
    found = settings("--profiler", "none", "--memory", "snapshot", "--steps", "all", "--ranks", "0")
    assert ("none", 0) == (found["exporter"], found["at"])
    assert "record" not in found
    result = run("--profiler", "none", "--memory", "snapshot", "--detail", "full")
    assert "--detail has no effect with --profiler none" in result.stderr
    assert "--memory has no effect with --profiler nsys" in run("--memory=snapshot", "--profiler", "nsys").stderr


def options_of_the_windows(monkeypatch: pytest.MonkeyPatch, *given: str) -> dict[str, Any]:
    """Return the options of the profile that the processes of the program make."""
    made: dict[str, Any] = {}

    def noted(driver: Any, **options: Any) -> Any:
        made.update(options)
        return new_profile(driver, **options)

    monkeypatch.setenv(RUN, json.dumps(settings(*given)))
    monkeypatch.setattr(Loop, "requested", None)
    monkeypatch.setattr(loops, "new_profile", noted)
    assert loop_from_environment.__wrapped__() is not None
    return made


def test_the_memory_history_reaches_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the program have the options of the command line."""
    made = options_of_the_windows(monkeypatch, "--memory", "snapshot,size=1GB")
    assert instrument.memory_history(size="1GB") == made["memory"]


def test_what_happens_to_the_files() -> None:
    """`--keep`, `--upload` and `--upload-timeout` are the arguments of a profile."""
    found = settings("--keep", "windows=20, age=7d,total=50G", "--upload", "file:///o", "--upload-timeout", "9.5")
    assert {"windows": 20, "age": "7d", "total": "50G"} == found["keep"]
    assert ("file:///o", 9.5) == (found["upload"], found["upload_timeout"])
    assert ["--keep windows=20, age=7d,total=50G", "--upload file:///o", "--upload-timeout 9.5"] == found[
        "run_options"
    ]
    assert set() == {"keep", "upload", "upload_timeout"} & settings().keys()


def test_the_limits_reach_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the program have the limits of the command line."""
    keep = options_of_the_windows(monkeypatch, "--keep", "windows=20,total=50G")["keep"]
    assert (instrument.keep(windows=20, total="50GB").total_bytes, 20) == (keep.total_bytes, keep.windows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "20"], "--keep must be limits such as windows=20,age=7d,total=50G, each once: 20"),
        (["--keep", "windows=1,windows=2"], "each once: windows=1,windows=2"),
        (["--keep", "windows=0"], '--keep windows=0: "windows" must be an integer >= 1: 0'),
        (["--keep", "windows=x"], "--keep windows=x: \"windows\" must be an integer >= 1: 'x'"),
        (
            ["--keep", "age=7"],
            '--keep age=7: "age" must be a number > 0 with a unit (s, m, h, d, w), such as "7d"',
        ),
        (["--keep", "total=9 miles"], "such as \"20GB\": '9 miles'"),
        (["--upload", "/backup"], '--upload must be a URL that fsspec knows, such as "s3://bucket/runs/x"'),
        (["--upload", "nowhere://me:secret@o"], "nowhere://***@o"),
        (
            ["--upload", "file:///o", "--upload-timeout", "700"],
            "--upload-timeout must be a number of seconds from 0 to 600: 700.0",
        ),
    ],
)
def test_files_that_cannot_be_kept_so(options: list[str], message: str) -> None:
    """The message names the option, the value and what is accepted."""
    result = run(*options)
    assert (2, "", 1) == (result.exit_code, result.stdout, result.stderr.count("\n"))
    assert message in result.stderr


def test_a_warning_hides_the_secrets_of_a_url() -> None:
    """The options as they were typed, which a warning shows, have no password."""
    assert ["--upload ftp://***@host/o"] == settings("--upload", "ftp://me:secret@host/o")["run_options"]
