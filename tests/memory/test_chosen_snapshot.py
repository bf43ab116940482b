"""`instrument memory` takes the folder of a run or of a window, and says which file it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

import instrument
from instrument.base.errors import TraceError
from instrument.base.run_folder import last_window
from instrument.start.cli import app

from ..support.allocator import Allocator, allocator
from .snapshots import event, write
from .test_command import output

__all__ = ["allocator"]


def snapshot(run: Path, name: str, size: int, *, end_ns: int | None = None) -> Path:
    """Write a snapshot whose peak has this size, and its line of the manifest if there is an ``end_ns``."""
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, [[event("alloc", 1, size)]])
    if end_ns is not None:
        line(run, end_ns=end_ns, files=[{"path": name, "bytes": 1}], memory={"reason": None})
    return path


def line(run: Path, **entry: object) -> None:
    """Add a line to the manifest."""
    run.mkdir(exist_ok=True)
    with (run / "manifest.jsonl").open("a") as manifest:
        manifest.write(json.dumps(entry) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks, with snapshots in two windows; the later one has a lower number."""
    run = tmp_path / "run"
    snapshot(run, "window-0002/rank0.1000.memory.pickle", 10, end_ns=5)
    snapshot(run, "window-0001/rank1.3000.memory.pickle", 31, end_ns=8)
    snapshot(run, "window-0001/rank10.3001.memory.pickle", 40, end_ns=7)
    snapshot(run, "window-0001/rank1-pid77.2000.memory.pickle", 20, end_ns=6)
    snapshot(run, "window-0003/rank0.4000.memory.pickle", 50, end_ns=9).unlink()
    line(run, end_ns=10, files=[], memory={"reason": "the last snapshot is 3 s old"})
    return run


def peak(*arguments: object) -> int:
    """Return the peak that the command prints as JSON."""
    printed = output(*map(str, arguments), "--json")
    (found,) = json.loads(printed[printed.index("{") :])["snapshots"]
    bytes_: int = found["peak_bytes"]
    return bytes_


def test_the_newest_window(run: Path) -> None:
    """Of the window that ended last and has some, the newest one of the lowest rank, or of the one named."""
    assert [31, 31, 40] == [peak(run), peak(run, "--rank", 1), peak(run, "--rank", 10)]
    assert [10, 31] == [peak(run / "window-0002"), peak(run / "window-0001")]
    said = f"{run}/window-0001/rank1.3000.memory.pickle is shown; --rank takes another one of ranks 1, 10"
    assert said in output(str(run))
    said = f"{run}/window-0002/rank0.1000.memory.pickle is shown"
    assert said in output(str(run / "window-0002")).splitlines()[0]


def test_two_folders(run: Path) -> None:
    """They are compared as two files are."""
    found = output(str(run / "window-0002"), str(run))
    assert "from rank0.1000.memory.pickle to rank1.3000.memory.pickle" in found
    files = run / "window-0002/rank0.1000.memory.pickle", run / "window-0001/rank10.3001.memory.pickle"
    assert "is shown" not in output(*map(str, files))


def test_nothing_to_show(run: Path, tmp_path: Path) -> None:
    """The message says what is there, or how to record a snapshot."""
    assert "--rank must be one of 1, 10, which have a snapshot in" in output(str(run), "--rank", "0", code=2)
    how = 'no memory snapshot: profile(memory="snapshot") or instrument run --memory snapshot records one'
    assert how in output(str(run / "window-0003"), code=1, columns=300)
    with pytest.raises(TraceError, match="this is a folder"):
        instrument.read_memory(run)
    line(tmp_path / "other", end_ns=1, files=[], memory={"reason": "there is nothing to record: no GPU"})
    assert "no memory snapshot: there is nothing to record: no GPU" in output(
        str(tmp_path / "other"), code=1, columns=300
    )


def test_a_window_without_a_line(tmp_path: Path) -> None:
    """Of a job that was killed, the newest snapshot is shown, also where an older window has a line."""
    run = tmp_path / "run"
    snapshot(run, "window-0002/rank0.2000.memory.pickle", 20)
    snapshot(run, "window-0001/rank0.1000.memory.pickle", 10)
    assert f"{run}/window-0002/rank0.2000.memory.pickle is shown" in output(str(run))
    snapshot(run, "window-0003/rank0.2900.memory.pickle", 29, end_ns=3000)
    assert 29 == peak(run)
    snapshot(run, "window-0004/rank0.4000.memory.pickle", 40)
    assert 40 == peak(run)


def test_a_line_with_a_name_that_is_too_long(run: Path) -> None:
    """It names no file, and the other lines count."""
    line(run, end_ns=20, files=[{"path": f"window-0001/{300 * 'x'}.memory.pickle"}])
    line(run, end_ns=20, steps=[1, 2], files=[{"path": f"window-0001/{300 * 'x'}.pt.trace.json"}])
    assert 31 == peak(run)
    assert str(run) == last_window(str(run))


def test_a_pipe(tmp_path: Path) -> None:
    """It is refused at once: reading a snapshot needs its size."""
    fifo = tmp_path / "rank0.1000.memory.pickle"
    os.mkfifo(fifo)
    with pytest.raises(TraceError, match="not a regular file"):
        instrument.read_memory(fifo)


def test_the_rank_of_a_file(run: Path, tmp_path: Path) -> None:
    """It is the one in its name, or 0 where the name has none."""
    file = run / "window-0001/rank10.3001.memory.pickle"
    assert 40 == peak(file, "--rank", 10)
    assert f"--rank must be 10, as {file} is of this rank, or left out: 1" in output(
        str(file), "--rank", "1", code=2
    )
    other = snapshot(tmp_path, "x.pickle", 60)
    assert 60 == peak(other, "--rank", 0)
    assert f"--rank must be 0 or left out, as the name of {other} has no rank: 1" in output(
        str(other), "--rank", "1", code=2
    )


def test_a_recorded_run(tmp_path: Path, allocator: Allocator) -> None:
    """The folder of a run as `profile` writes it, and that of its window."""
    with instrument.profile(tmp_path / "run", schedule="1-2", exporter="none", memory="snapshot") as prof:
        for _ in range(4):
            allocator.allocate(700)
            prof.step()
    assert [1400, 1400] == [peak(tmp_path / "run"), peak(tmp_path / "run" / "window-0001")]


@pytest.mark.parametrize("exporter", ["none", "torch_profiler"])
def test_summarize_names_the_snapshots(
    tmp_path: Path, allocator: Allocator, exporter: Literal["none", "torch_profiler"]
) -> None:
    """It says how many a run has and which command shows them, also without traces."""
    out = tmp_path / "run"
    with instrument.profile(out, schedule="1-2", exporter=exporter, memory="snapshot") as prof:
        for _ in range(4):
            allocator.allocate(700)
            prof.step()
    result = CliRunner().invoke(app, ["summarize", str(out)], env={"COLUMNS": "300"})
    assert (exporter == "none") == result.exit_code
    assert f"1 memory snapshot, shown by: instrument memory {out}\n" in result.output
