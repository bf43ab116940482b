"""Folders, files and streams that cannot be written: training continues, and the manifest has the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import instrument
from instrument.base.config import settings

from ..support import programs, warm
from .training import (
    manifest,
    obstruct,
    raw_trace,
    reasons,
    run,
    statuses,
    steps,
    traces,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("lenient")]


def unwritable_folder(kind: str, folder: Path) -> Path:
    """Return a folder that cannot be written, for the reason in ``kind``."""
    if kind == "in no folder":
        return Path("/proc/x") if Path("/proc").is_dir() else pytest.skip("this system has no /proc")
    if kind == "read-only":
        folder.mkdir(mode=0o500)
        return pytest.skip("root can write everywhere") if os.access(folder, os.W_OK) else folder / "runs"
    folder.write_text("")
    return folder if kind == "a file" else folder / "runs"


@pytest.mark.parametrize("kind", ["a file", "in a file", "in no folder", "read-only"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning is logged at the start and one for each window; the profile has the reasons."""
    out = unwritable_folder(kind, tmp_path / "taken")
    logged_at_start: list[str] = []
    prof = run(out, lambda _: logged_at_start or logged_at_start.extend(caplog.messages))
    assert [(1, "failed"), (2, "failed")] == statuses(prof.windows)
    assert all("Error: [Errno" in entry["reason"] for entry in prof.windows)
    assert logged_at_start == caplog.messages[:1]
    assert f"cannot write to {out}: " in logged_at_start[0]
    assert ["window.failed" in message for message in caplog.messages] == [False, True, True]
    assert not any(record.exc_info for record in caplog.records)


def test_a_folder_that_becomes_a_file(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When a file replaces the folder during the run, one warning is logged, and one for each later window."""

    def replace_folder(step: int) -> None:
        if step == 1:
            out.parent.mkdir()
            out.write_text("")

    prof = run(out, replace_folder)
    assert [(1, "failed"), (2, "failed")] == statuses(prof.windows)
    logged = sorted(message.partition(" (")[0] for message in caplog.messages)
    assert [
        f"instrument: cannot write to {out}: Not a directory",
        *["instrument: window.failed"] * 2,
    ] == logged
    assert not any(record.exc_info for record in caplog.records)


def test_a_folder_that_is_removed(out: Path) -> None:
    """The folder is created again for the next window."""
    run(out, lambda step: shutil.rmtree(out) if step == 5 else None)
    assert (2, "recorded") == statuses(manifest(out))[-1]


def test_a_profile_without_windows_creates_no_folder(tmp_path: Path) -> None:
    """The folder is created for the first window, not at the start."""
    with instrument.profile(tmp_path / "runs" / "x", schedule=instrument.schedule("5")):
        assert [] == list(tmp_path.iterdir())


LIMITED = """
    import json, os, resource, sys
    import torch, instrument

    def train(step):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        for number in range(8):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            step()
        return loss.item().hex()

    with instrument.profile(sys.argv[1], schedule=instrument.schedule("2-3,5-6"), with_stack=True) as prof:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        loss = train(prof.step)
    left = [str(path) for path in os.listdir(sys.argv[1] + "/window-0001")]
    print(json.dumps([loss == train(lambda: None), prof.windows, left]))
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Torch then silently writes no trace; the manifest has the reason, and no partial file is left."""
    pytest.importorskip("resource")
    script = programs.program(LIMITED, tmp_path)
    done = warm.run(programs.python(script, [str(tmp_path / "out")]), programs.environment(), check=True)
    same, entries, left = json.loads(done.stdout.splitlines()[-1])
    assert same
    assert [(1, "failed"), (2, "failed")] == statuses(entries)
    assert all("torch could not write the trace to " in entry["reason"] for entry in entries)
    assert "Traceback" not in done.stderr
    assert [] == left


def test_a_trace_that_cannot_be_compressed(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trace is kept uncompressed, the manifest has the reason, and the log the window too."""
    run(out, on_trace_ready=obstruct)
    events = [record.__dict__ for record in caplog.records if "saving a window failed" in record.getMessage()]
    assert [(1, 0), (2, 0)] == [(event["window"], event["rank"]) for event in events]
    for entry in manifest(out):
        assert "recorded" == entry["status"]
        assert entry["reason"].startswith("not compressed: IsADirectoryError: [Errno 21] Is a directory: ")
    for path in out.rglob("*.gz"):
        path.rmdir()
    for entry, path in zip(manifest(out), traces(out), strict=True):
        assert path.name.endswith(".pt.trace.json")
        assert [{"path": str(path.relative_to(out)), "bytes": path.stat().st_size}] == entry["files"]
    assert [[2, 3], [6, 7]] == [steps(path) for path in traces(out)]


def test_a_trace_that_torch_cut_off(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated trace, as torch leaves one on a full disk, is removed."""

    def cut(self: object, path: str, **_: object) -> None:
        Path(path).write_bytes(b'{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    run(out)
    assert [("failed", [])] == [(entry["status"], entry["files"]) for entry in manifest(out)[:1]]
    assert [] == [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.jsonl"]


def buffered() -> dict[str, str]:
    """Return the environment of a program whose standard error has a buffer, as by default."""
    return {name: value for name, value in programs.environment().items() if name != "PYTHONUNBUFFERED"}


def test_a_broken_pipe_for_the_summary(tmp_path: Path) -> None:
    """When the reader of stderr is gone, the program still ends normally."""
    code = """
import os, instrument, torch
for _ in instrument.steps(range(3), "out", at=1):
    torch.ones(3) + 1
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
for _ in instrument.steps(range(3), "out", at=1):
    torch.ones(3) + 1
print("the result")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=buffered(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "the result\n" == done.stdout


def test_a_summary_that_fails(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The windows are recorded although the summary fails."""
    monkeypatch.setattr(settings, "summary", True)
    run(out, on_trace_ready=lambda prof: raw_trace(prof).write_text("unreadable"))
    assert [("recorded", None)] * 2 == reasons(manifest(out))
    assert "" == capsys.readouterr().err
    assert "the summary failed and was skipped; training continues" in caplog.text


def test_a_summary_goes_to_stderr_once(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary has the regions and the files; stdout stays empty."""
    monkeypatch.setattr(settings, "summary", True)
    run(out)
    printed = capsys.readouterr()
    assert "" == printed.out
    assert 1 == printed.err.count("Where the step went")
    assert "forward" in printed.err
    assert ".pt.trace.json.gz" in printed.err
