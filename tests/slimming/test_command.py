"""The subcommand `slim`: what it prints, its options and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.start.cli import app

from .random_traces import RandomTrace
from .test_slim import write


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["slim", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.stdout.split()), " ".join(result.stderr.split())


def test_what_is_printed(tmp_path: Path) -> None:
    """The file, its size and what it holds are printed."""
    path = write(tmp_path / "trace.json", RandomTrace(1, steps=4).content)
    text, _ = run(path)
    assert (tmp_path / "trace.slim.json.gz").is_file()
    assert "trace.slim.json.gz has" in text
    assert text.endswith("Metrics and findings are the same.")
    text, _ = run(path, "--steps", 2, "--out", tmp_path / "two.json.gz")
    assert "It holds 2 of 4 steps: all numbers are those of these steps." in text
    text, _ = run(path, "--anonymize", "--key", "k", "--out", tmp_path / "two.json.gz")
    assert text.endswith("All numbers of its metrics and findings are the same.")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("gone.json",), 1, "cannot read gone.json: No such file or folder"),
        (("trace.json", "--out", "trace.json"), 2, "another file than the trace"),
        (("trace.json", "--out", "missing/out.json.gz"), 1, "cannot write to missing: No such file"),
        (("trace.json", "--key", "k"), 2, "--key needs --anonymize"),
        (("empty.json",), 1, "it is empty"),
        ((".",), 1, "this is a folder: give one file"),
        (("trace.slim.json.gz",), 2, "TRACE is a slim trace by its name, which would be replaced: pass --out"),
        (
            ("rocprof.json",),
            2,
            "must be a trace of torch.profiler (.json, .json.gz), not of rocprof: rocprof.json",
        ),
    ],
)
def test_errors(
    arguments: tuple[str, ...], code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are one sentence, and leave no file."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "trace.json", RandomTrace(1).content)
    (tmp_path / "empty.json").touch()
    (tmp_path / "rocprof.json").write_text(
        '{"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}, "agents": [], "buffer_records": {}}]}'
    )
    _, error = run(*arguments, code=code)
    assert reason in error
    assert len(list(tmp_path.iterdir())) == 3
