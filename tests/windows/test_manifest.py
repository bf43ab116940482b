"""The manifest has a line for every window, with its outcome and its files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.run_folder import entries_of, files_of
from instrument.integrations.loop import Loop
from instrument.record.handover import manifest as module
from instrument.record.handover.manifest import Manifest, append
from instrument.record.regions import dispatch

from .training import Recorder, manifest, train


def run(out: Path, count: int, **arguments: Any) -> list[dict[str, Any]]:
    with instrument.profile(out, **arguments) as prof:
        train(count, prof.step)
    assert prof.windows == manifest(out)
    return prof.windows


def test_a_recorded_window(out: Path) -> None:
    """The line has the steps and times of the window and the sizes of its files."""
    before = time.time_ns()
    (entry,) = run(out, 5, schedule=instrument.schedule("1-2"))
    after = time.time_ns()
    (file,) = entry.pop("files")
    path = out / file["path"]
    assert path.stat().st_size == file["bytes"]
    assert before < entry.pop("start_ns") < entry["end_ns"] < after
    timing = entry.pop("timing")
    keys = [
        "around_each_ns",
        "around_ns",
        "around_steps",
        "lengths",
        "own_ns",
        "recorded_ns",
        "run_ns",
        "run_steps",
        "untimed_steps",
    ]
    assert keys == sorted(timing)
    assert 0 == timing["own_ns"]
    assert [5, [[3, 4]]] == [timing["run_steps"], timing["around_steps"]]
    assert 0 < timing["recorded_ns"] < timing["run_ns"]
    assert 0 < timing["around_ns"] < timing["run_ns"]
    assert f"window-0001/rank0.{entry.pop('end_ns')}.pt.trace.json.gz" == file["path"]
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}-{re.escape(socket.gethostname())}-{os.getpid()}-\d+", entry.pop("run"))
    assert ["rss_after_bytes", "rss_before_bytes", "stall_s"] == sorted(entry.pop("cost"))
    assert ["bytes", "events", "kernels_launched", "kernels_recorded"] == sorted(entry.pop("trace"))
    expected = {
        "rank": 0,
        "window": 1,
        "phase": None,
        "phase_of": None,
        "opened_by": ["schedule"],
        "requested": False,
        "status": "recorded",
        "reason": None,
        "planned_steps": [1, 2],
        "steps": [1, 2],
        "cut_step": None,
        "exporter": "torch_profiler",
        "hidden_regions": [],
        "memory": None,
        "diagnosis": [],
    }
    assert expected == entry


@pytest.mark.parametrize(
    ("count", "schedule", "expected"),
    [
        (3, {"at": "1-4"}, [("partial", [1, 2], "the loop ended before step 3")]),
        (3, {"at": 5, "warmup": 3}, [("skipped", None, "the loop ended before step 3, in warm-up")]),
        (3, {"at": 9}, [("not reached", None, "the loop ended before step 3")]),
        (3, {"at": 0}, [("recorded", [0, 0], None)]),
        (
            3,
            {"wait": 1, "warmup": 1, "active": 1, "repeat": 3},
            [
                ("recorded", [2, 2], None),
                ("not reached", None, "the loop ended before step 3"),
                ("not reached", None, "the loop ended before step 3"),
            ],
        ),
        (2, {"every": 5}, [("not reached", None, "the loop ended before step 2")]),
    ],
)
def test_every_planned_window_has_a_line(
    out: Path, count: int, schedule: dict[str, Any], expected: list[Any]
) -> None:
    """Windows that the loop cut short or never reached have a line with the reason."""
    entries = run(out, count, schedule=instrument.schedule(**schedule), exporter=Recorder())
    assert expected == [(entry["status"], entry["steps"], entry["reason"]) for entry in entries]
    assert list(range(1, len(expected) + 1)) == [entry["window"] for entry in entries]


def _end_after_two_steps(end: str, loop: Any) -> Any:
    """Run two steps of a `profile` or `Loop`, end it the given way, and return its windows."""
    if end in ("stop", "interrupted", "complete"):
        loop.start()
        loop.step()
        loop.step()
        loop.stop(**({end: True} if end != "stop" else {}))
    else:
        with contextlib.suppress(ZeroDivisionError), loop:
            loop.step()
            loop.step()
            if end == "error":
                1 / 0  # noqa: B018
    return loop.windows


@pytest.mark.parametrize(
    ("make", "end", "counts"),
    [
        (instrument.profile, "block", False),
        (instrument.profile, "error", True),
        (instrument.profile, "stop", False),
        (Loop, "stop", False),
        (Loop, "interrupted", True),
        (Loop, "complete", True),
    ],
)
@pytest.mark.parametrize("schedule", [instrument.schedule("2"), lambda step: 3 * (step == 2)])
def test_a_step_that_was_only_announced(
    out: Path, caplog: pytest.LogCaptureFixture, make: Any, end: str, counts: bool, schedule: Any
) -> None:
    """The step that the last `step()` announces never runs and does not count, even as the only one."""
    (entry,) = _end_after_two_steps(end, make(out, schedule=schedule, exporter=Recorder()))
    assert ([2, 2] if counts else None) == entry["steps"]
    assert entry["files"]
    if not counts:
        assert ("partial", "the loop ended before step 2") == (entry["status"], entry["reason"])
        (file, *_) = entry["files"]
        assert (
            f"no step was recorded in {out} ({file['path']} covers the time after the last complete step"
            in caplog.text
        )
    assert ("was recorded in" in caplog.text) is not counts
    assert "no window was recorded" not in caplog.text


@pytest.mark.parametrize("announced", [0, 1, 3])
def test_without_a_schedule_the_entry_and_the_trace_agree(out: Path, announced: int) -> None:
    """Steps are marked from the first `step()` on; the last announced step never runs."""
    entries = run(out, announced)
    trace = instrument.read_trace(next(out.glob("window-*/*")))
    expected = list(range(1, announced))
    assert expected == trace.steps.number.tolist()
    assert [("recorded", [1, announced - 1] if expected else None)] == [
        (entry["status"], entry["steps"]) for entry in entries
    ]


def test_a_window_whose_end_is_not_known(out: Path) -> None:
    """The planned end of a window is null where it is unknown."""
    (entry,) = run(out, 3, exporter=Recorder())
    assert [0, None] == entry["planned_steps"]


def test_a_user_defined_exporter_is_named(out: Path) -> None:
    """The manifest has the name of the exporter."""
    (entry,) = run(out, 3, schedule=instrument.schedule(at=1), exporter=Recorder())
    assert "recorder" == entry["exporter"]
    assert [".txt"] == [Path(file["path"]).suffix for file in entry["files"]]


def test_regions_hidden_in_compiled_code_are_listed(out: Path) -> None:
    """Regions that torch.compile traced through are listed in the entry."""
    dispatch.hide("attention")
    (entry,) = run(out, 3, schedule=instrument.schedule(at=1), exporter=Recorder())
    dispatch.compiled_away.clear()
    assert ["attention"] == entry["hidden_regions"]


def test_ranks_that_share_a_folder_do_not_cut_each_others_lines(out: Path) -> None:
    """Each line is one write in append mode."""
    line: dict[str, Any] = {"status": "recorded", "planned_steps": (1, 2), "exporter": "e"}
    writers = [Manifest(out) for _ in range(4)]
    for window in range(50):
        for rank, writer in enumerate(writers):
            writer.add(writer.entry(rank=rank, window=window, opened_by=[], **line, hidden_regions=["x" * 1000]))
    lines = [(entry["window"], entry["rank"]) for entry in manifest(out)]
    assert [(window, rank) for window in range(50) for rank in range(4)] == lines


def test_a_folder_that_cannot_be_written_leaves_the_line_in_the_object(tmp_path: Path, lenient: None) -> None:
    """`entries` has the line even though the file cannot be written."""
    (tmp_path / "file").write_text("")
    record = Manifest(tmp_path / "file" / "runs")
    record.add(
        record.entry(rank=0, window=1, opened_by=[], status="recorded", planned_steps=(1, None), exporter="e")
    )
    assert [1] == [entry["window"] for entry in record.entries]


LINE: dict[str, Any] = {"rank": 0, "opened_by": [], "status": "recorded", "planned_steps": (1, 2), "exporter": "e"}


def windows(out: Path) -> list[int]:
    return [entry["window"] for entry in entries_of(out)]


def test_a_full_disk_destroys_no_line_of_another_rank(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's line stays when a write fails; the failed line is written once there is room."""

    class FullDiskFile(io.FileIO):
        left = 20

        def write(self, data: Any) -> int:
            if len(data) <= FullDiskFile.left:
                return super().write(data)
            if FullDiskFile.left:
                part, FullDiskFile.left = data[: FullDiskFile.left], 0
                return super().write(part)
            monkeypatch.undo()
            append(out, [b'{"window": 2}\n'])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    append(out, [b'{"window": 1}\n'])
    record = Manifest(out)
    monkeypatch.setattr(Path, "open", lambda path, mode, **_: FullDiskFile(path, mode.replace("b", "")))
    record.add(record.entry(window=3, **LINE))
    assert [1, 2] == windows(out)
    record.flush()
    assert [1, 2, 3] == windows(out)


def test_a_disk_that_has_room_again_in_the_middle_of_a_line(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The complete line is written again, since another rank may have written after its first part."""

    class ShortWriteFile(io.FileIO):
        wrote = 0

        def write(self, data: Any) -> int:
            ShortWriteFile.wrote += 1
            if ShortWriteFile.wrote > 1:
                return super().write(data)
            written = super().write(data[:20])
            with contextlib.closing(io.FileIO(self.name, "a")) as other:
                other.write(b'\n{"window": 2}\n')
            return written

    record = Manifest(out)
    out.mkdir(parents=True)
    monkeypatch.setattr(Path, "open", lambda path, mode, **_: ShortWriteFile(path, mode.replace("b", "")))
    record.add(record.entry(window=1, **LINE))
    monkeypatch.undo()
    assert [2, 1] == windows(out)


@pytest.mark.parametrize(
    "left", [b'{"window": 1}\n{"win', b'{"window": 1}\n' + b"[" * 100_000, b'{"window": 1}\n\xff\n']
)
def test_a_line_that_is_broken(out: Path, left: bytes) -> None:
    """A broken line, as a killed process leaves one, is skipped, and the next line does not join it."""
    out.mkdir(parents=True)
    (out / "manifest.jsonl").write_bytes(left)
    record = Manifest(out)
    record.add(record.entry(window=2, **LINE))
    assert [1, 2] == windows(out)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([{"path": "window-0001/a.json"}, {"path": "b"}], ["window-0001/a.json", "b"]),
        ([{"path": "/etc/passwd"}, {"path": "../b"}, {"path": 3}, {}, "b", None], []),
        ("a.json", []),
        (None, []),
    ],
)
def test_files_that_a_line_names(files: Any, expected: list[str]) -> None:
    """Only paths inside the folder are accepted as files of a window."""
    assert expected == files_of({"files": files})
    assert [] == files_of({})


def test_a_line_that_another_thread_adds_during_a_write(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread does not wait: the thread that is writing also writes its line."""
    record = Manifest(out)
    threads = [threading.Thread(target=record.add, args=(record.entry(window=2, **LINE),))]

    def write(*arguments: Any) -> None:
        for thread in threads:
            threads.remove(thread)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
        append(*arguments)

    monkeypatch.setattr(module, "append", write)
    record.add(record.entry(window=1, **LINE))
    assert [1, 2] == windows(out)
