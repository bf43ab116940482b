"""`memory="snapshot"`: the allocator's history of a window, against a stub of torch's allocator without a GPU."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.config import settings
from instrument.base.run_folder import files_of, traces_of
from instrument.record.allocator_history import window_memory
from instrument.record.allocator_history.window_memory import SnapshotDump, WindowMemory
from instrument.record.handover.window_sender import WindowSender

from ..support.allocator import FREE, Allocator, allocator
from ..support.finishing import eventually
from .training import Recorder, do_nothing, expected, manifest, reasons, train
from .training import run as run_with_torch

__all__ = ["allocator"]
DEFAULTS = ("record", "all", "python", 100_000)
OFF = ("record", None, "all", None)


def run(out: Path, body: Callable[[int], object] = do_nothing, **arguments: Any) -> Any:
    """Train with windows of an exporter that is cheap."""
    return run_with_torch(out, body, exporter=Recorder(), **arguments)


def memories(out: Path) -> list[dict[str, Any]]:
    """Return what the manifest has about memory, for each window."""
    return [line["memory"] for line in manifest(out)]


def snapshots(out: Path) -> list[Path]:
    return sorted(out.glob("*/*.memory.pickle"))


def annotated(path: Path) -> list[tuple[str, str]]:
    """Return name and stage of the begins and ends of regions in a snapshot."""
    found = instrument.read_memory(path).annotations
    return list(zip(found.text("name"), found.text("stage"), strict=True))


def allocating(allocator: Allocator) -> Any:
    return lambda number: allocator.allocate()


def test_a_window(out: Path, allocator: Allocator) -> None:
    """Its history is on in its recorded steps alone, and is a file of the window with its regions and steps."""
    schedule = instrument.schedule(at=3, warmup=1, active=2)
    run_with_torch(out, allocating(allocator), schedule=schedule, memory="snapshot")
    assert [DEFAULTS, ("attach",), ("snapshot",), OFF] == allocator.calls
    assert not allocator.on
    (line,), (path,) = manifest(out), snapshots(out)
    memory = line["memory"]
    assert ("recorded", None, 2, "python") == tuple(
        memory[key] for key in ("status", "reason", "entries", "stacks")
    )
    assert {"path": memory["file"], "bytes": memory["bytes"]} == line["files"][-1]
    assert (str(path.relative_to(out)), path.stat().st_size) == (memory["file"], memory["bytes"])
    assert 0 < memory["stall_s"] <= line["cost"]["stall_s"]
    assert 1 == len(traces_of(line)) < len(files_of(line))
    found = instrument.read_memory(path)
    assert {0: FREE} == found.free_bytes
    assert ["alloc"] * 2 == found.events.text("action")
    marks = annotated(path)
    assert memory["regions"] == len(marks)
    assert [("ProfilerStep#3", "START"), ("batch 3", "START"), ("forward", "START"), ("forward", "END")] == marks[
        :4
    ]
    assert ("ProfilerStep#4", "END") == marks[-1]
    begin, end = marks.index(("batch 4", "START")), len(marks)
    first, last = found.annotations.time_ns[[begin, end - 1]]
    assert first <= found.events.time_ns[1] <= last


def test_each_region_has_its_thread_and_its_end(out: Path, allocator: Allocator) -> None:
    """Begins and ends share a number, also where regions of two threads overlap."""

    def body(number: int) -> None:
        def work() -> None:
            with instrument.annotate("other"):
                allocator.allocate()

        thread = threading.Thread(target=work)
        with instrument.annotate("mine"):
            thread.start()
            thread.join()

    run(out, body, schedule="2", memory="snapshot")
    (path,) = snapshots(out)
    entries = pickle.loads(path.read_bytes())["external_annotations"]
    assert {"instrument"} == {entry["source"] for entry in entries}
    by_range: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        by_range.setdefault(entry["range"], []).append(entry)
    assert all(["START", "END"] == [entry["stage"] for entry in pair] for pair in by_range.values())
    threads = {entry["name"]: entry["thread"] for entry in entries}
    assert threads["mine"] == threading.get_ident() != threads["other"]


def test_the_event(out: Path, allocator: Allocator, caplog: pytest.LogCaptureFixture) -> None:
    """A snapshot that is written is an event, with the fields of the manifest."""
    caplog.set_level(logging.INFO, "instrument")
    run(out, allocating(allocator), schedule="2,5", memory=instrument.memory_history(every="1h"))
    (record,) = [record.__dict__ for record in caplog.records if record.__dict__["event"] == "window.memory"]
    first, _ = memories(out)
    assert ("INFO", 1, 0) == (record["levelname"], record["window"], record["rank"])
    assert first == {name: record[name] for name in first}


def test_options(out: Path, allocator: Allocator) -> None:
    """C++ stacks, and the number of events, of which the manifest says that there were more."""
    memory = instrument.memory_history(stacks="all", entries=3)
    run(out, allocating(allocator), schedule="2-6", memory=memory)
    assert ("record", "all", "all", 3) == allocator.calls[0]
    (found,) = memories(out)
    assert ("recorded", 3) == (found["status"], found["entries"])
    assert "only the newest 3 events of a GPU were kept" == found["reason"]


def test_more_regions_than_are_kept(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest begins and ends are there, and the manifest says that there were more."""
    monkeypatch.setattr(window_memory, "MOST", 3)
    run(out, allocating(allocator), schedule=instrument.schedule(at=1, warmup=0), memory="snapshot")
    (memory,), (path,) = memories(out), snapshots(out)
    assert ("recorded", 3) == (memory["status"], memory["regions"])
    assert "only the newest 3 begins and ends of regions were kept" == memory["reason"]
    assert ("ProfilerStep#1", "END") == annotated(path)[-1]


def test_a_region_around_the_window(out: Path, allocator: Allocator) -> None:
    """It is not in the snapshot, as nothing notes regions before the history begins, and closes as ever."""
    with instrument.annotate("epoch"):
        run(out, allocating(allocator), schedule=instrument.schedule(at=1, warmup=0), memory="snapshot")
    (path,) = snapshots(out)
    assert "epoch" not in [name for name, _ in annotated(path)]


def test_a_file_that_would_be_too_large(out: Path, allocator: Allocator) -> None:
    """The oldest events are left out, and the manifest says how many."""

    def body(number: int) -> None:
        for _ in range(1000):
            allocator.allocate()

    run(out, body, schedule="2-3", memory=instrument.memory_history(size="20kB"))
    (memory,), (path,) = memories(out), snapshots(out)
    left = len(instrument.read_memory(path).events)
    assert ("recorded", left) == (memory["status"], memory["entries"])
    assert path.stat().st_size <= 20_000
    assert f'the oldest {2000 - left:,} events are left out: "size" is 20kB' == memory["reason"]


@pytest.mark.usefixtures("lenient")
def test_a_limit_below_the_rest(out: Path, allocator: Allocator) -> None:
    """No file is written, and nothing is left of it."""
    run(out, allocating(allocator), schedule="2-3", memory=instrument.memory_history(size="60B"))
    (memory,) = memories(out)
    assert ("failed", None) == (memory["status"], memory["bytes"])
    assert "without events, it is larger than 60 bytes" in memory["reason"]
    assert [] == [path for path in out.rglob("*") if "memory" in path.name]


def test_cadence(out: Path, allocator: Allocator) -> None:
    """The first window has a snapshot, one soon after it has none, and the manifest says when one is due."""
    every = instrument.memory_history(every="1h")
    run(out, allocating(allocator), schedule="1,4", memory=every)
    first, second = memories(out)
    assert ("recorded", "not recorded") == (first["status"], second["status"])
    assert 'so that the next one is due 3.6e+03 s after it ("every")' in second["reason"]
    assert 1 == len(snapshots(out))


def record_a_requested_window(out: Path, allocator: Allocator) -> None:
    """Train with a planned window and a requested one, which both have a snapshot."""
    every = instrument.memory_history(every="1h")
    with instrument.profile(out, schedule="1", memory=every, exporter=Recorder()) as prof:
        trained = train(
            10, prof.step, lambda number: prof.trigger("a test", steps=1) if number == 4 else allocator.allocate()
        )
    assert expected(10) == trained
    assert ["recorded", "recorded"] == [memory["status"] for memory in memories(out)]


def test_a_requested_window_is_recorded(out: Path, allocator: Allocator) -> None:
    """Somebody asked for it, however young the last snapshot is."""
    record_a_requested_window(out, allocator)


def test_a_thread_that_still_makes_the_calls_of_an_earlier_snapshot(
    out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the run waits for it, although its snapshot is written."""
    publish, entry, add, start = (
        window_memory.publish,
        WindowMemory.entry,
        WindowSender.add_timing,
        SnapshotDump.start,
    )
    dumps: list[SnapshotDump] = []

    def noted(dump: SnapshotDump) -> None:
        dumps.append(dump)
        start(dump)

    def publish_slowly(*paths: Path) -> None:
        time.sleep(0.3)
        publish(*paths)

    def describe_slowly(history: WindowMemory) -> dict[str, Any] | None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
        return entry(history)

    def add_late(sender: WindowSender, *arguments: Any) -> None:
        for dump in dumps[:-1]:
            eventually(lambda dump=dump: dump.done)
        add(sender, *arguments)

    monkeypatch.setattr(SnapshotDump, "start", noted)
    monkeypatch.setattr(window_memory, "publish", publish_slowly)
    monkeypatch.setattr(WindowMemory, "entry", describe_slowly)
    monkeypatch.setattr(WindowSender, "add_timing", add_late)
    record_a_requested_window(out, allocator)


def test_out_of_memory(out: Path, allocator: Allocator) -> None:
    """The snapshot is taken before torch raises, and the program gets torch's error."""

    def body(number: int) -> None:
        allocator.allocate()
        if number == 3:
            allocator.run_out(7 * 2**30)

    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"^CUDA out of memory\.$"):
        run(out, body, schedule="2-6", memory="snapshot")
    assert [DEFAULTS, ("attach",), ("snapshot",), OFF] == allocator.calls
    (line,) = manifest(out)
    assert "partial" == line["status"]
    memory = line["memory"]
    failed = {"device": 0, "requested_bytes": 7 * 2**30, "allowed_bytes": 80 * 2**30, "free_bytes": 2**20}
    assert ("recorded", failed, 2) == (memory["status"], memory["out_of_memory"], memory["entries"])
    assert snapshots(out) == [out / memory["file"]]


def test_a_whole_run_without_a_profiler(out: Path, allocator: Allocator) -> None:
    """An error at any step is caught, and the newest events are there; nothing else is written."""

    def body(number: int) -> None:
        allocator.allocate()
        if number == 8:
            allocator.run_out()

    memory = instrument.memory_history(entries=5)
    with (
        pytest.raises(torch.cuda.OutOfMemoryError),
        instrument.profile(out, memory=memory, exporter="none") as prof,
    ):
        train(10, prof.step, body)
    (line,) = manifest(out)
    assert ("none", [line["memory"]["file"]]) == (line["exporter"], [file["path"] for file in line["files"]])
    found = instrument.read_memory(out / line["memory"]["file"])
    assert 5 == len(found.events)
    assert "ProfilerStep#8" in found.annotations.text("name")


def test_a_whole_run_beside_windows_of_torch(out: Path, tmp_path: Path, allocator: Allocator) -> None:
    """Two profiles of a loop do not disturb each other: one of the memory, one of a profiler."""
    memory = instrument.profile(tmp_path / "memory", exporter="none", memory="snapshot")
    with memory, instrument.profile(out, schedule="2-3,6", memory="snapshot") as prof:

        def step() -> None:
            prof.step()
            memory.step()

        assert expected(10) == train(10, step, allocating(allocator))
    assert [("recorded", None)] * 2 == reasons(manifest(out))
    assert {"not recorded"} == {found["status"] for found in memories(out)}
    (whole,) = memories(tmp_path / "memory")
    assert ("recorded", 10) == (whole["status"], whole["entries"])


def test_events_without_times(out: Path, allocator: Allocator) -> None:
    """Those of torch 2.1 have none, so that regions cannot be matched to them."""

    def body(number: int) -> None:
        allocator.allocate()
        for event in allocator.events:
            event.pop("time_us", None)

    run(out, body, schedule="2", memory="snapshot")
    (memory,) = memories(out)
    assert "recorded" == memory["status"]
    assert "this version of torch does not say when an event was" in memory["reason"]


def test_the_snapshot_goes_with_its_window(out: Path, tmp_path: Path, allocator: Allocator) -> None:
    """An upload copies it, and retention removes it."""
    pytest.importorskip("fsspec")
    remote = tmp_path / "remote"
    run_with_torch(
        out, allocating(allocator), schedule="1,5", memory=instrument.memory_history(every="0.001s"),
        keep=instrument.keep(windows=1), upload=f"file://{remote}",
    )  # fmt: skip
    first, second = (line for line in manifest(out) if "event" not in line)
    assert [second["memory"]["file"]] == [str(path.relative_to(out)) for path in snapshots(out)]
    assert sorted(line["memory"]["file"] for line in (first, second)) == sorted(
        str(path.relative_to(remote)) for path in snapshots(remote)
    )
    assert 2 == sum(len(traces_of(line)) for line in (first, second))


def summary_of(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> str:
    """Train with a summary in the current folder ``runs/..``, and return it."""
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.chdir(out.parent.parent)
    texts: list[str] = []
    run_with_torch(out, allocating(allocator), on_summary=texts.append, **arguments)
    (text,) = texts
    return text


def test_the_summary_names_the_snapshots(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with their number, and with the command that shows them."""
    often = instrument.memory_history(every="0.001s")
    text = summary_of(out, allocator, monkeypatch, schedule="2,5", memory=often)
    assert 2 == len(snapshots(out))
    assert "2 memory snapshots, shown by: instrument memory runs/test" == text.splitlines()[-1]
    kept = summary_of(out, allocator, monkeypatch, schedule="2,5", memory=often, keep=instrument.keep(windows=1))
    assert "1 memory snapshot, shown by: instrument memory runs/test" == kept.splitlines()[-1]


def test_the_summary_without_a_trace(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the snapshot alone."""
    text = summary_of(out, allocator, monkeypatch, memory="snapshot", exporter="none")
    assert "instrument: 1 memory snapshot, shown by: instrument memory runs/test\n" == text


def test_the_summary_without_a_snapshot(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of memory where none was recorded."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "memory" not in summary_of(out, allocator, monkeypatch, schedule="2", memory="snapshot")


def test_the_summary_in_json(
    out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event has the paths of the snapshots; without a trace, the sentence."""
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setattr("instrument.base.log.output.format", "json")
    monkeypatch.chdir(out.parent.parent)
    caplog.set_level(logging.INFO, "instrument")
    run_with_torch(out, allocating(allocator), schedule="2", memory="snapshot")
    (path,) = snapshots(out)
    run_with_torch(out, allocating(allocator), schedule="2", memory="snapshot", exporter="none")
    events = [json.loads(record.getMessage()) for record in caplog.records]
    traced, alone = (event for event in events if event["event"] == "summary")
    assert [str(path.relative_to(Path.cwd()))] == traced["memory_snapshots"]
    assert "1 memory snapshot, shown by: instrument memory runs/test" == alone["recorded"]


def test_an_error_that_the_program_handles(out: Path, allocator: Allocator) -> None:
    """The first one of a window is written, and training goes on with the same result."""

    def body(number: int) -> None:
        assert allocator.on == (number == 2)
        allocator.allocate()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            allocator.run_out(number)

    run(out, body, schedule="2-6", memory="snapshot")
    assert [DEFAULTS, ("attach",), ("snapshot",), OFF] == allocator.calls
    (memory,) = memories(out)
    assert ("recorded", 2, 1) == (memory["status"], memory["out_of_memory"]["requested_bytes"], memory["entries"])


def test_outside_of_windows_nothing_is_taken(out: Path, allocator: Allocator) -> None:
    """The observer stays, as torch cannot remove it, and does nothing."""

    def body(number: int) -> None:
        if number != 2:
            with pytest.raises(torch.cuda.OutOfMemoryError):
                allocator.run_out()

    run(out, body, schedule="2", memory="snapshot")
    run(out, body, schedule="2", memory="snapshot")
    assert ["attach"] == [call[0] for call in allocator.calls if call[0] == "attach"]
    assert 2 == sum(call == ("snapshot",) for call in allocator.calls)


def test_a_program_that_records_itself(out: Path, allocator: Allocator, caplog: pytest.LogCaptureFixture) -> None:
    """The program's own history goes on undisturbed, and the manifest has the reason for the missing snapshot."""
    torch.cuda.memory._record_memory_history(max_entries=7)
    run(out, allocating(allocator), schedule="2,5", memory="snapshot")
    assert [("record", "all", "all", 7)] == allocator.calls
    assert allocator.on
    assert 7 == len(allocator.events)
    assert ["not recorded"] * 2 == [memory["status"] for memory in memories(out)]
    assert "a history of GPU memory is on already" in memories(out)[0]["reason"]
    assert 1 == sum("goes on undisturbed" in record.message for record in caplog.records)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_program_that_begins_in_a_window(out: Path, allocator: Allocator, by_name: bool) -> None:
    """Its history begins with its own call, and stays on after the window."""
    from torch.cuda.memory import _record_memory_history

    def body(number: int) -> None:
        allocator.allocate()
        if number == 3:
            record = _record_memory_history if by_name else torch.cuda.memory._record_memory_history
            record(max_entries=50)
            assert [] == allocator.events

    run(out, body, schedule="2-5", memory="snapshot")
    assert [DEFAULTS, ("attach",), OFF, ("record", "all", "all", 50)] == allocator.calls
    assert allocator.on
    assert 6 == len(allocator.events)
    (memory,) = memories(out)
    assert ("not recorded", None) == (memory["status"], memory["file"])
    assert "so this one gave way" in memory["reason"]


def test_a_program_that_ends_the_history_in_a_window(out: Path, allocator: Allocator) -> None:
    """It stays off, and the next window records again."""

    def body(number: int) -> None:
        allocator.allocate()
        if number == 2:
            torch.cuda.memory._record_memory_history(None)

    run(out, body, schedule="2-3,6", memory="snapshot")
    assert not allocator.on
    assert ["not recorded", "recorded"] == [memory["status"] for memory in memories(out)]


def test_a_history_that_vanished(out: Path, allocator: Allocator) -> None:
    """A call that cannot be seen, such as one in C++, turned it off."""

    def body(number: int) -> None:
        allocator.on = False

    run(out, body, schedule="2", memory="snapshot")
    assert ["not recorded"] == [memory["status"] for memory in memories(out)]
    assert [DEFAULTS, ("attach",)] == allocator.calls


def test_cuda_is_used_first_in_a_window(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history begins there; nothing of CUDA is called before."""
    allocator.initialized = False
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])

    def body(number: int) -> None:
        if number == 3:
            assert [] == allocator.calls
            allocator.initialized = True
            for call, _ in torch.cuda._queued_calls:
                call()
        allocator.allocate()

    run(out, body, schedule="2-5", memory="snapshot")
    assert ["recorded", 3] == [memories(out)[0][key] for key in ("status", "entries")]
    assert [] == torch.cuda._queued_calls


def test_cuda_is_not_used(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is called, and nothing stays queued."""
    allocator.initialized = False
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    run(out, schedule="2-5", memory="snapshot")
    assert [] == allocator.calls
    assert [] == torch.cuda._queued_calls
    assert "did not use a GPU" in memories(out)[0]["reason"]


def test_without_a_gpu(out: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once that there is nothing to record, and the windows are recorded as ever."""
    monkeypatch.setattr("instrument.record.allocator_history.window_memory._logged", set())
    monkeypatch.setattr(torch.version, "cuda", None)
    run(out, schedule="2,5", memory="snapshot")
    assert [("recorded", None)] * 2 == reasons(manifest(out))
    assert ["not recorded"] * 2 == [memory["status"] for memory in memories(out)]
    assert 1 == sum("there is nothing to record" in record.message for record in caplog.records)


def test_without_the_argument(out: Path, allocator: Allocator) -> None:
    """Nothing is called, and the manifest has nothing."""
    run(out, allocating(allocator), schedule="2")
    assert [] == allocator.calls
    assert [None] == memories(out)


def test_a_window_in_warm_up_records_nothing(out: Path, allocator: Allocator) -> None:
    """The history is for recorded steps."""
    run(out, schedule=instrument.schedule(at=12, warmup=5), memory="snapshot")
    assert [] == allocator.calls
    assert [None] == memories(out)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("trace", '"memory" must be "snapshot", instrument.memory_history(...) or None: \'trace\''),
        (True, '"memory" must be "snapshot", instrument.memory_history(...) or None: True'),
    ],
)
def test_wrong_values(out: Path, given: Any, message: str) -> None:
    """A profile says what it takes."""
    with pytest.raises((TypeError, ValueError)) as raised:
        instrument.profile(out, memory=given)
    assert message == str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [{"stacks": "c++"}, {"entries": 0}, {"entries": 1.5}, {"entries": True}, {"size": "big"}, {"every": "soon"}],
)
def test_wrong_options(arguments: dict[str, Any]) -> None:
    """The message has the name and the value."""
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=f'"{name}" must be .*{arguments[name]}'.replace("+", r"\+")):
        instrument.memory_history(**arguments)
