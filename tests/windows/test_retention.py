"""`keep` removes the files of old windows: by number, age and size, never the newest and never what is pinned."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.run_folder import entries_of, traces_in
from instrument.finish.file_keeping import StoredWindows, remove_old_windows
from instrument.record.handover.manifest import append
from instrument.record.handover.storage import Keep, Storage
from instrument.record.planning.requests import WindowRequest

from .training import manifest, run, train

DAY_NS = 86_400 * 10**9


def write_window(
    out: Path, window: int, *, rank: int = 0, days: float = 0, size: int = 100, requested: bool = False
) -> Path:
    """Write a window that ended some days ago, and its line; return its trace."""
    end_ns = time.time_ns() - int(days * DAY_NS)
    trace = out / f"window-{window:04d}" / f"rank{rank}.{end_ns}.pt.trace.json.gz"
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_bytes(bytes(size))
    files = [{"path": str(trace.relative_to(out)), "bytes": size}]
    line = {"run": "r", "rank": rank, "window": window, "end_ns": end_ns, "steps": [1, 1], "files": files}
    append(out, [json.dumps(line | {"requested": requested}).encode() + b"\n"])
    return trace


def remove(out: Path, *, rank: int = 0, now_ns: int | None = None, **limits: Any) -> list[dict[str, Any]]:
    """Apply the limits, and return the lines about what was removed."""
    return remove_old_windows(StoredWindows(out), Keep(**limits), rank, now_ns or time.time_ns())


def existing(traces: Sequence[Path]) -> list[int]:
    """Return the numbers, from 1, of the traces that are there."""
    return [number for number, trace in enumerate(traces, 1) if trace.exists()]


def test_requested_windows_outlive_automatic_ones(out: Path) -> None:
    """The windows that somebody asked for go last, but the newest window stays whatever opened it."""
    written = [write_window(out, number, requested=number in (1, 3)) for number in range(1, 7)]
    remove(out, windows=3)
    assert existing(written) == [1, 3, 6]
    remove(out, windows=2)
    assert existing(written) == [3, 6]


def test_who_asked_for_a_window(out: Path) -> None:
    """A slow step and the clock are nobody: their windows and planned ones go before that of the program."""
    with instrument.profile(out, schedule="2", triggers=["every=1000s"], trigger_steps=1) as prof:
        for number in range(40):
            if number in (5, 15):
                prof.request(WindowRequest("a slow step", 1, automatic=number == 5))
            train(1, prof.step)
    assert [line["requested"] for line in manifest(out)] == [False, False, True]


def test_a_run_keeps_its_last_windows(out: Path) -> None:
    """The manifest says which were removed and why; readers of the folder see those that are left."""
    run(out, schedule=instrument.schedule("1,3,5,7"), keep=instrument.keep(windows=2))
    assert ["window-0003", "window-0004"] == sorted(path.name for path in out.glob("window-*"))
    lines = manifest(out)
    removed = [line for line in lines if line.get("event") == "removed"]
    assert [(1, "more than 2 windows"), (2, "more than 2 windows")] == [
        (line["window"], line["reason"]) for line in removed
    ]
    assert [line["files"] for line in lines if line["window"] in (1, 2) and "event" not in line] == [
        line["files"] for line in removed
    ]
    assert [1, 2, 3, 4] == [entry["window"] for entry in entries_of(out)]
    assert [3, 4] == [entry["window"] for _, entry in traces_in(out)]
    assert [7] == instrument.read_trace(next(out.glob("window-0004/*"))).steps.number.tolist()


def test_the_log_says_what_was_removed(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The event has the fields of the line in the manifest."""
    caplog.set_level(logging.INFO, "instrument")
    run(out, schedule=instrument.schedule("1,3"), keep=instrument.keep(windows=1))
    (line,) = [line for line in manifest(out) if line.get("event") == "removed"]
    (event,) = [record.__dict__ for record in caplog.records if record.__dict__["event"] == "window.removed"]
    same = ("rank", "window", "files", "left", "reason")
    assert [line[name] for name in same] == [event[name] for name in same]
    assert (1, [], "INFO") == (event["window"], event["left"], event["levelname"])


def test_a_file_that_cannot_be_removed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says which files stay and why, once; those that another process removed are no such files."""
    first, gone, _ = [write_window(out, window) for window in (1, 2, 3)]
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path)
        if path == gone:
            raise FileNotFoundError

    monkeypatch.setattr(Path, "unlink", refuse)
    stored = StoredWindows(out)
    (line,) = remove_old_windows(stored, Keep(windows=1), 0, time.time_ns())
    left = [{"path": str(first.relative_to(out)), "reason": "Permission denied"}]
    assert (1, [], left) == (line["window"], line["files"], line["left"])
    append(out, [json.dumps(line).encode() + b"\n"])
    assert [] == remove_old_windows(stored, Keep(windows=1), 0, time.time_ns())
    monkeypatch.setattr(Path, "unlink", unlink)
    (line,) = remove_old_windows(stored, Keep(windows=1), 0, time.time_ns())
    assert (1, []) == (line["window"], line["left"])
    assert not first.exists()


def test_a_window_without_steps_replaces_none(out: Path) -> None:
    """The last `step` begins a step that never runs, and a window for it."""
    run(out, count=4, schedule=instrument.schedule(every=2, active=1), keep=instrument.keep(windows=1))
    kept = [entry for _, entry in traces_in(out)]
    assert [[2, 2]] == [entry["steps"] for entry in kept]


def test_a_later_run_counts_the_windows_of_earlier_ones(out: Path) -> None:
    """The limits are those of the folder."""
    for _ in range(3):
        run(out, schedule=instrument.schedule("1"), keep=instrument.keep(windows=2))
    assert 2 == len(list(out.glob("window-0001/*")))


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"windows": 1}, [4]),
        ({"windows": 3}, [2, 3, 4]),
        ({"age": "36h"}, [3, 4]),
        ({"age": "1s"}, [4]),
        ({"total": "250B"}, [3, 4]),
        ({"total": "1B"}, [4]),
        ({"windows": 3, "age": "36h", "total": "1GB"}, [3, 4]),
        ({"windows": 9}, [1, 2, 3, 4]),
    ],
)
def test_the_limits(out: Path, limits: dict[str, Any], kept: list[int]) -> None:
    """A window is deleted when it exceeds any limit; the newest stays."""
    traces = [write_window(out, number, days=4.2 - number) for number in (1, 2, 3, 4)]
    lines = remove(out, **limits)
    assert kept == existing(traces)
    assert [number for number in (1, 2, 3, 4) if number not in kept] == [line["window"] for line in lines]
    assert [] == remove(out, **limits)


def test_a_clock_that_was_set_back(out: Path) -> None:
    """The newest is the last in the manifest, and a window that ends in the future is not old."""
    traces = [write_window(out, 1, days=-3), write_window(out, 2, days=-2), write_window(out, 3)]
    assert [] == remove(out, age="1d")
    remove(out, windows=1)
    assert [3] == existing(traces)


def test_a_pinned_window_stays(out: Path) -> None:
    """An empty file named "keep" in its folder pins it, and it does not count."""
    traces = [write_window(out, number) for number in (1, 2, 3, 4)]
    (traces[0].parent / "keep").touch()
    remove(out, windows=2)
    assert [1, 3, 4] == existing(traces)


@pytest.mark.parametrize("path", [f"window-0001/{'x' * 300}", f"window-{'x' * 300}/a", "", "window-\0/c"])
def test_a_line_that_names_no_file(out: Path, path: str) -> None:
    """It does not keep the window's files from being removed."""
    first = write_window(out, 1)
    entry = next(entries_of(out))
    line = entry | {"files": [*entry["files"], {"path": path, "bytes": 1}]}
    (out / "manifest.jsonl").write_bytes(json.dumps(line).encode() + b"\n")
    second = write_window(out, 2)
    remove(out, windows=1)
    assert [2] == existing([first, second])


def test_a_pin_that_cannot_be_looked_for(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window stays."""
    traces = [write_window(out, number) for number in (1, 2, 3)]
    lstat = Path.lstat

    def fail(path: Path) -> os.stat_result:
        if path == traces[0].parent / "keep":
            raise OSError(errno.EIO, "Input/output error")
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", fail)
    remove(out, windows=1)
    assert [1, 3] == existing(traces)


def test_a_rank_removes_its_own_files_only(out: Path) -> None:
    """The folder of a window goes with its last file."""
    mine, others = ([write_window(out, number, rank=rank) for number in (1, 2)] for rank in (0, 1))
    remove(out, windows=1)
    assert ([2], [1, 2]) == (existing(mine), existing(others))
    remove(out, rank=1, windows=1)
    assert not mine[0].parent.exists()


def test_files_that_are_not_ours_stay(out: Path, tmp_path: Path) -> None:
    """Only what the manifest names in window folders goes, with what lies beside a trace under its name."""
    first, second = write_window(out, 1), write_window(out, 2)
    stem = first.name.removesuffix(".pt.trace.json.gz")
    page, notes = first.with_name(f"{stem}.html"), first.with_name("notes.txt")
    elsewhere = tmp_path / "precious.json"
    for path in (page, notes, elsewhere, out / "checkpoint.pt"):
        path.write_text("text")
    (out / "window-0009").mkdir()
    (out / "window-0009" / "link.json").symlink_to(elsewhere)
    (out / "window-0008").symlink_to(tmp_path)
    named = ["checkpoint.pt", "../precious.json", "window-0008/precious.json", "window-0009/link.json"]
    line = {"run": "r", "rank": 0, "window": 0, "files": [{"path": name} for name in named]}
    text = (out / "manifest.jsonl").read_bytes()
    (out / "manifest.jsonl").write_bytes(json.dumps(line).encode() + b"\n" + text)
    (removed,) = remove(out, windows=1)
    assert {first.name, page.name} == {Path(file["path"]).name for file in removed["files"]}
    assert all(path.exists() for path in (second, notes, elsewhere, out / "checkpoint.pt"))
    assert (out / "window-0009" / "link.json").is_symlink()


def test_a_folder_that_is_removed_and_made_again(out: Path) -> None:
    """The manifest is read from its beginning."""
    stored = StoredWindows(out)
    write_window(out, 1), write_window(out, 2)
    assert [1, 2] == [window.window for window in stored.of_rank(0)]
    (out / "manifest.jsonl").unlink()
    write_window(out, 3)
    assert [3] == [window.window for window in stored.of_rank(0)]


def test_a_line_that_another_rank_is_writing(out: Path) -> None:
    """It counts when it is whole."""
    stored = StoredWindows(out)
    write_window(out, 1), write_window(out, 2)
    text = (out / "manifest.jsonl").read_bytes()
    (out / "manifest.jsonl").write_bytes(text[:-20])
    assert [1] == [window.window for window in stored.of_rank(0)]
    (out / "manifest.jsonl").write_bytes(text)
    assert [1, 2] == [window.window for window in stored.of_rank(0)]


@pytest.mark.parametrize(
    ("error", "limits", "message"),
    [
        (ValueError, {}, '"keep" needs one of windows'),
        (ValueError, {"windows": 0}, '"windows" must be an integer >= 1: 0'),
        (TypeError, {"windows": "3"}, "\"windows\" must be an integer >= 1: '3'"),
        (TypeError, {"age": 7}, '"age" must be a number > 0 with a unit (s, m, h, d, w), such as "7d": 7'),
        (ValueError, {"age": "7 years"}, "such as \"7d\": '7 years'"),
        (ValueError, {"total": "20"}, "such as \"20GB\": '20'"),
        (ValueError, {"total": "0GB"}, "such as \"20GB\": '0GB'"),
    ],
)
def test_limits_that_are_not_accepted(error: type[Exception], limits: dict[str, Any], message: str) -> None:
    """The message names the argument, the value and what is accepted."""
    with pytest.raises(error) as caught:
        instrument.keep(**limits)
    assert message in str(caught.value)


def test_a_keep_that_is_no_keep(out: Path) -> None:
    """The call of `profile` raises."""
    with pytest.raises(TypeError, match=r'"keep" must be the result of instrument.keep'):
        instrument.profile(out, keep=10)


def test_units() -> None:
    """Durations are in seconds, sizes in bytes, and their case does not matter."""
    limits = instrument.keep(age="1.5h", total="2GiB")
    assert (5400, 2 * 2**30) == (limits.age_s, limits.total_bytes)
    assert (604_800, 500_000) == (instrument.keep(age="1 w").age_s, instrument.keep(total="500 kb").total_bytes)
    assert (50_000_000_000, 2000) == (
        instrument.keep(total="50G").total_bytes,
        instrument.keep(total="2k").total_bytes,
    )
    storage = Storage(limits)
    assert storage == Storage.from_json(json.loads(json.dumps(asdict(storage))))


def test_a_summary_names_the_files_that_are_left(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary covers all windows."""
    from instrument.base.config import settings

    monkeypatch.setattr(settings, "summary", True)
    with instrument.profile(
        out, schedule=instrument.schedule("1,3,5"), keep=instrument.keep(windows=1), diagnose=True
    ) as prof:
        train(8, prof.step)
    printed = capsys.readouterr().err
    assert "window-0003" in printed.replace("\n", "")
    assert "window-0001" not in printed.replace("\n", "")
    assert "  ... and 2 more files, which were removed" in printed.splitlines()
